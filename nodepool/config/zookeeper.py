"""ZooKeeper servers: connection string, hosts and chroot (CFG-4.5)."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from nodepool.base.config_value import ConfigValue
from nodepool.base.connection_string import split_hosts
from nodepool.exceptions import ConfigError, ConfigurationError

DEFAULT_PORT = 2281

log = logging.getLogger("nodepool.config")


class ZooKeeperConnectionConfig(ConfigValue):
    """One server; ``chroot`` is '' or starts with a slash."""

    def __init__(self, host: str, port: int = 2181, chroot: str | None = None) -> None:
        self.host = host
        self.port = port
        self.chroot = chroot or ""

    def __hash__(self) -> int:
        return hash((self.host, self.port, self.chroot))

    def __repr__(self) -> str:
        return f"host={self.host} port={self.port} chroot={self.chroot}"


def _address(server: ZooKeeperConnectionConfig) -> str:
    try:
        parsed = ipaddress.ip_address(server.host)
    except ValueError:
        return f"{server.host}:{server.port}"
    host = f"[{parsed.compressed}]" if parsed.version == 6 else server.host
    return f"{host}:{server.port}"


def buildZooKeeperHosts(host_list: Sequence[ZooKeeperConnectionConfig]) -> str:
    """Return ``host:port`` + chroot of each entry, joined by commas.

    IPv6 literals without brackets get them.
    """
    if not isinstance(host_list, list):
        raise Exception("'host_list' must be a list")
    return ",".join(_address(server) + server.chroot for server in host_list)


def warn_about_chroots(host_list: Sequence[ZooKeeperConnectionConfig]) -> None:
    """Warn that older releases use a different path.

    They read everything after the first chroot, including other servers, as the path.
    """
    if any(server.chroot.rstrip("/") for server in host_list[:-1]):
        log.warning(
            "The chroot of zookeeper-servers applies to all servers; release 11.0.0 would have used the path %r",
            "/" + buildZooKeeperHosts(list(host_list)).partition("/")[2],
        )


def connections(servers: Iterable[Any]) -> list[ZooKeeperConnectionConfig]:
    """Return the connections of the option's list of dicts.

    :raises ConfigError: something is missing in it, or chroots differ.
    """
    result = []
    for index, server in enumerate(servers or []):
        where = ("zookeeper-servers", index)
        if not isinstance(server, dict) or not server.get("host"):
            raise ConfigError("required key 'host' is missing in zookeeper-servers", where=where)
        port = server.get("port", DEFAULT_PORT)
        if not isinstance(port, int) and not (isinstance(port, str) and port.isdigit()):
            raise ConfigError(f"port {port!r} of zookeeper-servers must be a number", where=(*where, "port"))
        chroot = server.get("chroot")
        if chroot and not chroot.startswith("/"):
            raise ConfigError(f"chroot {chroot!r} of zookeeper-servers must start with '/'", where=("zookeeper-servers",))
        result.append(ZooKeeperConnectionConfig(str(server["host"]), int(port), chroot))
    try:
        split_hosts(buildZooKeeperHosts(result))
    except ConfigurationError as error:
        raise ConfigError(str(error), where=("zookeeper-servers",)) from None
    return result

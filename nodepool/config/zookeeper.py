"""ZooKeeper servers: connection string, hosts and chroot (CFG-4.5)."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from typing import Any

from nodepool.base.config_value import ConfigValue
from nodepool.base.connection_string import split_hosts
from nodepool.base.option import REQUIRED, at, entries, option, values, whole
from nodepool.exceptions import ConfigError, ConfigurationError

log = logging.getLogger("nodepool.config")


def _chroot(value: object) -> object:
    if value and not str(value).startswith("/"):
        raise ValueError(f"{value!r} must start with '/'")
    text = str(value or "")
    if not text.isprintable() or {".", ".."} & set(text.split("/")):
        raise ValueError(
            f"{value!r} is not a path of ZooKeeper: '.', '..' and control characters are not "
            "allowed in it"
        )
    return value


SERVER: dict[str, Any] = {
    "host": option(str, REQUIRED, "host name or address", convert=str),
    "port": option(int, 2281, "TCP port", convert=lambda value: int(whole(value))),
    "chroot": option(
        str, "", "path of our data, which are below ``/nodepool`` in it", convert=_chroot
    ),
}
TLS: dict[str, Any] = {
    "cert": option(str, REQUIRED, "file with the client's certificate (PEM)"),
    "key": option(str, REQUIRED, "file with its key (PEM)"),
    "ca": option(str, REQUIRED, "file with the CA of the servers' certificates (PEM)"),
}


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
            "The chroot of zookeeper-servers applies to all servers; release 11.0.0 would have "
            "used the path %r",
            "/" + buildZooKeeperHosts(list(host_list)).partition("/")[2],
        )


def connections(servers: object) -> list[ZooKeeperConnectionConfig]:
    """Return the connections of the option's list of dicts.

    :raises ConfigError: something is missing in it, or chroots differ.
    """
    result = []
    for where, server in entries(servers, "zookeeper-servers", "host"):
        with at(where):
            result.append(ZooKeeperConnectionConfig(**values(SERVER, server)))
    try:
        split_hosts(buildZooKeeperHosts(result))
    except ConfigurationError as error:
        raise ConfigError(str(error), where=("zookeeper-servers",)) from None
    return result

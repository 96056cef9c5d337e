"""nodemanager.yaml: options and their defaults (NM-C.1, NM-C.4 to NM-C.6)."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import voluptuous as vol
import yaml

from nodepool.base.schema import advice
from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager.records import records, rspec
from nodepool.nodemanager.records.records import DEFAULT_CAP, DEFAULT_EXEMPT

DEFAULT_PATH = "/etc/nodepool/nodemanager.yaml"
API_SERVER_PORT = 812
#: MiB that the host keeps for itself when slivers get limits.
MEMORY_RESERVE = 512
#: MiB: bounds of the memory of a sliver that does not specify it.
LEAST_MEMORY, MOST_MEMORY = 256, 2048
TLS_PORT = 8120
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", re.ASCII)
_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})\Z")


def _ports(value: object) -> tuple[int, int]:
    match = _PORTS.match(str(value))
    if match is None or not 0 < int(match[1]) <= int(match[2]) < 65536:
        raise vol.Invalid("must be a range of ports, such as 22000-22999")
    return int(match[1]), int(match[2])


def _port(value: object) -> int:
    """Return the port; 0: any free one; -1 (from False): none."""
    if value is False:
        return -1
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 65536:
        raise vol.Invalid("must be a port number or false")
    return value


_SECONDS = vol.All(vol.Any(int, float), vol.Range(min=0.1))
_FACTOR = vol.All(vol.Any(int, float), vol.Range(min=1, max=1000))
_SCHEMA = vol.Schema(
    {
        "state-dir": str,
        "run-dir": str,
        "log-file": str,
        "backend": str,
        "host-name": str,
        "host-group": str,
        "id-base": vol.All(int, vol.Range(min=65536, max=4_000_000_000)),
        "host-reserve": vol.All(int, vol.Range(min=0, max=900)),
        "max-slivers": vol.All(int, vol.Range(min=1, max=30_000)),
        "create-concurrency": vol.All(int, vol.Range(min=1, max=256)),
        "delete-concurrency": vol.All(int, vol.Range(min=1, max=256)),
        "default-rspec": {str: vol.Any(int, str)},
        "overcommit": {"disk": _FACTOR, "memory": _FACTOR},
        "ssh": {
            "address": str,
            "listen-address": str,
            "ports": _ports,
            "mode": vol.Any("connection", "sshd"),
            "connections": vol.All(int, vol.Range(min=1, max=10_000)),
        },
        "api": {
            "unix": vol.Any(str, False),
            "old-unix": vol.Any(str, False),
            "tcp": _port,
            "controller-uids": [int],
            "tls": {
                "address": str,
                "port": _port,
                vol.Required("cert"): str,
                vol.Required("key"): str,
                vol.Required("ca"): str,
                "controllers": [str],
            },
        },
        "network": {
            "default": str,
            "cap": vol.All(int, vol.Range(min=1)),
            "exempt-ips": [str],
            "subnet": str,
            "dns": [str],
            "reach": [str],
            "connections": vol.All(int, vol.Range(min=1, max=1_000_000)),
            "isolated": bool,
            "daily-limit": vol.All(int, vol.Range(min=0)),
        },
        "sources": [
            vol.Any(
                {
                    vol.Required("slices-xml"): {
                        "url": str,
                        "file": str,
                        "ca": str,
                        "interval": _SECONDS,
                        "cert": str,
                        "key": str,
                        "default-slice": vol.Any(str, False),
                    }
                },
                {
                    vol.Required("zookeeper"): {
                        vol.Required("servers"): [dict],
                        "tls": dict,
                        "insecure": bool,
                        "timeout": _SECONDS,
                    }
                },
            )
        ],
        "tickets": {"keys": [str], "issuers": [str], "xml-keys": [str], "allow-sha1": bool},
        "delegate-accounts": vol.Any("shared", "unix"),
        "node-id": vol.Any(int, str),
        "delegates": [{vol.Required("name"): str, "ssh-keys": vol.Any(str, [str]), "methods": [str]}],
        # The only value that an operator of the original had to set.
        "SA_HOSTNAME": str,
    }
)


@dataclass(frozen=True)
class TlsConfig:
    address: str
    port: int
    cert: str
    key: str
    ca: str
    controllers: tuple[str, ...]


@dataclass(frozen=True)
class NodeManagerConfig:
    """The configuration; times are in seconds, directories absolute."""

    state_dir: str
    run_dir: str
    backend: str = "auto"
    host_name: str = ""
    host_group: str = ""
    id_base: int = 2_000_000
    host_reserve: int = 50
    max_slivers: int = 1000
    create_concurrency: int = 2
    delete_concurrency: int = 2
    default_rspec: Mapping[str, int] = field(default_factory=dict)
    #: Overcommit factors of disk and memory.
    overcommit_disk: float = 1.0
    overcommit_memory: float = 1.0
    ssh_address: str = "127.0.0.1"
    ssh_listen_address: str = "127.0.0.1"
    ssh_ports: tuple[int, int] = (22000, 22999)
    ssh_mode: str = "connection"
    ssh_connections: int = 20
    unix_socket: str | None = None
    old_unix_socket: str | None = None
    #: What slivers are given instead: with the one above they could keep others out.
    sliver_sockets: str | None = None
    #: Users of this machine with the rights of launchers.
    controller_uids: tuple[int, ...] = ()
    #: -1: none.
    tcp_port: int = API_SERVER_PORT
    tls: TlsConfig | None = None
    network: str = "none"
    network_cap: int = DEFAULT_CAP
    exempt_ips: tuple[str, ...] = DEFAULT_EXEMPT
    #: Bytes that a sliver may send per day at its full rate; 0: unlimited.
    daily_limit: int = 0
    subnet: str = "10.213.0.0/16"
    dns: tuple[str, ...] = ()
    #: Private networks, and those of this host, that slivers with nat may send to.
    reach: tuple[str, ...] = ()
    #: Connections of one sliver at the same time.
    connections: int = 4096
    #: Slivers on one bridge cannot connect to each other.
    isolated: bool = True
    sources: tuple[Mapping[str, Any], ...] = ()
    tickets: Mapping[str, Any] = field(default_factory=dict)
    delegates: tuple[Mapping[str, Any], ...] = ()
    #: shared: all delegates log in as one account; unix: each has its own (A.4).
    delegate_accounts: str = "shared"
    #: Which slices of slices.xml are ours; empty: see sources.node_id.
    node_id: str = ""
    #: Additional log in the format of the original; empty: none.
    log_file: str = ""


def load(path: str | None) -> NodeManagerConfig:
    """Return the configuration of a file; None: all defaults.

    :raises ConfigurationError: it cannot be read or is wrong; the text names file and option.
    """
    if path is None:
        return parse({}, "defaults")
    try:
        with open(path, encoding="utf-8") as stream:
            content = yaml.safe_load(stream)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from error
    return parse({} if content is None else content, path)


def parse(content: object, path: str) -> NodeManagerConfig:
    """Check and complete.

    :raises ConfigurationError: an option is wrong.
    """
    try:
        given = _SCHEMA(content)
    except vol.MultipleInvalid as errors:
        texts = [
            f"{'.'.join(str(part) for part in error.path) or 'top level'}: {error.msg}{advice(_SCHEMA, error)}"
            for error in errors.errors
        ]
        raise ConfigurationError(f"{path}: {'; '.join(texts)}") from None
    try:
        defaults = rspec.validate(given.get("default-rspec", {}))
    except rspec.RSpecError as error:
        raise ConfigurationError(f"{path}: default-rspec: {error}") from None
    _check(given, path)
    root = os.geteuid() == 0
    if root:  # an ordinary user's slivers have no limit together, only one for each process
        defaults.setdefault("nm_mem_limit", default_memory(total_memory()))
    home = os.path.expanduser("~/.local/state/nodepool-nodemanager")
    runtime = os.environ.get("XDG_RUNTIME_DIR") or home
    run_dir = os.path.abspath(given.get("run-dir", "/run/nodepool" if root else os.path.join(runtime, "nodepool")))
    ssh, api, network = given.get("ssh", {}), given.get("api", {}), given.get("network", {})
    address = ssh.get("address", "127.0.0.1")
    unix = api.get("unix", os.path.join(run_dir, "nodemanager.api"))
    processors = os.cpu_count() or 1
    sources = list(given.get("sources", []))
    if given.get("SA_HOSTNAME"):
        sources.append({"slices-xml": {"url": f"https://{given['SA_HOSTNAME']}/xml/slices-0.5.xml"}})
    for source in sources:
        options = source.get("slices-xml")
        if options is not None and ("url" in options) == ("file" in options):
            raise ConfigurationError(f"{path}: sources: slices-xml needs either url or file")
    return NodeManagerConfig(
        state_dir=os.path.abspath(given.get("state-dir", "/var/lib/nodepool/nodemanager" if root else home)),
        run_dir=run_dir,
        backend=given.get("backend", "auto"),
        host_name=given.get("host-name", socket.gethostname()),
        host_group=given.get("host-group", ""),
        id_base=given.get("id-base", 2_000_000),
        host_reserve=given.get("host-reserve", 50),
        max_slivers=given.get("max-slivers", 1000),
        create_concurrency=given.get("create-concurrency", processors),
        delete_concurrency=given.get("delete-concurrency", processors),
        default_rspec=defaults,
        overcommit_disk=given.get("overcommit", {}).get("disk", 1.0),
        overcommit_memory=given.get("overcommit", {}).get("memory", 1.0),
        ssh_address=address,
        ssh_listen_address=ssh.get("listen-address", address),
        ssh_ports=ssh.get("ports", (22000, 22999)),
        ssh_mode=ssh.get("mode", "connection"),
        ssh_connections=ssh.get("connections", 20),
        unix_socket=unix or None,
        old_unix_socket=api.get("old-unix") or None,
        sliver_sockets=os.path.join(run_dir, "slivers") if unix else None,
        controller_uids=tuple(api.get("controller-uids", ())),
        tcp_port=api.get("tcp", API_SERVER_PORT if root else -1),
        tls=_tls(api.get("tls")),
        network=network.get("default", "none"),
        network_cap=network.get("cap", DEFAULT_CAP),
        exempt_ips=tuple(network.get("exempt-ips", DEFAULT_EXEMPT)),
        daily_limit=network.get("daily-limit", 0) << 20,
        subnet=network.get("subnet", "10.213.0.0/16"),
        dns=tuple(network.get("dns", ())),
        reach=tuple(network.get("reach", ())),
        connections=network.get("connections", 4096),
        isolated=network.get("isolated", True),
        sources=tuple(sources),
        tickets=given.get("tickets", {}),
        delegates=tuple(given.get("delegates", ())),
        delegate_accounts=given.get("delegate-accounts", "shared"),
        node_id=str(given.get("node-id", "")),
        log_file=given.get("log-file", ""),
    )


def total_memory() -> int:
    """Return the memory of this machine in MiB."""
    with open("/proc/meminfo") as file:
        return int(file.readline().split()[1]) // 1024


def default_memory(total: int) -> int:
    """Return the default memory in MiB: at most a quarter of the host, shared by all jobs."""
    return max(LEAST_MEMORY, min(MOST_MEMORY, (total - MEMORY_RESERVE) // 4))


def _check(given: Mapping[str, Any], path: str) -> None:
    """Check what a schema cannot express.

    :raises ConfigurationError: names the option.
    """
    from nodepool.nodemanager.api.methods import METHODS, canonical

    name = given.get("host-name")
    if name is not None and not _HOST.fullmatch(name):
        raise ConfigurationError(f"{path}: host-name: {name!r} is not a valid host name")
    network = given.get("network", {})
    if not records.NETWORK.fullmatch(network.get("default", "none")):
        raise ConfigurationError(f"{path}: network.default: must be none, nat or bridge:INTERFACE, not {network['default']!r}")
    for option, values in (
        ("exempt-ips", network.get("exempt-ips", [])),
        ("subnet", [network.get("subnet", "10.213.0.0/16")]),
        ("dns", network.get("dns", [])),
        ("reach", network.get("reach", [])),
    ):
        for value in values:
            try:
                if ipaddress.ip_network(value).version == 6 and option in ("reach", "subnet", "dns"):
                    raise ValueError(f"{value}: network nat is IPv4 only")
            except ValueError as error:
                raise ConfigurationError(f"{path}: network.{option}: {error}") from None
    if given.get("id-base", 2_000_000) + (given.get("max-slivers", 1000) + 1) * 65536 > 2**32:
        raise ConfigurationError(
            f"{path}: id-base: too high for {given.get('max-slivers', 1000)} slivers of 65536 ids; lower id-base or max-slivers"
        )
    tls = given.get("api", {}).get("tls")
    if tls is not None and not tls.get("controllers"):
        raise ConfigurationError(
            f"{path}: api.tls.controllers: missing or empty; list the names in the certificates of the launchers, "
            "such as [launcher1.example.org]; no other certificate of that CA has their rights"
        )
    for number, entry in enumerate(given.get("delegates", ())):
        keys = entry.get("ssh-keys", "")
        try:
            rspec.check_name(entry["name"])
            records.clean_keys("\n".join(keys) if isinstance(keys, list) else keys)
        except ValueError as error:
            raise ConfigurationError(f"{path}: delegates.{number}: {error}") from None
        unknown = sorted(method for method in entry.get("methods", ()) if canonical(method) not in METHODS)
        if unknown:
            raise ConfigurationError(
                f"{path}: delegates.{number}: methods: {', '.join(unknown)}: no such method; there are "
                f"{', '.join(sorted(METHODS))}"
            )


def _tls(given: dict[str, Any] | None) -> TlsConfig | None:
    if given is None:
        return None
    return TlsConfig(
        given.get("address", "0.0.0.0"),
        given.get("port", TLS_PORT),
        given["cert"],
        given["key"],
        given["ca"],
        tuple(given["controllers"]),
    )

"""nodemanager.yaml: options and their defaults (NM-C.1, NM-C.4 to NM-C.6)."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from typing import Any, cast

import voluptuous as vol
import yaml

from nodepool.base.option import REQUIRED, Section, derived, option, schema
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
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", re.ASCII)
PROCESSORS: int = derived("processors of the host", lambda _config, _name: os.cpu_count() or 1)
_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})\Z")


def _home() -> str:
    return os.path.expanduser("~/.local/state/nodepool-nodemanager")


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
_PORT = vol.All(vol.Any(int, bool), _port)
_AT_ONCE = vol.All(int, vol.Range(min=1, max=256))


class Overcommit(Section):
    disk: float = option(
        _FACTOR,
        1.0,
        "of what slivers are promised; more than 1: they may break each other's file systems",
    )
    memory: float = option(_FACTOR, 1.0, "of what slivers are promised")


class Ssh(Section):
    address: str = option(
        str,
        "127.0.0.1",
        "address of the slivers; launchers on other machines need one that they reach",
    )
    listen_address: str = option(
        str, derived("``address``", lambda ssh, _name: ssh.address), "address to listen on"
    )
    ports: tuple[int, int] = option(
        vol.All(str, _ports), (22000, 22999), "one for each sliver", shown="22000-22999"
    )
    mode: str = option(
        vol.Any("connection", "sshd"),
        "connection",
        "``sshd``: each sliver with a network runs its own server, at its own address and port 22",
    )
    connections: int = option(
        vol.All(int, vol.Range(min=1, max=10_000)), 20, "maximum logins of one sliver at a time"
    )


class Tls(Section):
    """For launchers on other machines, with certificates of one CA on both sides."""

    address: str = option(str, "0.0.0.0", "address to listen on")
    port: int = option(_PORT, 8120, "port to listen on")
    cert: str = option(str, REQUIRED, "file with our certificate")
    key: str = option(str, REQUIRED, "file with its key")
    ca: str = option(str, REQUIRED, "file with the CA of the launchers' certificates")
    controllers: tuple[str, ...] = option(
        [str], (), "names in the certificates of the launchers; required", convert=tuple
    )


class Api(Section):
    unix: str | None = option(
        vol.Any(str, False),
        "",
        "Unix socket; false: none",
        convert=lambda path: path or None,
        shown="``nodemanager.api`` in run-dir",
    )
    old_unix: str | None = option(
        vol.Any(str, False),
        None,
        "additional path of the socket",
        convert=lambda path: path or None,
    )
    tcp: int = option(
        _PORT,
        derived("812 as root", lambda _api, _name: API_SERVER_PORT if os.geteuid() == 0 else -1),
        "port on the loopback interface; false: none; it gives nobody the rights of root or of "
        "launchers",
    )
    controller_uids: tuple[int, ...] = option(
        [int],
        (),
        "users of this machine with the rights of launchers, at the Unix socket",
        convert=tuple,
    )
    tls: Tls | None = option(Tls, None, "for launchers on other machines", stored=False)


class NetworkConfig(Section):
    default: str = option(str, "none", "``none``, ``nat`` or ``bridge:INTERFACE``")
    cap: int = option(vol.All(int, vol.Range(min=1)), DEFAULT_CAP, "bit/s of all slivers together")
    exempt_ips: tuple[str, ...] = option(
        [str], DEFAULT_EXEMPT, "addresses to which other limits apply", convert=tuple
    )
    subnet: str = option(str, "10.213.0.0/16", "addresses of slivers with ``nat``")
    dns: tuple[str, ...] = option([str], (), "DNS servers", convert=tuple, shown="the host's")
    reach: tuple[str, ...] = option(
        [str],
        (),
        "private networks that slivers with ``nat`` may use, and those of this host; others are "
        "refused",
        convert=tuple,
    )
    connections: int = option(
        vol.All(int, vol.Range(min=1, max=1_000_000)),
        4096,
        "maximum connections of one sliver at a time",
    )
    isolated: bool = option(bool, True, "slivers on one bridge cannot connect to each other")
    daily_limit: int = option(
        vol.All(int, vol.Range(min=0)),
        0,
        "MiB that a sliver may send per day at its full rate; 0: no limit",
        convert=lambda mebibytes: mebibytes << 20,
    )


_SLICES_XML = {
    "url": option(str, None, "address of the list; or ``file``"),
    "file": option(str, None, "file with the list; or ``url``"),
    "ca": option(str, None, "file with the CA of the server", shown="those of the system"),
    "interval": option(_SECONDS, None, "seconds between two readings", shown="10"),
    "cert": option(str, None, "file with our certificate"),
    "key": option(str, None, "file with its key"),
    "default-slice": option(
        vol.Any(str, False),
        None,
        "slice whose resources are the defaults of others; false: it is one like any other",
    ),
}
_ZOOKEEPER = {
    "servers": option([dict], REQUIRED, "as in nodepool.yaml: ``host``, ``port``, ``chroot``"),
    "tls": option(dict, None, "as in nodepool.yaml: ``cert``, ``key``, ``ca``"),
    "insecure": option(bool, False, "connect without TLS"),
    "timeout": option(_SECONDS, None, "of the session in seconds", shown="10"),
}
_TICKETS = {
    "keys": option([str], None, "files with public keys of who may issue tickets"),
    "issuers": option([str], None, "names of who may issue tickets"),
    "xml-keys": option([str], None, "files with certificates of issuers of XML tickets"),
    "allow-sha1": option(bool, False, "accept signatures with SHA-1"),
}
_DELEGATE = {
    "name": option(str, REQUIRED, "name of the account"),
    "ssh-keys": option(vol.Any(str, [str]), None, "public keys that can log in"),
    "methods": option([str], None, "methods that it may call for all slivers"),
}


class NodeManagerConfig(Section):
    """The configuration; times are in seconds, directories absolute."""

    state_dir: str = option(
        str,
        derived(
            "/var/lib/nodepool/nodemanager as root",
            lambda config, _name: "/var/lib/nodepool/nodemanager" if config.root else _home(),
        ),
        "where slivers live; needs space for their disks",
        convert=os.path.abspath,
    )
    run_dir: str = option(
        str,
        derived(
            "/run/nodepool as root",
            lambda config, _name: (
                "/run/nodepool"
                if config.root
                else os.path.join(os.environ.get("XDG_RUNTIME_DIR") or _home(), "nodepool")
            ),
        ),
        "sockets and other things of the running daemon",
        convert=os.path.abspath,
    )
    log_file: str = option(str, "", "additional log in the format of the original")
    backend: str = option(
        str,
        "auto",
        "``native`` or ``rootless``, ``podman``, ``nspawn``; ``auto``: one of the first two",
    )
    host_name: str = option(
        str,
        derived("the host's name", lambda _config, _name: socket.gethostname()),
        "name of this host for launchers, and in tickets",
    )
    host_group: str = option(str, "", "an availability zone of the launcher")
    id_base: int = option(
        vol.All(int, vol.Range(min=65536, max=4_000_000_000)), 2_000_000, "first user id of slivers"
    )
    host_reserve: int = option(
        vol.All(int, vol.Range(min=0, max=900)),
        50,
        "per mille of the CPU that no guarantee may take",
    )
    max_slivers: int = option(
        vol.All(int, vol.Range(min=1, max=30_000)), 1000, "maximum number of slivers"
    )
    create_concurrency: int = option(
        _AT_ONCE, PROCESSORS, "slivers that are created at the same time"
    )
    delete_concurrency: int = option(
        _AT_ONCE, PROCESSORS, "slivers that are deleted at the same time"
    )
    default_rspec: dict[str, int] = option(
        {str: vol.Any(int, str)}, {}, "resources of slivers whose record does not say otherwise"
    )
    overcommit: Overcommit = option(
        Overcommit, cast(Any, {}), "overcommit factors", convert=Overcommit
    )
    ssh: Ssh = option(Ssh, cast(Any, {}), "logins", convert=Ssh)
    api: Api = option(Api, cast(Any, {}), "the API", stored=False)
    network: NetworkConfig = option(
        NetworkConfig, cast(Any, {}), "networks of slivers", convert=NetworkConfig
    )
    sources: tuple[Mapping[str, Any], ...] = option(
        [
            vol.Any(
                {"slices-xml": option(_SLICES_XML, REQUIRED, "slices of an authority")},
                {"zookeeper": option(_ZOOKEEPER, REQUIRED, "records of launchers")},
            )
        ],
        (),
        "records of slivers from elsewhere; launchers use the API",
        convert=tuple,
    )
    tickets: dict[str, Any] = option(_TICKETS, {}, "who may issue tickets")
    delegate_accounts: str = option(
        vol.Any("shared", "unix"),
        "shared",
        "``unix``: each delegate has its own account; ``shared``: all log in as one",
    )
    node_id: str = option(vol.Any(int, str), "", "id of this node in slices.xml", convert=str)
    delegates: tuple[Mapping[str, Any], ...] = option(
        [_DELEGATE], (), "accounts that may only make API calls", convert=tuple
    )
    sa_hostname: str | None = option(
        str,
        None,
        "host of the authority, the only value that an operator of the original had to set",
        name="SA_HOSTNAME",
    )

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.root = os.geteuid() == 0
        super().__init__(options)
        given = options.get("api") or {}
        self.api = Api({"unix": os.path.join(self.run_dir, "nodemanager.api"), **given})
        self.api.tls = Tls(given["tls"]) if "tls" in given else None
        if self.sa_hostname:
            self.sources += (
                {"slices-xml": {"url": f"https://{self.sa_hostname}/xml/slices-0.5.xml"}},
            )

    @property
    def sliver_sockets(self) -> str | None:
        """Return the directory of the sockets that slivers get.

        With the common one they could keep others out.
        """
        return os.path.join(self.run_dir, "slivers") if self.api.unix else None


_SCHEMA = vol.Schema(schema(NodeManagerConfig))


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
            f"{'.'.join(str(part) for part in error.path) or 'top level'}: "
            f"{error.msg}{advice(_SCHEMA, error)}"
            for error in errors.errors
        ]
        raise ConfigurationError(f"{path}: {'; '.join(texts)}") from None
    try:
        defaults = rspec.validate(given.get("default-rspec", {}))
    except rspec.RSpecError as error:
        raise ConfigurationError(f"{path}: default-rspec: {error}") from None
    config = NodeManagerConfig(given)
    config.default_rspec = defaults
    _check(config, path)
    if config.root:  # an ordinary user's slivers have no limit together, only one for each process
        defaults.setdefault("nm_mem_limit", default_memory(total_memory()))
    for source in config.sources:
        options = source.get("slices-xml")
        if options is not None and ("url" in options) == ("file" in options):
            raise ConfigurationError(f"{path}: sources: slices-xml needs either url or file")
    return config


def total_memory() -> int:
    """Return the memory of this machine in MiB."""
    with open("/proc/meminfo") as file:
        return int(file.readline().split()[1]) // 1024


def default_memory(total: int) -> int:
    """Return the default memory in MiB: at most a quarter of the host, shared by all jobs."""
    return max(LEAST_MEMORY, min(MOST_MEMORY, (total - MEMORY_RESERVE) // 4))


def _check(config: NodeManagerConfig, path: str) -> None:
    """Check what a schema cannot express.

    :raises ConfigurationError: names the option.
    """
    from nodepool.nodemanager.api.methods import METHODS, canonical

    network, tls = config.network, config.api.tls
    if config.host_name != socket.gethostname() and not _HOST.fullmatch(config.host_name):
        raise ConfigurationError(
            f"{path}: host-name: {config.host_name!r} is not a valid host name"
        )
    if not records.NETWORK.fullmatch(network.default):
        raise ConfigurationError(
            f"{path}: network.default: must be none, nat or bridge:INTERFACE, not "
            f"{network.default!r}"
        )
    for name, addresses in (
        ("exempt-ips", network.exempt_ips),
        ("subnet", (network.subnet,)),
        ("dns", network.dns),
        ("reach", network.reach),
    ):
        for value in addresses:
            try:
                if ipaddress.ip_network(value).version == 6 and name != "exempt-ips":
                    raise ValueError(f"{value}: network nat is IPv4 only")
            except ValueError as error:
                raise ConfigurationError(f"{path}: network.{name}: {error}") from None
    if config.id_base + (config.max_slivers + 1) * 65536 > 2**32:
        raise ConfigurationError(
            f"{path}: id-base: too high for {config.max_slivers} slivers of 65536 ids; lower "
            "id-base or max-slivers"
        )
    if tls is not None and not tls.controllers:
        raise ConfigurationError(
            f"{path}: api.tls.controllers: missing or empty; list the names in the certificates of "
            "the launchers, "
            "such as [launcher1.example.org]; no other certificate of that CA has their rights"
        )
    for number, entry in enumerate(config.delegates):
        keys = entry.get("ssh-keys", "")
        try:
            rspec.check_name(entry["name"])
            records.clean_keys("\n".join(keys) if isinstance(keys, list) else keys)
        except ValueError as error:
            raise ConfigurationError(f"{path}: delegates.{number}: {error}") from None
        unknown = sorted(
            method for method in entry.get("methods", ()) if canonical(method) not in METHODS
        )
        if unknown:
            raise ConfigurationError(
                f"{path}: delegates.{number}: methods: {', '.join(unknown)}: no such method; there "
                "are "
                f"{', '.join(sorted(METHODS))}"
            )

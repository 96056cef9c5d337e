"""Firewall for slivers: one nftables table in two families (NM-C.4).

It controls the traffic between slivers, this host and other networks.
No rule names a sliver: the rules match device names that start with "nm", and need no change per
sliver.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.kernel import commands
from nodepool.nodemanager.network.tools import NetworkError, run, sysctl

API_PORT, DNS_PORT = 812, 53
FAMILIES = ("inet", "bridge")
FORWARD = "net/ipv4/ip_forward"
#: Metadata services of clouds, which hold secrets, and addresses of the host itself: always
#: blocked, whatever `reach` says.
FORBIDDEN = (
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "168.63.129.16/32",
    "100.100.100.200/32",
    "192.0.0.0/24",
)
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
#: Seconds in which a sliver may start as many connections as it may have open.
STARTS = 64
#: A packet that a sliver sent through a bridge has this bit in its mark until it leaves the host.
BRIDGED = 0x1000
#: Files with the resolvers of this host; the second one where the first names a resolver on the
#: host itself.
_RESOLVERS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
_ROUTES = Path("/proc/net/route")
_BRIDGES_FILTERED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
_TABLE = re.compile(r"^table inet (nodemanager\S*)$", re.MULTILINE)
_STRANGERS = "chain strangers {"


def _set(name: str, networks: Iterable[str]) -> str:
    """Return a named set; nft refuses those without elements or with overlapping ones."""
    merged = ipaddress.collapse_addresses(
        ipaddress.IPv4Network(network, strict=False) for network in networks
    )
    elements = ", ".join(str(network) for network in merged)
    return (
        f"set {name} {{ type ipv4_addr; flags interval; "
        f"{f'elements = {{ {elements} }};' if elements else ''} }}"
    )


def _entries(path: Path, keywords: str) -> list[list[str]]:
    """Return the words of each line of a resolv.conf that begins with one of the keywords.

    As for the C library, a space or a tab follows the keyword.

    :param keywords: separated by ``|``.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line.split() for line in lines if re.match(rf"({keywords})[ \t]+[^ \t]", line)]


def resolvers(given: Iterable[str]) -> list[str]:
    """Return the DNS servers that slivers may use: the given ones or this host's (IPv4)."""
    found = list(given)
    for path in _RESOLVERS if not found else ():
        found += [words[1] for words in _entries(path, "nameserver")]
    usable = []
    for text in found:
        with contextlib.suppress(ValueError):
            if not ipaddress.IPv4Address(text).is_loopback:
                usable.append(text)
    return list(dict.fromkeys(usable))


def resolv_conf(given: Iterable[str]) -> bytes | None:
    """Return resolv.conf of slivers, without resolvers on this host; None: no server known."""
    servers = resolvers(given)[:3]
    lines = [["nameserver", server] for server in servers]
    # In their order: of several, the C library uses the last search or domain.
    lines += _entries(_RESOLVERS[0], "search|domain|options")
    return "".join(f"{' '.join(line)}\n" for line in lines).encode() if servers else None


def _routes() -> list[list[str]]:
    """Return the words of each IPv4 route of this host."""
    return (
        [line.split() for line in _ROUTES.read_text().splitlines()[1:]] if _ROUTES.exists() else []
    )


def uplink() -> str | None:
    """Return the device of the default route of this host with the lowest metric."""
    return min(
        ((int(words[6]), words[0]) for words in _routes() if words[1] == words[7] == "00000000"),
        default=(0, None),
    )[1]


def connected() -> list[str]:
    """Return the IPv4 networks of this host, without those of slivers."""
    found = []
    for words in _routes():
        device, destination, gateway = words[:3]
        if gateway == "00000000" and destination != "00000000" and not device.startswith("nm"):
            address, mask = (
                socket.inet_ntoa(struct.pack("=I", int(word, 16)))
                for word in (destination, words[7])
            )
            found.append(str(ipaddress.IPv4Network(f"{address}/{mask}", strict=False)))
    return found


def ruleset(table: str, config: NodeManagerConfig, strangers: bool) -> str:
    """Return the table, which replaces itself as a whole.

    TCP segments fit the devices on both sides of this host, whose MTU may be smaller than that of a
    sliver and may change; path MTU discovery alone fails where ICMP is filtered or an overlay
    network drops larger packets. A source address is valid if the route back to it uses the device
    that the packet came from.

    :param strangers: this host was no router before: do not forward packets from or to others.
    """
    subnet = str(ipaddress.ip_network(config.network.subnet, strict=False))
    # Closed connections are not counted, but occupy their entries for two minutes.
    flows, starts = config.network.connections, max(1, config.network.connections // STARTS)
    # Frames within one bridge pass here, too, if the host filters bridged frames (br_netfilter).
    bridges = (
        'meta iifkind "bridge" meta oifkind "bridge" return;' if _on(_BRIDGES_FILTERED) else ""
    )
    return f"""
table bridge {table} {{}}
delete table bridge {table}
table bridge {table} {{
  chain ports {{
    type filter hook prerouting priority filter; policy accept;
    iifname "nm*" meta mark set meta mark or {BRIDGED:#x}
  }}
}}
table inet {table} {{}}
delete table inet {table}
table inet {table} {{
  {_set("forbidden", [*FORBIDDEN, subnet])}
  {_set("reach", config.network.reach)}
  {_set("near", [*PRIVATE, *connected()])}
  {_set("resolvers", resolvers(config.network.dns))}
  set starts {{ type ifname; size 65535; flags dynamic, timeout; timeout 1h; }}
  set flows {{ type ifname; size 65535; flags dynamic; }}
  chain early {{
    type filter hook prerouting priority raw; policy accept;
    iifname "nm*" meta nfproto ipv6 drop
    iifname "nm*" fib saddr . iif oif missing drop
  }}
  chain few {{
    ct state new add @starts {{ iifname limit rate over {starts}/second \
      burst {flows} packets }} drop
    ct state new add @flows {{ iifname ct count over {flows} }} drop
  }}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname "nm*" jump to_host
    meta mark and {BRIDGED:#x} == {BRIDGED:#x} jump to_bridge
  }}
  chain to_host {{
    ct state established,related accept
    fib daddr . iif type != local drop
    jump few
    tcp dport {{ {API_PORT}, {DNS_PORT} }} accept
    udp dport {DNS_PORT} accept
    drop
  }}
  chain to_bridge {{
    ct state established,related accept
    tcp dport {{ {API_PORT}, {DNS_PORT} }} accept
    udp dport {{ {DNS_PORT}, 67, 547 }} accept
    icmp type echo-request accept
    icmpv6 type echo-request accept
    icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit }} accept
    drop
  }}
  chain segments {{
    type filter hook forward priority mangle; policy accept;
    iifname "nm*" tcp flags syn tcp option maxseg size set rt mtu
    oifname "nm*" tcp flags syn tcp option maxseg size set rt mtu
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname "nm*" oifname "nm*" drop
    oifname "nm*" ct state established,related accept
    oifname "nm*" drop
    iifname "nm*" goto outside
    {"meta nfproto ipv4 jump strangers" if strangers else ""}
  }}
  chain outside {{
    jump few
    ip daddr @resolvers udp dport {DNS_PORT} accept
    ip daddr @resolvers tcp dport {DNS_PORT} accept
    ip daddr @forbidden drop
    ip daddr @reach accept
    ip daddr @near drop
  }}
  {f"chain strangers {{ {bridges} drop; }}" if strangers else ""}
  chain outgoing {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {subnet} iifname "nm*" oifname != "nm*" masquerade
  }}
}}
"""


def _on(path: Path) -> bool:
    return path.exists() and path.read_text().strip() not in ("", "0")


class Firewall:
    """The tables of one daemon. Not thread-safe: its owner has a lock."""

    def __init__(self, table: str, config: NodeManagerConfig) -> None:
        self._table = table
        self._config = config
        self._loaded = ""

    def load(self, forward: bool) -> None:
        """Load the rules that fit the host now; `forward`: the host has to route for slivers.

        The rules themselves record that the host was no router before. They live exactly as long as
        the setting does, also if the daemon is killed or the host restarts.

        :raises NetworkError: the kernel refuses the rules.
        """
        known = _STRANGERS in self._loaded if self._loaded else any(map(_has_strangers, _tables()))
        switch = forward and not _on(Path("/proc/sys", FORWARD))
        text = ruleset(self._table, self._config, known or switch)
        if text != self._loaded or not self._is_complete():
            run("nft", ["-f", "-"], text)
            self._loaded = text
        if switch:
            sysctl(FORWARD, 1)

    def _is_complete(self) -> bool:
        """Return whether nobody has removed the rules, as a reload of nftables.service does."""
        return {f"table {family} {self._table}" for family in FAMILIES} <= set(
            run("nft", ["list", "tables"]).splitlines()
        )

    def remove(self) -> None:
        """Remove the rules, and stop routing if only our daemons needed it. Raises NetworkError."""
        if commands.find("nft") is None:
            return
        tables = _tables()
        if (
            self._table in tables
            and _has_strangers(self._table)
            and not any(_has_strangers(table) for table in tables if table != self._table)
        ):
            sysctl(FORWARD, 0)
        run(
            "nft",
            ["-f", "-"],
            "".join(
                f"table {family} {self._table} {{}}\ndelete table {family} {self._table}\n"
                for family in FAMILIES
            ),
        )
        self._loaded = ""


def _tables() -> list[str]:
    """Return the tables of all daemons on this host."""
    return _TABLE.findall(run("nft", ["list", "tables", "inet"]))


def _has_strangers(table: str) -> bool:
    with contextlib.suppress(NetworkError):  # deleted meanwhile
        return _STRANGERS in run("nft", ["list", "table", "inet", table])
    return False

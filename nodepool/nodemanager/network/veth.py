"""Outbound network of slivers: a veth pair each, with nat or on a bridge (NM-C.4).

All network settings of a sliver depend on its veth: the kernel removes the device with the sliver's
network namespace, and its alias identifies the sliver to the next daemon.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ipaddress
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodepool.nodemanager.config import NodeManagerConfig
from nodepool.nodemanager.kernel import commands
from nodepool.nodemanager.network import neighbors
from nodepool.nodemanager.network.firewall import Firewall, resolv_conf, ruleset, uplink
from nodepool.nodemanager.network.others import OtherFirewalls
from nodepool.nodemanager.network.shaping import Shaper
from nodepool.nodemanager.network.tools import NetworkError, batch, run, supports, sysctl
from nodepool.nodemanager.outcomes import Problem
from nodepool.nodemanager.records.rspec import check_name

__all__ = ["NetInfo", "Network", "NetworkError"]

log = logging.getLogger("nodepool.nodemanager.net")

CLASS_NET = Path("/sys/class/net")
DEFAULT_STATE_DIR = "/var/lib/nodepool/nodemanager"
#: Name of the device inside a sliver.
INSIDE = "eth0"
REMOVE_TIMEOUT = 60.0
#: Of systemd: exists if it runs the host, and has the files of networkd until the next boot.
SYSTEMD = Path("/run/systemd")
_UNMANAGED = "[Match]\nName=nm*\n\n[Link]\nUnmanaged=yes\n"
_VETH = re.compile(r"nm(\d+)-[0-9a-z]+\Z")
_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,15}\Z")
#: Without a link-local address the sliver has no IPv6 neighbors; nat does not support IPv6 anyway.
_NO_LINK_LOCAL = (
    (f"link set {INSIDE} addrgenmode none",) if os.path.isdir("/proc/sys/net/ipv6") else ()
)
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class NetInfo:
    veth: str
    address: str = ""
    """Of the sliver; empty with a bridge: whatever gives addresses there gives it one."""
    gateway: str = ""


def addresses(subnet: str, index: int) -> tuple[str, str]:
    """Return gateway and sliver of the /30 of an index. NetworkError: the subnet is too small."""
    network = ipaddress.ip_network(subnet, strict=False)
    first = int(network.network_address) + 4 * index
    if index < 1 or first + 3 > int(network.broadcast_address):
        raise NetworkError(
            f"network.subnet: {subnet} is too small for index {index}; configure a larger one"
        )
    return str(ipaddress.ip_address(first + 1)), str(ipaddress.ip_address(first + 2))


def _base36(value: int) -> str:
    text = ""
    while True:
        value, rest = divmod(value, 36)
        text = _DIGITS[rest] + text
        if value == 0:
            return text


class Network:
    """The networks of the slivers of one daemon. All methods may be called from any thread."""

    def __init__(self, config: NodeManagerConfig) -> None:
        state = os.path.realpath(config.state_dir)
        # Daemons with other state directories on the same host use other names.
        self.tag = "" if state == DEFAULT_STATE_DIR else f"{zlib.crc32(state.encode()):08x}"
        self._subnet = str(ipaddress.ip_network(config.network.subnet, strict=False))
        self._config = config
        self._firewall = Firewall(f"nodemanager{'_' + self.tag if self.tag else ''}", config)
        self.shaper = Shaper(f"nm{self.tag}ifb", config.network.cap, config.network.exempt_ips)
        self._lock = threading.RLock()
        self._shared: set[str] = set()
        #: Number of networks that are being created.
        self._making = 0
        self._stamp = 0
        #: name -> (veth, index)
        self._known: dict[str, tuple[str, int]] = {}
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        #: index -> running removal
        self._removals: dict[int, tuple[str, concurrent.futures.Future[None]]] = {}
        self._others = OtherFirewalls(self._subnet)
        #: index -> name and veth of a removal that has failed
        self._left: dict[int, tuple[str, str]] = {}

    # --- the host
    # ----------------------------------------------------------------------------------------------

    def problems(self) -> list[Problem]:
        """Return what is missing for the networks "nat" and "bridge"; "none" needs nothing."""
        found = []
        for name, package in (
            ("ip", "iproute2"),
            ("tc", "iproute2"),
            ("nsenter", "util-linux"),
            ("nft", "nftables"),
        ):
            if commands.find(name) is None:
                what = "bandwidth limits" if name == "tc" else "networks nat and bridge"
                found.append(
                    Problem(
                        what,
                        False,
                        f"{name} is missing: install {package}; network none works without it",
                    )
                )
        if found or os.geteuid() != 0:
            return found
        checks = (
            (
                "networks nat and bridge",
                "veth",
                [("ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")],
            ),
            (
                "bandwidth limits",
                "ifb, sch_htb, cls_u32, act_mirred",
                [
                    ("ip", "link", "add", "probe0", "type", "ifb"),
                    ("tc", "qdisc", "add", "dev", "probe0", "root", "handle", "1:", "htb"),
                    (
                        "tc",
                        "filter",
                        "add",
                        "dev",
                        "probe0",
                        "parent",
                        "1:",
                        "u32",
                        "match",
                        "u32",
                        "0",
                        "0",
                        "action",
                        "mirred",
                        "egress",
                        "redirect",
                        "dev",
                        "lo",
                    ),
                ],
            ),
            (
                "networks nat and bridge",
                "nf_tables, nft_fib_inet, nft_masq, nft_connlimit, nft_exthdr, nft_rt",
                [
                    (
                        "printf",
                        "%s",
                        f"'{ruleset('probe', self._config, True)}'",
                        "|",
                        "nft",
                        "-f",
                        "-",
                    )
                ],
            ),
        )
        for what, modules, lines in checks:
            if (said := supports(lines)) is not None:
                found.append(
                    Problem(
                        what,
                        False,
                        f"load the kernel modules {modules} ({said}); only network none works then",
                    )
                )
        if self.resolv_conf("nat") is None:
            found.append(
                Problem(
                    "network nat",
                    False,
                    "slivers resolve no names: this host has no name server with an IPv4 address "
                    "other than its loopback; set network.dns",
                )
            )
        with contextlib.suppress(NetworkError):
            if (dropping := self._others.find()) is not None:
                found.append(Problem("network nat", False, dropping))
            ours = {veth for _, veth, _ in self._scan()}
            if (network := neighbors.overlapping(self._subnet, ours)) is not None:
                found.append(
                    Problem(
                        "network nat",
                        False,
                        f"network.subnet {self._subnet} overlaps {network}: this host does not "
                        "reach the addresses there that slivers have; configure another subnet",
                    )
                )
        return found

    def prepare(self) -> None:
        """Find what an earlier daemon created; the host is not changed before a sliver needs it."""
        with self._lock:
            # Start its thread now: slivers can then be removed even when the host has no threads
            # left.
            self._beside().submit(lambda: None)
            self._known = {name: (veth, index) for name, veth, index in self._scan()}
            try:
                if self._known:
                    self._share("bridge")  # the rules of this version and configuration
                else:
                    self._firewall.remove()
            except NetworkError as error:
                log.warning("The firewall rules for slivers cannot be changed: %s", error)
            if not (CLASS_NET / self.shaper.device).exists():
                return
            self._share("shaping")
            living = {index for _, index in self._known.values()}
            for index in self.shaper.counters():
                if index not in living:
                    self.shaper.remove(index)

    def _share(self, what: str) -> None:
        """Set up what slivers share: "shaping", or the rules of "nat", "bridge". NetworkError."""
        with self._lock:
            if not self._shared:
                _keep_networkd_away()
            if what != "shaping":
                self._firewall.load(what == "nat")
            elif what not in self._shared:
                self.shaper.prepare()
            self._shared.add(what)

    def node_cap(self, bits_per_second: int, exempt_ips: Iterable[str]) -> None:
        """Set the cap of all slivers in bit/s and exempt destinations. Raises NetworkError."""
        self.shaper.node_cap(bits_per_second, exempt_ips, "shaping" in self._shared)

    def stop(self) -> None:
        """Finish running removals; remove everything of ours if there are no slivers."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
        with self._lock:
            if self._shared and not self._scan():
                with contextlib.suppress(NetworkError):
                    self.remove_shared()

    def remove_shared(self) -> None:
        """Remove ifb, rules and routing when no sliver is left."""
        with self._lock:
            batch("ip", [f"link del {self.shaper.device}"], force=True)
            self._firewall.remove()
            self._shared.clear()

    def resolv_conf(self, mode: str) -> bytes | None:
        """Return /etc/resolv.conf of a sliver with this network; None: its own."""
        return resolv_conf(self._config.network.dns) if mode == "nat" else None

    # --- one sliver
    # ----------------------------------------------------------------------------------------------

    def _scan(self) -> list[tuple[str, str, int]]:
        """Return name, veth and index of our devices."""
        found = []
        for entry in os.listdir(CLASS_NET) if CLASS_NET.is_dir() else ():
            if _VETH.match(entry):
                with contextlib.suppress(OSError, ValueError):
                    owner, index, name = (
                        (CLASS_NET / entry / "ifalias").read_text().strip().split(":")
                    )
                    if owner == f"nodepool-nm{self.tag}":
                        found.append((name, entry, int(index)))
        return found

    def _new_name(self, index: int) -> str:
        """Return an unused name: the kernel frees devices some time after their removal."""
        with self._lock:
            self._stamp = max(self._stamp + 1, time.time_ns() // 1_000_000)
            return f"nm{index}-{_base36(self._stamp % 36**7)}"

    def create(
        self, name: str, index: int, netns_pid: int, mode: str, rspec: Mapping[str, Any]
    ) -> NetInfo:
        """Connect a process's network namespace.

        :raises NetworkError: unknown mode, missing bridge, or the kernel refuses.
        """
        check_name(name)
        if mode == "none":
            return NetInfo("")
        bridge = mode.partition(":")[2] if mode.startswith("bridge:") else None
        if mode != "nat" and not bridge:
            raise NetworkError(f"network {mode!r}: must be none, nat or bridge:<device>")
        if bridge is not None and (
            not _DEVICE.match(bridge) or not (CLASS_NET / bridge / "bridge").is_dir()
        ):
            raise NetworkError(
                f"network {mode!r}: this host has no bridge of that name; create it first (ip link "
                "add NAME type bridge)"
            )
        with self._lock:
            self._making += 1
        try:
            return self._create(name, index, netns_pid, bridge, rspec)
        finally:
            with self._lock:
                self._making -= 1

    def _create(
        self, name: str, index: int, netns_pid: int, bridge: str | None, rspec: Mapping[str, Any]
    ) -> NetInfo:
        self._finish(index)
        for other, veth, old_index in self._scan():
            if other == name or old_index == index:
                self._remove(veth, old_index)
        self._share("shaping")
        self._share("nat" if bridge is None else "bridge")
        veth = self._new_name(index)
        info = (
            NetInfo(veth, *reversed(addresses(self._subnet, index)))
            if bridge is None
            else NetInfo(veth)
        )
        mac, gateway_mac = _new_mac(), _new_mac()
        mtu = _mtu(bridge or uplink())
        try:
            batch(
                "ip",
                [
                    f"link add {veth} address {gateway_mac}{mtu} type veth "
                    f"peer name {INSIDE} address {mac}{mtu} netns {netns_pid}",
                    f"link set {veth} alias nodepool-nm{self.tag}:{index}:{name}",
                ],
            )
            if bridge is None:
                sysctl(f"net/ipv6/conf/{veth}/disable_ipv6", 1)
                # Senders outside the /30 add no neighbors: the kernel's table is shared by all
                # network namespaces.
                sysctl(f"net/ipv4/conf/{veth}/arp_ignore", 2)
            self.shaper.add(index, veth, rspec)
            # Traffic passes only from now on.
            if bridge is None:
                batch("ip", [f"addr add {info.gateway}/30 dev {veth}"])
                # Only now, so that one of two daemons that do this concurrently sees the other.
                own = f"{info.gateway}/30"
                if (used := neighbors.in_use(own, {veth})) is not None:
                    raise NetworkError(
                        f"network.subnet {self._subnet}: {own} of this sliver contains {used}; "
                        "configure another subnet"
                    )
            else:
                self._join(veth, bridge, mac)
            # Permanent neighbours are not counted against the size of that table.
            batch(
                "ip",
                [
                    f"link set {veth} up",
                    *(
                        []
                        if bridge is not None
                        else [f"neigh replace {info.address} lladdr {mac} dev {veth} nud permanent"]
                    ),
                ],
            )
            if bridge is not None:
                batch("ip", ["link set lo up", f"link set {INSIDE} up"], inside=netns_pid)
            else:
                batch(
                    "ip",
                    [
                        "link set lo up",
                        *_NO_LINK_LOCAL,
                        f"link set {INSIDE} up",
                        f"addr add {info.address}/30 dev {INSIDE}",
                        f"route add default via {info.gateway}",
                        f"neigh replace {info.gateway} lladdr {gateway_mac} dev {INSIDE} nud "
                        "permanent",
                    ],
                    inside=netns_pid,
                )
        except BaseException:
            try:
                self._remove(veth, index)
            except NetworkError:
                with self._lock:
                    self._left[index] = name, veth
            raise
        with self._lock:
            self._known[name] = (veth, index)
        return info

    def _join(self, veth: str, bridge: str, mac: str) -> None:
        """Add the device to the bridge as a port that accepts only its own hardware address.

        No sliver can then pose as its neighbors or as the gateway. The ports of slivers are
        isolated from each other unless `isolated` is off.

        :raises NetworkError: it cannot join the bridge.
        """
        isolated = "on" if self._config.network.isolated else "off"
        batch(
            "ip",
            [
                f"link set {veth} master {bridge}",
                f"link set {veth} type bridge_slave isolated {isolated}",
            ],
        )
        try:
            batch("bridge", [f"fdb replace {mac} dev {veth} master static"])
            batch("ip", [f"link set {veth} type bridge_slave learning off root_block on locked on"])
        except NetworkError as error:  # before Linux 5.18 and iproute2 5.18
            log.warning(
                "Slivers on bridge %s can use hardware addresses of others: %s", bridge, error
            )

    def _place(self, name: str) -> tuple[str, int] | None:
        with self._lock:
            known = self._known.get(name)
        if known is not None and (CLASS_NET / known[0]).exists():
            return known
        return next(((veth, index) for other, veth, index in self._scan() if other == name), None)

    def apply(self, name: str, rspec: Mapping[str, Any]) -> None:
        """Apply other rates immediately, if the sliver has a network. Raises NetworkError."""
        if (place := self._place(name)) is not None:
            self._share("shaping")
            self.shaper.apply(place[1], place[0], rspec)

    def usage(self, name: str) -> dict[str, int]:
        """Return net_tx_bytes (sent) and net_rx_bytes (received) since the device was created."""
        place = self._place(name)
        if place is None:
            return {}
        with contextlib.suppress(OSError, ValueError):
            directory = CLASS_NET / place[0] / "statistics"
            return {
                "net_tx_bytes": int((directory / "rx_bytes").read_text()),
                "net_rx_bytes": int((directory / "tx_bytes").read_text()),
            }
        return {}

    def counters(self) -> dict[str, tuple[int, int]]:
        """Return bytes sent by each sliver below the node's cap and exempt, for daily limits."""
        if "shaping" not in self._shared:
            return {}
        found = self.shaper.counters()
        with self._lock:
            return {
                name: found[index] for name, (_, index) in self._known.items() if index in found
            }

    def destroy(self, name: str) -> None:
        """Start to remove the device if it exists; the kernel finishes in the background."""
        place = self._place(check_name(name))
        with self._lock:
            known = self._known.pop(name, None)
            place = place or known
            if place is None:
                return
            self._begin_removal(name, *place)

    def _begin_removal(self, name: str, veth: str, index: int) -> None:
        with self._lock:
            self._left.pop(index, None)
            future = self._beside().submit(self._remove, veth, index)
            self._removals[index] = (name, future)
        future.add_done_callback(lambda done: self._removed(name, veth, index, done))

    def _beside(self) -> concurrent.futures.ThreadPoolExecutor:
        """Return the executor for background work; the caller holds the lock."""
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(
                1, "ThreadPoolExecutor-nodemanager-net"
            )
        return self._executor

    def tidy(self) -> None:
        """Try again what could not be removed, and restore rules that others have removed."""
        with self._lock:
            for index, (name, veth) in list(self._left.items()):
                self._begin_removal(name, veth, index)
            try:
                if self._shared & {"nat", "bridge"}:
                    self._firewall.load("nat" in self._shared)
                if "nat" in self._shared:
                    self._others.warn()
            except NetworkError as error:
                log.warning("The firewall rules for slivers cannot be checked: %s", error)

    def _remove(self, veth: str, index: int) -> None:
        batch("ip", [f"link del {veth}"], force=True)
        left = self._scan()
        if "shaping" in self._shared and not any(other == index for _, _, other in left):
            self.shaper.remove(index)
        with self._lock:
            if not self._making and self._shared & {"nat", "bridge"} and not self._scan():
                try:
                    self._firewall.remove()
                    self._shared -= {"nat", "bridge"}
                except NetworkError as error:  # stop() and the next start try again
                    log.warning("The firewall rules for slivers cannot be removed: %s", error)

    def _removed(
        self, name: str, veth: str, index: int, done: concurrent.futures.Future[None]
    ) -> None:
        with self._lock:
            if self._removals.get(index, ("", None))[1] is done:
                del self._removals[index]
            if not done.cancelled() and done.exception() is not None:
                self._left[index] = name, veth
                log.warning(
                    "The network of sliver %s cannot be removed, retrying later: %s",
                    name,
                    done.exception(),
                )

    def _finish(self, index: int) -> None:
        """Wait until the previous device of this index is removed. Raises NetworkError."""
        with self._lock:
            if index in self._left:
                self._begin_removal(*self._left[index], index)
            removal = self._removals.get(index)
        if removal is not None:
            try:
                removal[1].result(REMOVE_TIMEOUT)
            except concurrent.futures.TimeoutError:
                raise NetworkError(
                    f"the device that had index {index} before still exists after "
                    f"{REMOVE_TIMEOUT:g} s",
                    retry=True,
                ) from None

    def found(self) -> list[str]:
        """Return names of slivers with a device that is not being removed."""
        with self._lock:
            ending = {name for name, _ in (*self._removals.values(), *self._left.values())}
        return sorted({name for name, _, _ in self._scan()} - ending)


def _keep_networkd_away() -> None:
    """Let systemd-networkd ignore our devices, even if its configuration matches all.

    It would take addresses and routes of the host from a DHCP server in a sliver.
    """
    if not (SYSTEMD / "system").is_dir():
        return
    try:
        file = SYSTEMD / "network" / "05-nodepool-nodemanager.network"
        file.parent.mkdir(exist_ok=True)
        file.write_text(_UNMANAGED)
        file.parent.chmod(0o755)  # networkd is not root
        file.chmod(0o644)
        if (SYSTEMD / "netif").is_dir():
            run("networkctl", ["reload"])
    except (OSError, NetworkError) as error:
        log.info("If systemd-networkd runs, restart it: it may manage our devices: %s", error)


def _mtu(device: str | None) -> str:
    """Return the option of ``ip link`` for the MTU of a device; empty if it has none."""
    with contextlib.suppress(OSError, ValueError):
        return f" mtu {int((CLASS_NET / (device or '-') / 'mtu').read_text())}"
    return ""


def _new_mac() -> str:
    """Return a random, locally administered hardware address."""
    first, *rest = os.urandom(6)
    return ":".join(f"{byte:02x}" for byte in (first & 0xFC | 0x02, *rest))

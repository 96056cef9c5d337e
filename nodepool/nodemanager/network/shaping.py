"""Bandwidth of slivers (NM-B.4, NM-C.3).

Slivers send through HTB classes on one shared ifb; what they receive is limited by a token bucket.

The classes sit on the host's end, where no sliver can touch them.  Below ``1:1``, the cap of the
node, each sliver has a class
(rate = minimum, ceil = maximum, quantum ~ share); below ``1:2``, which has no cap, one for exempt
destinations.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nodepool.nodemanager.network.tools import NetworkError, batch, run
from nodepool.nodemanager.records.rspec import DEFAULT_RSPEC, UNLIMITED_RATE

#: Smallest rate in bit/s that tc accepts.
LEAST_RATE = 8
#: Maximum minimum rate in per cent of the node's cap.
MINIMUM_PERCENT = 25
#: Bytes per unit of nm_net_share; sharing by quantum works only when it is at least the largest
#: packet (GSO: 64 KiB).
QUANTUM = 60_000
LARGEST_QUANTUM = 12_000_000
_FIRST_CLASS = 0x10
LARGEST_INDEX = (0xFFFE - _FIRST_CLASS) // 2
#: Seconds of data that wait at most for their turn.
_QUEUE_SECONDS = 0.1
_SMALLEST_QUEUE, _LARGEST_QUEUE = 200_000, 10_000_000


@dataclass(frozen=True)
class Rates:
    """Rates in bit/s; share is a weight."""

    minimum: int
    maximum: int
    exempt_minimum: int
    exempt_maximum: int
    share: int


def rates(rspec: Mapping[str, Any], cap: int) -> Rates:
    """Return the rates of a sliver: a minimum is at most its maximum and 1/4 of the cap."""
    given = {**DEFAULT_RSPEC, **rspec}

    def pair(low: str, high: str, limit: int) -> tuple[int, int]:
        maximum = min(limit, max(LEAST_RATE, int(given[high])))
        return max(
            LEAST_RATE, min(int(given[low]), limit * MINIMUM_PERCENT // 100, maximum)
        ), maximum

    minimum, maximum = pair("nm_net_min_rate", "nm_net_max_rate", max(cap, LEAST_RATE))
    exempt_minimum, exempt_maximum = pair(
        "nm_net_exempt_min_rate", "nm_net_exempt_max_rate", UNLIMITED_RATE
    )
    return Rates(
        minimum, maximum, exempt_minimum, exempt_maximum, max(1, int(given["nm_net_share"]))
    )


def quantum(share: int) -> int:
    """Return the bytes that a class sends in its turn."""
    return min(share * QUANTUM, LARGEST_QUANTUM)


def queue(rate: int) -> int:
    """Return the bytes that may wait."""
    return min(_LARGEST_QUEUE, max(_SMALLEST_QUEUE, int(rate / 8 * _QUEUE_SECONDS)))


def burst(rate: int) -> int:
    """Return the burst in bytes: 4 ms of the rate, so that a late timer costs no throughput."""
    return min(_LARGEST_QUEUE, max(2_000, rate // 8 // 250))


def _htb(rate: int, ceil: int, turn: int) -> str:
    return (
        f"htb rate {rate}bit ceil {ceil}bit burst {burst(rate)} cburst {burst(ceil)} quantum {turn}"
    )


def class_of(index: int, exempt: bool = False) -> str:
    """Return the class of an index. Raises NetworkError: none is left."""
    if not 0 <= index <= LARGEST_INDEX:
        raise NetworkError(f"index {index}: bandwidth can be limited for {LARGEST_INDEX} slivers")
    return f"1:{_FIRST_CLASS + 2 * index + int(exempt):x}"


def index_of(classid: str) -> tuple[int, bool] | None:
    """Return the index of a sliver's class, and whether it is for exempt destinations."""
    minor = int(classid.partition(":")[2], 16)
    return ((minor - _FIRST_CLASS) // 2, bool(minor & 1)) if minor >= _FIRST_CLASS else None


def routable(exempt: Iterable[str]) -> list[str]:
    """Return the IPv4 destinations that a filter can match, without this host's loopback."""
    found = []
    for text in exempt:
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise NetworkError(
                f"exempt_ips: {text!r} is neither an address nor a network"
            ) from None
        if network.version == 4 and not network.is_loopback:
            found.append(str(network))
    return sorted(set(found))


class Shaper:
    """The ifb of this daemon. All methods may be called from any thread."""

    def __init__(self, device: str, cap: int, exempt: Iterable[str] = ()) -> None:
        self.device = device
        self._cap = cap
        self._exempt = routable(exempt)
        self._lock = threading.RLock()
        #: index -> veth
        self._veths: dict[int, str] = {}
        self._specs: dict[int, Mapping[str, Any]] = {}

    def prepare(self) -> None:
        """Create ifb and root classes, keeping existing ones. Raises NetworkError."""
        with self._lock:
            batch("ip", [f"link add {self.device} type ifb"], force=True)
            batch("ip", [f"link set {self.device} txqueuelen 1000 up"])
            if "htb 1:" not in run("tc", ["qdisc", "show", "dev", self.device]):
                batch(
                    "tc", [f"qdisc replace dev {self.device} root handle 1: htb default 3 r2q 10"]
                )
            batch("tc", self._roots())

    def _roots(self) -> list[str]:
        start = f"class replace dev {self.device}"
        # Quanta of parents are never used, but the kernel warns about values that it computes
        # itself.
        return [
            f"{start} parent 1: classid 1:1 {_htb(self._cap, self._cap, QUANTUM)}",
            f"{start} parent 1: classid 1:2 {_htb(UNLIMITED_RATE, UNLIMITED_RATE, QUANTUM)}",
            f"{start} parent 1:1 classid 1:3 {_htb(LEAST_RATE, self._cap, QUANTUM)}",
        ]

    def node_cap(self, bits_per_second: int, exempt: Iterable[str], active: bool) -> None:
        """Set cap and exempt destinations; `active`: the ifb exists. Raises NetworkError."""
        with self._lock:
            wanted = routable(exempt)
            changed_cap, changed_exempt = bits_per_second != self._cap, wanted != self._exempt
            self._cap, self._exempt = max(LEAST_RATE, bits_per_second), wanted
            if not active:
                return
            lines = self._roots() if changed_cap else []
            for index, veth in self._veths.items():
                lines += self._classes(index, self._specs[index])
                if changed_exempt:
                    # Together with its successor in one batch: unclassified for microseconds at
                    # most.
                    batch("tc", self._unfilter(index), force=True)
                    lines += self._filters(index, veth)
            batch("tc", lines)

    def _classes(self, index: int, rspec: Mapping[str, Any]) -> list[str]:
        given = rates(rspec, self._cap)
        plain, exempt = class_of(index), class_of(index, True)
        turn = quantum(given.share)
        return [
            f"class replace dev {self.device} parent 1:1 classid {plain} "
            f"{_htb(given.minimum, given.maximum, turn)}",
            f"class replace dev {self.device} parent 1:2 classid {exempt} "
            f"{_htb(given.exempt_minimum, given.exempt_maximum, turn)}",
            f"qdisc replace dev {self.device} parent {plain} bfifo limit {queue(given.maximum)}",
            f"qdisc replace dev {self.device} parent {exempt} bfifo limit "
            f"{queue(given.exempt_maximum)}",
        ]

    def _filters(self, index: int, veth: str) -> list[str]:
        """Return filters by input device, which no sliver can fake; two priorities per sliver."""
        start = f"filter add dev {self.device} parent 1: protocol"
        plain, exempt = class_of(index), class_of(index, True)
        return [
            *(
                f"{start} ip prio {2 * index + 1} u32 match ip dst {network} indev {veth} flowid "
                f"{exempt}"
                for network in self._exempt
            ),
            f"{start} all prio {2 * index + 2} u32 match u32 0 0 indev {veth} flowid {plain}",
        ]

    def _unfilter(self, index: int) -> list[str]:
        return [
            f"filter del dev {self.device} parent 1: protocol ip prio {2 * index + 1}",
            f"filter del dev {self.device} parent 1: protocol all prio {2 * index + 2}",
        ]

    @staticmethod
    def _download(veth: str, maximum: int) -> list[str]:
        burst = max(70_000, maximum // 8 // 100)
        return [
            f"qdisc replace dev {veth} root tbf rate {maximum}bit burst {burst} limit "
            f"{queue(maximum)}"
        ]

    def add(self, index: int, veth: str, rspec: Mapping[str, Any]) -> None:
        """Limit the traffic of a sliver's device in both directions. Raises NetworkError."""
        with self._lock:
            batch(
                "tc",
                [
                    *self._classes(index, rspec),
                    *self._filters(index, veth),
                    f"qdisc add dev {veth} handle ffff: ingress",
                    f"filter add dev {veth} parent ffff: protocol all prio 1 u32 match u32 0 0 "
                    f"action mirred egress redirect dev {self.device}",
                    *self._receive(veth, rspec),
                ],
            )
            self._veths[index], self._specs[index] = veth, dict(rspec)

    def _receive(self, veth: str, rspec: Mapping[str, Any]) -> list[str]:
        maximum = int(rspec.get("nm_net_max_rate", UNLIMITED_RATE))
        return self._download(veth, max(LEAST_RATE, maximum)) if maximum < UNLIMITED_RATE else []

    def apply(self, index: int, veth: str, rspec: Mapping[str, Any]) -> None:
        """Apply other rates immediately. Raises NetworkError."""
        with self._lock:
            if index in self._specs and self._specs[index] == dict(rspec):
                return
            lines = self._receive(veth, rspec)
            if not lines:
                batch("tc", [f"qdisc del dev {veth} root"], force=True)
            batch("tc", [*self._classes(index, rspec), *lines])
            self._veths[index], self._specs[index] = veth, dict(rspec)

    def remove(self, index: int) -> None:
        """Remove filters and classes of a sliver, if there are any."""
        with self._lock:
            self._veths.pop(index, None)
            self._specs.pop(index, None)
            batch(
                "tc",
                [
                    *self._unfilter(index),
                    f"class del dev {self.device} classid {class_of(index)}",
                    f"class del dev {self.device} classid {class_of(index, True)}",
                ],
                force=True,
            )

    def counters(self) -> dict[int, tuple[int, int]]:
        """Return bytes sent by each index: below the node's cap, and exempt. NetworkError."""
        found: dict[int, tuple[int, int]] = {}
        current: tuple[int, bool] | None = None
        for line in run("tc", ["-s", "class", "show", "dev", self.device]).splitlines():
            words = line.split()
            if words[:2] == ["class", "htb"]:
                current = index_of(words[2])
            elif words[:1] == ["Sent"] and current is not None:
                index, exempt = current
                plain, other = found.get(index, (0, 0))
                found[index] = (plain, int(words[1])) if exempt else (int(words[1]), other)
        return found

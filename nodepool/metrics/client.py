"""Values that the daemons record: kept for Prometheus, optionally sent to statsd (CLI-7).

Recording is cheap (a dictionary entry, a queue entry) and never fails or blocks.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from nodepool.metrics.statsd_sender import StatsdSender

DEFAULT_HOST = "localhost"
DEFAULT_PORT = 8125


def statsd_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return ``STATSD_HOST`` and ``STATSD_PORT``; None if neither is set."""
    host, port = env.get("STATSD_HOST"), env.get("STATSD_PORT")
    if not host and not port:
        return None
    try:
        number = int(port) if port else DEFAULT_PORT
    except ValueError:
        raise ValueError(f"STATSD_PORT must be a port number, not {port!r}") from None
    return host or DEFAULT_HOST, number


def _milliseconds(delta: float | datetime.timedelta) -> float:
    return delta.total_seconds() * 1000.0 if isinstance(delta, datetime.timedelta) else delta


BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds: upper bounds of the histogram buckets; from assigning a ready node to building an
image.
"""


class Example(NamedTuple):
    """A trace that shows one duration: its id, the seconds that it took, and its UNIX time."""

    trace_id: str
    seconds: float
    when: float


class Timer(NamedTuple):
    """Durations of one series: their number, their sum in milliseconds, and counts by bucket."""

    number: int
    total: float
    classes: tuple[int, ...]
    #: Of some buckets, by their index.
    examples: Mapping[int, Example] = {}


@dataclass
class Snapshot:
    """Values at one point in time."""

    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    timers: dict[str, Timer] = field(default_factory=dict)


class Metrics:
    """The statsd client interface for our code and drivers, with memory and a sender thread."""

    def __init__(self, address: tuple[str, int] | None = None) -> None:
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._counters: dict[str, float] = collections.defaultdict(float)
        #: Sum in milliseconds, and count per bucket.
        self._timers: dict[str, tuple[list[float], list[int]]] = {}
        self._exemplars: dict[str, dict[int, Example]] = {}
        self._groups: dict[str, frozenset[str]] = {}
        self._sender: StatsdSender | None = None
        self.setAddress(address)

    def setAddress(self, address: tuple[str, int] | None) -> None:
        """Set the statsd server to send to; None: do not send."""
        with self._lock:
            old = self._sender
            if address == (old.address if old else None):
                return
            self._sender = StatsdSender(address) if address else None
        if old:
            old.close()

    @property
    def address(self) -> tuple[str, int] | None:
        sender = self._sender
        return sender.address if sender else None

    def incr(self, stat: str, count: float = 1, rate: float = 1) -> None:
        with self._lock:
            self._counters[stat] += count
        if self._sender:
            self._sender.put(stat, count, "c")

    def decr(self, stat: str, count: float = 1, rate: float = 1) -> None:
        self.incr(stat, -count, rate)

    def gauge(self, stat: str, value: float, rate: float = 1, delta: bool = False) -> None:
        with self._lock:
            if delta:
                value += self._gauges.get(stat, 0)
            self._gauges[stat] = (
                value + 0
            )  # a value that is not a number fails here, not in a scrape
        if self._sender:
            self._sender.put(stat, value, "g")

    def timing(self, stat: str, delta: float | datetime.timedelta, rate: float = 1) -> None:
        """Record a duration in milliseconds."""
        delta = _milliseconds(delta)
        with self._lock:
            timer = self._timers.get(stat)
            if timer is None:
                timer = self._timers[stat] = ([0.0], [0] * (len(BUCKETS) + 1))
            timer[0][0] += delta
            timer[1][bisect.bisect_left(BUCKETS, delta / 1000)] += 1
        if self._sender:
            self._sender.put(stat, delta, "ms")

    def exemplar(self, stat: str, milliseconds: float, trace_id: str) -> None:
        """Link a trace to a duration recorded by :meth:`timing`; each bucket keeps the latest."""
        with self._lock:
            self._exemplars.setdefault(stat, {})[
                bisect.bisect_left(BUCKETS, milliseconds / 1000)
            ] = Example(trace_id, milliseconds / 1000, time.time())

    @contextlib.contextmanager
    def timer(
        self, stat: str, rate: float = 1, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[None]:
        start = clock()
        try:
            yield
        finally:
            self.timing(stat, (clock() - start) * 1000)

    # -- statsd's pipelines, for drivers: the sender packs the values of all callers

    def pipeline(self) -> Self:
        """Return the client itself, as a context and with :meth:`send`."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Do nothing: the values have been recorded."""

    def send(self) -> None:
        """Do nothing: the values have been recorded."""

    def keep(self, group: str, stats: Collection[str]) -> None:
        """Delete the gauges of the group's last call that are not among these.

        Otherwise Prometheus would show them forever.

        :param group: any name; a reporter of a complete set of gauges uses the same name each time.
        """
        with self._lock:
            for stat in self._groups.get(group, frozenset()).difference(stats):
                self._gauges.pop(stat, None)
            self._groups[group] = frozenset(stats)

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(
                dict(self._gauges),
                dict(self._counters),
                {
                    name: Timer(
                        sum(classes), total[0], tuple(classes), dict(self._exemplars.get(name, ()))
                    )
                    for name, (total, classes) in self._timers.items()
                },
            )

    @property
    def dropped(self) -> int:
        """Return the number of values not sent to statsd because the queue was full."""
        sender = self._sender
        return sender.dropped if sender else 0

    def close(self, timeout: float = 1.0) -> None:
        """Send queued values and end the sender thread; recording starts it again."""
        sender = self._sender
        if sender:
            sender.close(timeout)


_shared: Metrics | None = None
_shared_lock = threading.Lock()


def shared(env: Mapping[str, str] = os.environ) -> Metrics:
    """Return the metrics of this process.

    Each call reads ``STATSD_HOST`` and ``STATSD_PORT`` again.
    """
    global _shared
    address = statsd_address(env)
    with _shared_lock:
        if _shared is None:
            _shared = Metrics(address)
        else:
            _shared.setAddress(address)
        return _shared

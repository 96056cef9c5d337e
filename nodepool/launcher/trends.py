"""Nodes, launches and waits of the cluster over the last day, as mirrored."""

from __future__ import annotations

import collections
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodepool.base.clock import SYSTEM, Clock
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import ABORTED, BUILDING, FAILED, FULFILLED, LARGEST, READY, Node, NodeRequest

BUCKET = 300.0
"""Seconds of one point of the charts."""
BUCKETS = 288
"""Points of a chart: 24 hours."""
SAMPLE_INTERVAL = 60.0
"""Seconds between two samples of nodes and waiting requests; a point shows the last one."""
MOST_CAUSES = 6
"""Causes of one sample; the others are counted together."""
OTHER = "other causes"
LATEST = 50
"""Number of launches and waits of a label in its median."""
MOST, MOST_OLD = 2000, 100
"""Durations that the current bucket and older ones keep."""


@dataclass
class Point:
    ready: int = 0
    failed: int = 0
    launches: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    #: State -> nodes, and cause -> waiting requests; None: not sampled.
    nodes: dict[str, int] | None = None
    waiting: dict[str, int] | None = None

    def close(self) -> None:
        """Keep evenly spaced durations, which preserve the percentiles."""
        self.launches, self.waits = _thinned(self.launches), _thinned(self.waits)


class Trends:
    """Listens to the mirror; on the connection thread."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._begun = clock.time()
        self._sample_at = -math.inf
        self._buckets: dict[int, Point] = {}
        self._launches: dict[str, collections.deque[float]] = {}
        self._waits: dict[str, collections.deque[float]] = {}
        #: Label -> when (UNIX seconds) requests for it were fulfilled.
        self._served: dict[str, collections.deque[float]] = {}

    def node_changed(self, _node_id: str, old: Node | None, new: Node | None) -> None:
        if old is None or new is None or old.state != BUILDING or new.state == BUILDING:
            return
        with self._lock:
            bucket = self._bucket()
            if new.state == READY:
                bucket.ready += 1
                took = seconds_between(new.created_time, new.state_time)
                if took is not None:
                    _note(bucket.launches, took)
                    for label in new.type:
                        self._launches.setdefault(label, collections.deque(maxlen=LATEST)).append(took)
            elif new.state in (FAILED, ABORTED):
                bucket.failed += 1

    def request_changed(self, _request_id: str, old: NodeRequest | None, new: NodeRequest | None) -> None:
        if old is None or new is None or old.state == FULFILLED or new.state != FULFILLED or new.requestor == MIN_READY:
            return
        with self._lock:
            now = self._clock.time()
            took = seconds_between(new.created_time, new.state_time)
            for label in set(new.node_types):
                self._served.setdefault(label, collections.deque(maxlen=LATEST)).append(now)
                if took is not None:
                    self._waits.setdefault(label, collections.deque(maxlen=LATEST)).append(took)
            if took is not None:
                _note(self._bucket().waits, took)

    def sample(self, nodes: Callable[[], Mapping[str, int]], waiting: Callable[[], Mapping[str, int]]) -> None:
        """Note the number of nodes by state and of waiting requests by cause, if a sample is due."""
        now = self._clock.monotonic()
        if now < self._sample_at:
            return
        self._sample_at = now + SAMPLE_INTERVAL
        states, causes = dict(nodes()), collections.Counter(waiting())
        largest = dict(causes.most_common(MOST_CAUSES))
        if (rest := causes.total() - sum(largest.values())) > 0:
            largest[OTHER] = rest
        with self._lock:
            bucket = self._bucket()
            bucket.nodes, bucket.waiting = states, largest

    @property
    def oldest(self) -> float:
        """Return UNIX seconds; earlier events from before this process are not shown."""
        return self._begun - BUCKET * BUCKETS

    def recall(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Add events from before this process from the history.

        :param events: in order of time, as written by launchers.
        """
        begins: dict[str, tuple[float, list[str]]] = {}
        launches: dict[str, list[float]] = {}
        waits: dict[str, list[float]] = {}
        served: dict[str, list[float]] = {}
        with self._lock:
            oldest = self.oldest
            for event in events:
                when, kind = event["time"], event["type"]
                name = event.get("node") if kind.startswith("node-") else event.get("request")
                if not isinstance(name, str) or not isinstance(when, (int, float)) or not oldest < when < self._begun:
                    continue
                if kind in ("node-created", "request-submitted") and event.get("requestor") != MIN_READY:
                    begins[name] = (when, _labels(event))
                elif kind == "node-changed" and event.get("before") == BUILDING:
                    bucket = self._bucket(when)
                    if event.get("state") == READY:
                        bucket.ready += 1
                        _ended(begins, name, when, bucket.launches, launches)
                    elif event.get("state") in (FAILED, ABORTED):
                        bucket.failed += 1
                elif kind == "request-changed" and event.get("state") == FULFILLED and event.get("requestor") != MIN_READY:
                    _ended(begins, name, when, self._bucket(when).waits, waits)
                    for label in set(_labels(event)):
                        served.setdefault(label, []).append(when)
            for kept, recalled in ((self._launches, launches), (self._waits, waits), (self._served, served)):
                for label, numbers in recalled.items():
                    kept[label] = collections.deque([*numbers, *kept.get(label, ())], maxlen=LATEST)

    def _bucket(self, when: float | None = None) -> Point:
        number = int((self._clock.time() if when is None else when) // BUCKET)
        bucket = self._buckets.get(number)
        if bucket is None:
            # Also drops future times of a clock that was set back later.
            last = int(self._clock.time() // BUCKET)
            for kept in self._buckets.values():
                kept.close()
            bucket = self._buckets[number] = Point()
            self._buckets = {each: kept for each, kept in self._buckets.items() if last - BUCKETS < each <= last}
        return bucket

    def labels(self) -> dict[str, dict[str, Any]]:
        """Return label -> medians in seconds and requests served per minute, for reports."""
        with self._lock:
            now = self._clock.time()
            found: dict[str, dict[str, Any]] = {}
            for label in sorted({*self._launches, *self._waits}):
                entry = found[label] = {"launch": _median(self._launches.get(label)), "wait": _median(self._waits.get(label))}
                served = [when for when in self._served.get(label, ()) if 0 <= now - when < BUCKET * 12]
                if len(served) > 1:
                    entry["a_minute"] = round(60 * len(served) / max(1.0, now - served[0]), 3)
            return found

    def chart(self) -> list[dict[str, Any]]:
        """Return one entry for each :data:`BUCKET` seconds, oldest first.

        Entries without events have zeros and nulls.
        """
        with self._lock:
            last = int(self._clock.time() // BUCKET)
            rows = []
            for number in range(last - BUCKETS + 1, last + 1):
                bucket = self._buckets.get(number, Point())
                rows.append(
                    {
                        "time": int(number * BUCKET),
                        "ready": bucket.ready,
                        "failed": bucket.failed,
                        "launch": _median(bucket.launches),
                        "wait": _median(bucket.waits),
                        "wait_p95": _percentile(bucket.waits),
                        "nodes": bucket.nodes,
                        "waiting": bucket.waiting,
                    }
                )
            return rows


def seconds_between(begin: object, end: object) -> float | None:
    """Return the seconds between two times; None if a clock was wrong or a time is missing."""
    if not isinstance(begin, (int, float)) or not isinstance(end, (int, float)):
        return None
    # Compared first: a number in a record may be too large for a subtraction.
    return float(end - begin) if abs(begin) < LARGEST and abs(end) < LARGEST and 0 <= end - begin < 1e9 else None


def _note(durations: list[float], took: float) -> None:
    if len(durations) < MOST:
        durations.append(took)


def _labels(event: Mapping[str, Any]) -> list[str]:
    labels = event.get("labels")
    return [str(each) for each in labels] if isinstance(labels, list) else []


def _ended(
    begins: dict[str, tuple[float, list[str]]], name: str, when: float, durations: list[float], by_label: dict[str, list[float]]
) -> None:
    begin, labels = begins.pop(name, (None, []))
    took = seconds_between(begin, when)
    if took is not None:
        _note(durations, took)
        for label in set(labels):
            by_label.setdefault(label, []).append(took)


def _thinned(durations: list[float]) -> list[float]:
    step = math.ceil(len(durations) / MOST_OLD)
    return sorted(durations)[step // 2 :: step] if step > 1 else durations


def _percentile(durations: list[float]) -> float | None:
    """Return the 95th percentile."""
    return round(sorted(durations)[math.ceil(0.95 * len(durations)) - 1], 3) if durations else None


def _median(durations: Iterable[float] | None) -> float | None:
    found = list(durations or ())
    return round(statistics.median(found), 3) if found else None

"""Nodes, launches and waits of the cluster over the last day, as mirrored."""

from __future__ import annotations

import collections
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nodepool.base.clock import SYSTEM, Clock
from nodepool.zk.mirror.feed import Event
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import ABORTED, BUILDING, DELETING, FAILED, FULFILLED, READY

#: Seconds of one point of the charts.
BUCKET = 300.0
#: Points of a chart: 24 hours.
BUCKETS = 288
#: Seconds between two samples of nodes and waiting requests; a point shows the last one.
SAMPLE_INTERVAL = 60.0
#: Causes of one sample; the others are counted together.
MOST_CAUSES = 6
OTHER = "other causes"
#: Number of launches and waits of a label in its median.
LATEST = 50
#: Usual intervals without a request being served after which the former rate says nothing any more.
STALLED = 3
#: Durations that the current bucket and older ones keep.
MOST, MOST_OLD = 2000, 100
#: Seconds; longer durations are wrong.
LONGEST = 1e9

#: By label.
Numbers: TypeAlias = "dict[str, collections.deque[float]]"


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
    """Listens to the feed: events have the seconds that launches and requests took."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._begun = clock.time()
        self._sample_at = -math.inf
        self._buckets: dict[int, Point] = {}
        self._launches: Numbers = {}
        self._waits: Numbers = {}
        #: Label -> when (UNIX seconds) requests for it were fulfilled.
        self._served: Numbers = {}

    def count(self, event: Event) -> None:
        if event.get("before") == BUILDING or event.get("state") == FULFILLED:  # few of the events
            with self._lock:
                self._take(event)

    def _take(self, event: Event) -> None:
        kind, state, labels, when = (
            event["type"],
            event.get("state"),
            set(event.get("labels", ())),
            event["time"],
        )
        seconds = event.get("seconds")
        took = seconds if isinstance(seconds, (int, float)) and 0 <= seconds < LONGEST else None
        if kind == "node-changed" and event.get("before") == BUILDING and state == READY:
            bucket = self._bucket(when)
            bucket.ready += 1
            _note(bucket.launches, self._launches, labels, took)
        elif event.get("before") == BUILDING and (
            kind == "node-removed" or state in (FAILED, ABORTED, DELETING)
        ):
            # If nothing was created, the record is deleted and never gets the state failed.
            self._bucket(when).failed += 1
        elif (
            kind == "request-changed" and state == FULFILLED and event.get("requestor") != MIN_READY
        ):
            _note(self._bucket(when).waits, self._waits, labels, took)
            _note([], self._served, labels, when)

    def sample(
        self, nodes: Callable[[], Mapping[str, int]], waiting: Callable[[], Mapping[str, int]]
    ) -> None:
        """Note the number of nodes by state and of waiting requests by cause, if a sample is
        due.
        """
        now = self._clock.monotonic()
        if now < self._sample_at:
            return
        self._sample_at = now + SAMPLE_INTERVAL
        states, causes = dict(nodes()), collections.Counter(waiting())
        largest = dict(causes.most_common(MOST_CAUSES))
        if (rest := causes.total() - sum(largest.values())) > 0:
            largest[OTHER] = rest
        with self._lock:
            bucket = self._bucket(self._clock.time())
            bucket.nodes, bucket.waiting = states, largest

    @property
    def oldest(self) -> float:
        """Return UNIX seconds; earlier events from before this process are not shown."""
        return self._begun - BUCKET * BUCKETS

    def recall(self, events: Iterable[Event]) -> None:
        """Add events from before this process from the history.

        :param events: in order of time, as written by launchers.
        """
        with self._lock:
            since = self._launches, self._waits, self._served
            self._launches, self._waits, self._served = {}, {}, {}
            for event in events:
                if self.oldest < event["time"] < self._begun:
                    self._take(event)
            for kept, later in zip((self._launches, self._waits, self._served), since, strict=True):
                for label, numbers in later.items():
                    kept.setdefault(label, collections.deque(maxlen=LATEST)).extend(numbers)

    def _bucket(self, when: float) -> Point:
        number = int(when // BUCKET)
        bucket = self._buckets.get(number)
        if bucket is None:
            # Also drops future times of a clock that was set back later.
            last = int(self._clock.time() // BUCKET)
            for kept in self._buckets.values():
                kept.close()
            bucket = self._buckets[number] = Point()
            self._buckets = {
                each: kept for each, kept in self._buckets.items() if last - BUCKETS < each <= last
            }
        return bucket

    def labels(self) -> dict[str, dict[str, Any]]:
        """Return label -> medians in seconds and requests served per minute, for reports."""
        with self._lock:
            now = self._clock.time()
            found: dict[str, dict[str, Any]] = {}
            for label in sorted({*self._launches, *self._waits}):
                entry = found[label] = {
                    "launch": _median(self._launches.get(label)),
                    "wait": _median(self._waits.get(label)),
                }
                served = [
                    when for when in self._served.get(label, ()) if 0 <= now - when < BUCKET * 12
                ]
                if len(served) > 1 and (now - served[-1]) * len(served) <= STALLED * (
                    now - served[0]
                ):
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


def _note(
    durations: list[float], by_label: Numbers, labels: Iterable[str], took: float | None
) -> None:
    if took is None:
        return
    if len(durations) < MOST:
        durations.append(took)
    for label in labels:
        by_label.setdefault(label, collections.deque(maxlen=LATEST)).append(took)


def _thinned(durations: list[float]) -> list[float]:
    step = math.ceil(len(durations) / MOST_OLD)
    return sorted(durations)[step // 2 :: step] if step > 1 else durations


def _percentile(durations: list[float]) -> float | None:
    """Return the 95th percentile."""
    return round(sorted(durations)[math.ceil(0.95 * len(durations)) - 1], 3) if durations else None


def _median(durations: Iterable[float] | None) -> float | None:
    found = list(durations or ())
    return round(statistics.median(found), 3) if found else None

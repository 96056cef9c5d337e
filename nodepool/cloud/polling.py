"""Wait for many objects with few calls: poll in batches, when changes are due."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from nodepool.base.backoff import Backoff
from nodepool.base.timers import Timer, Timers
from nodepool.cloud.errors import CallsStopped

V = TypeVar("V")

FLOOR = 0.5
"""Shortest time between two polls of one object, in seconds."""
CEILING = 10.0
"""Longest time between two polls."""
ABANDONED = 600.0
"""Seconds after which a watch that was not read is removed: its owner went away without
canceling.
"""
EARLY = 0.8
"""Part of the expected time that passes before polls become frequent."""
NARROWER = 0.97
"""Factor on the time of a first poll that was late enough, for the next first poll."""
NARROW = 0.3
"""Part of the shortest pause below which the exact time of a change does not matter."""


@dataclass(frozen=True)
class Observation(Generic[V]):
    """The cloud's answer about an object: ``value`` is None if the answer does not contain it.

    ``asked`` is when the query was sent (monotonic seconds): the answer includes everything that
    happened before.
    """

    value: V | None
    asked: float


class Subscription(Generic[V]):
    """One party waiting for one object."""

    def __init__(
        self,
        watched: Poller[V],
        key: str,
        wake: Callable[[], None],
        kind: Hashable,
        started: float,
        first: float,
        patience: float,
    ) -> None:
        self.key = key
        self.wake = wake
        self.kind = kind
        self.started = started
        self.first = first
        self.patience = patience
        self.planned = started
        #: When the last query but one was sent; the expected change had not happened then.
        self.missed = started
        self.told = started
        self.read = started
        self._look: Observation[V] | None = None
        self.next_look = started
        self.failures = 0
        #: This object failed in a batch in which others succeeded: it is queried separately, so
        #: that it does not block others.
        self.alone = False
        self.last_look = float("-inf")
        self.ended = False
        self._watched = watched

    @property
    def latest(self) -> Observation[V] | None:
        """Return the latest answer, or None before the first one.

        A watch whose answers are not read is removed eventually.
        """
        self.read = self._watched._timers.clock()
        return self._look

    def again(self, seconds: float = 0.0) -> None:
        """Poll again in this many seconds, but not earlier than the minimum pause allows."""
        self._watched._again(self, seconds)

    def end(self, reached: bool = True) -> None:
        """Stop waiting; ``reached``: the expected change happened, so its duration is recorded."""
        self._watched._end(self, reached)


class Poller(Generic[V]):
    """Polls all watched objects on behalf of their watchers.

    :param fetch_many: queries the cloud for these ids. Ids missing in its answer are reported as
        absent; an exception in place of a value means that this object could not be read. Runs by
        ``submit``.
    :param submit: runs a function on another thread and returns its future
        (:meth:`CloudCalls.run`).
    :param batch: ids per query; 1 queries each id separately.
    :param narrow: also learn from polls that came too early: changes that always take equally long
        are then seen by the first poll. Saves calls, but a change that happens earlier than usual
        is seen later.
    """

    def __init__(
        self,
        name: str,
        fetch_many: Callable[[Sequence[str]], Mapping[str, V | Exception]],
        submit: Callable[[Callable[[], Any]], Future[Any]],
        timers: Timers,
        *,
        batch: int = 100,
        floor: float = FLOOR,
        ceiling: float = CEILING,
        narrow: bool = False,
        log: logging.Logger | logging.LoggerAdapter[Any] | None = None,
    ) -> None:
        self.name = name
        self.batch = batch
        self.floor = floor
        self.ceiling = ceiling
        self.narrow = narrow
        self._fetch_many = fetch_many
        self._submit = submit
        self._timers = timers
        self._log = log or logging.getLogger(f"nodepool.cloud.{name}")
        self._lock = threading.Lock()
        self._watches: dict[Subscription[V], None] = {}
        self._asking: set[str] = set()
        self._timer: Timer | None = None
        #: By type: seconds until the last poll that came too early, and until the change was seen.
        self._durations: dict[Hashable, deque[tuple[float, float]]] = {}
        self._complained = False
        self._last_pass = float("-inf")

    # -- for watchers

    def watch(
        self,
        key: str,
        wake: Callable[[], None],
        kind: Hashable = None,
        *,
        first: float = 0.0,
        patience: float = 0.0,
    ) -> Subscription[V]:
        """Wait for the object ``key``; ``wake`` is called, on any thread, after each poll of it.

        :param kind: type of the expected change, for example (label, "launch"); its usual duration
            decides when to poll.
        :param first: seconds before the first poll while no duration is known.
        :param patience: seconds that a poll may be postponed to share a query with others.
        """
        now = self._timers.clock()
        watch = Subscription(self, key, wake, kind, now, first, patience)
        with self._lock:
            watch.next_look = now + self._pause(watch, now)
            self._watches[watch] = None
            self._arm(now)
        return watch

    def expected(self, kind: Hashable) -> float | None:
        """Return the recent duration of such a change in seconds; None if unknown."""
        seen = self._durations.get(kind)
        # Seen by the first poll: it happened earlier, by an unknown time.
        part = 1.0 if self.narrow else EARLY
        return median(until if missed else part * until for missed, until in seen) if seen else None

    def _early(self, kind: Hashable, expected: float) -> float:
        """Return the seconds before which a first poll is not worth a query."""
        early = EARLY * expected
        seen = self._durations.get(kind)
        if not self.narrow or not seen:
            return early
        missed, reached = max(missed for missed, _ in seen), min(until for _, until in seen)
        if missed >= reached:
            return early  # durations vary
        if not missed:
            return max(early, NARROWER * reached)  # all may have happened earlier
        return max(
            early, reached if reached - missed <= NARROW * self.floor else (missed + reached) / 2
        )

    def _again(self, watch: Subscription[V], seconds: float) -> None:
        with self._lock:
            if watch not in self._watches:
                return
            now = self._timers.clock()
            watch.next_look = max(now + seconds, watch.last_look + self.floor)
            self._arm(now)

    def _end(self, watch: Subscription[V], reached: bool) -> None:
        with self._lock:
            if self._watches.pop(watch, self) is self:
                return
            watch.ended = True
            if reached:
                seen = self._durations.setdefault(watch.kind, deque(maxlen=9))
                # The time added by patience is not part of the duration.
                until = watch.planned if watch.patience else self._timers.clock()
                seen.append((watch.missed - watch.started, until - watch.started))

    # -- looking

    def _pause(self, watch: Subscription[V], now: float) -> float:
        """Return the seconds until the next poll of the object."""
        if watch.failures:
            return Backoff(2 * self.floor, self.ceiling).pause(watch.failures)
        expected, waited = self.expected(watch.kind), now - watch.started
        if expected is None:
            # Unknown duration: wait a tenth of the time so far, so that short changes are seen soon
            # and long ones are cheap.
            return min(self.ceiling, max(self.floor, waited / 10, watch.first - waited))
        early = self._early(watch.kind, expected)
        if waited < early:
            return min(self.ceiling, max(self.floor, early - waited))
        if waited < 1.5 * expected:
            return self.floor
        return min(self.ceiling, max(self.floor, (waited - expected) / 5))

    def _arm(self, now: float) -> None:
        """Schedule the next pass. Called with the lock held."""
        idle = [watch for watch in self._watches if watch.key not in self._asking]
        hurried = min(
            (watch.next_look for watch in idle if not watch.patience), default=float("inf")
        )
        due = min(
            (
                hurried
                if watch.next_look <= hurried <= watch.next_look + watch.patience
                else watch.next_look
                for watch in idle
            ),
            default=None,
        )
        timer = self._timer
        if due is not None and self.batch > 1:
            # Align the polls of all watchers, so that one query serves them all.
            due = max(due, self._last_pass + self.floor)
        if due is None or (timer is not None and timer.when <= due):
            return
        if timer is not None:
            timer.cancel()
        self._timer = self._timers.after(due - now, self._pass)

    def _pass(self) -> None:
        """Send the queries that are due; on the timers' thread."""
        questions: list[list[str]] = []
        with self._lock:
            self._timer = None
            now = self._last_pass = self._timers.clock()
            for watch in [watch for watch in self._watches if now - watch.read > ABANDONED]:
                del self._watches[watch]
                watch.ended = True
            idle = [watch for watch in self._watches if watch.key not in self._asking]
            due = dict.fromkeys(
                watch.key
                for watch in idle
                if watch.next_look <= now
                or (watch.next_look <= now + self.floor / 4 and watch.last_look + self.floor <= now)
            )
            keys = list(due)
            if due and self.batch > 1 and (spare := -len(keys) % self.batch):
                # The query is sent anyway: include other objects that were not polled just now.
                rest = sorted(
                    (
                        watch
                        for watch in idle
                        if watch.key not in due
                        and watch.last_look + self.floor <= now
                        and watch.next_look - now < self.floor
                    ),
                    key=lambda watch: watch.next_look,
                )
                keys += list(dict.fromkeys(watch.key for watch in rest))[:spare]
            for watch in idle:
                if watch.key in due or watch.key in keys:
                    watch.planned = min(watch.next_look, now)
            alone = {watch.key for watch in idle if watch.alone}
            shared = [key for key in keys if key not in alone]
            questions = [
                shared[start : start + self.batch] for start in range(0, len(shared), self.batch)
            ]
            questions += [[key] for key in keys if key in alone]
            self._asking.update(keys)
            self._arm(now)
        for question in questions:
            self._ask(question)

    def _ask(self, keys: list[str]) -> None:
        asked = self._timers.clock()

        def fetch() -> tuple[float, Mapping[str, V | Exception]]:
            sent = self._timers.clock()
            return sent, self._fetch_many(keys)

        self._submit(fetch).add_done_callback(lambda future: self._answered(keys, asked, future))

    def _answered(self, keys: list[str], asked: float, future: Future[Any]) -> None:
        error: BaseException | None = None
        answer: Mapping[str, V | Exception] = {}
        try:
            asked, answer = future.result()
        except (CallsStopped, CancelledError):
            return
        except Exception as caught:
            error = caught
        wanted, told = set(keys), []
        with self._lock:
            now = self._timers.clock()
            self._asking.difference_update(wanted)
            for watch in self._watches:
                if watch.key not in wanted:
                    continue
                watch.last_look = asked
                value = answer.get(watch.key)
                watch.alone = isinstance(value, Exception)
                if error is not None or isinstance(value, Exception):
                    watch.failures += 1
                else:
                    watch.failures = 0
                    if watch.started <= asked:
                        watch._look = Observation(value, asked)
                        watch.missed, watch.told = watch.told, asked
                        told.append(watch)
                watch.next_look = max(now, asked + self._pause(watch, now))
            self._arm(now)
        refused = [(key, value) for key, value in answer.items() if isinstance(value, Exception)]
        if refused:
            self._log.debug("Cannot poll %s of %s: %s", len(refused), self.name, refused[0])
        if error is not None or len(refused) < len(keys):
            self._report(error, len(keys))
        for watch in told:
            try:
                watch.wake()
            except Exception:
                self._log.exception("Error in the callback for %s:", watch.key)

    def _report(self, error: BaseException | None, count: int) -> None:
        if error is None:
            if self._complained:
                self._log.info("Polling %s works again", self.name)
            self._complained = False
            return
        level = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        self._log.log(level, "Cannot poll %s of %s; retrying: %s", count, self.name, error)

"""Waiting for many objects with few calls: only those waited for, in batches, when a change is due."""

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
"""Shortest time between two looks at one object, in seconds."""
CEILING = 10.0
"""Longest time between two looks."""
ABANDONED = 600.0
"""Seconds after which a watch that was not read is dropped: its party has given up without a word."""
EARLY = 0.8
"""Part of the expected time that passes before looks become frequent."""
NARROWER = 0.97
"""Part of the time of a first look that had come late enough, for the next one."""
NARROW = 0.3
"""Part of the shortest pause below which it does not matter when exactly a change came."""


@dataclass(frozen=True)
class Observation(Generic[V]):
    """What the cloud said about an object: ``value`` is None when it is absent from the answer.

    ``asked`` is when the question was sent (monotonic seconds): what happened before is contained in the answer.
    """

    value: V | None
    asked: float


class Subscription(Generic[V]):
    """One party waiting for one object."""

    def __init__(
        self, watched: Poller[V], key: str, wake: Callable[[], None], kind: Hashable, started: float, first: float,
        patience: float,
    ) -> None:  # fmt: skip
        self.key = key
        self.wake = wake
        self.kind = kind
        self.started = started
        self.first = first
        self.patience = patience
        self.planned = started
        #: When the latest look but one was sent; what was waited for had not happened then.
        self.missed = started
        self.told = started
        self.read = started
        self._look: Observation[V] | None = None
        self.next_look = started
        self.failures = 0
        #: This one could not be looked at while others could: it is asked for by itself, so that it holds up no other.
        self.alone = False
        self.last_look = float("-inf")
        self.ended = False
        self._watched = watched

    @property
    def look(self) -> Observation[V] | None:
        """The latest answer, None before the first. A watch whose answers are not read is dropped in the end."""
        self.read = self._watched._timers.clock()
        return self._look

    def again(self, seconds: float = 0.0) -> None:
        """Look again in so many seconds (never sooner than the floor after the last look)."""
        self._watched._again(self, seconds)

    def end(self, reached: bool = True) -> None:
        """Stop waiting; ``reached``: what was waited for has happened, so its duration is learned."""
        self._watched._end(self, reached)


class Poller(Generic[V]):
    """Looks at all watched objects on behalf of those who wait.

    :param fetch_many: asks the cloud for these ids; ids missing in its answer are told as absent, an exception in place of
        a value says that this one could not be looked at. Runs by ``submit``.
    :param submit: runs a function on another thread and returns its future (:meth:`CloudCalls.run`).
    :param batch: ids per question; 1 asks one by one.
    :param narrow: learn from looks that came too early, too: changes that always take equally long are then seen by their
        first look. Saves calls; a change that comes earlier than those before is seen later for it.
    """

    def __init__(
        self, name: str, fetch_many: Callable[[Sequence[str]], Mapping[str, V | Exception]],
        submit: Callable[[Callable[[], Any]], Future[Any]], timers: Timers, *, batch: int = 100,
        floor: float = FLOOR, ceiling: float = CEILING, narrow: bool = False,
        log: logging.Logger | logging.LoggerAdapter[Any] | None = None,
    ) -> None:  # fmt: skip
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
        #: By kind: seconds until the last look that came too early, and until the change was seen.
        self._durations: dict[Hashable, deque[tuple[float, float]]] = {}
        self._complained = False
        self._last_pass = float("-inf")

    # -- for those who wait

    def watch(
        self, key: str, wake: Callable[[], None], kind: Hashable = None, *, first: float = 0.0, patience: float = 0.0,
    ) -> Subscription[V]:  # fmt: skip
        """Wait for the object ``key``; ``wake`` is called, on any thread, after each look at it.

        :param kind: of the change waited for, for example (label, "launch"); its usual duration decides when to look.
        :param first: seconds before the first look as long as no duration is known.
        :param patience: seconds that a look may be put off so that it needs no question of its own.
        """
        now = self._timers.clock()
        watch = Subscription(self, key, wake, kind, now, first, patience)
        with self._lock:
            watch.next_look = now + self._pause(watch, now)
            self._watches[watch] = None
            self._arm(now)
        return watch

    def expected(self, kind: Hashable) -> float | None:
        """Seconds that such a change has taken lately; None when not known."""
        seen = self._durations.get(kind)
        # Seen by the first look: it came earlier, by an unknown time.
        part = 1.0 if self.narrow else EARLY
        return median(until if missed else part * until for missed, until in seen) if seen else None

    def _early(self, kind: Hashable, expected: float) -> float:
        """Seconds before the first look is worth a question."""
        early = EARLY * expected
        seen = self._durations.get(kind)
        if not self.narrow or not seen:
            return early
        missed, reached = max(missed for missed, _ in seen), min(until for _, until in seen)
        if missed >= reached:
            return early  # they do not all take equally long
        if not missed:
            return max(early, NARROWER * reached)  # may all have come earlier
        return max(early, reached if reached - missed <= NARROW * self.floor else (missed + reached) / 2)

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
                # What patience has added is not the cloud's.
                until = watch.planned if watch.patience else self._timers.clock()
                seen.append((watch.missed - watch.started, until - watch.started))

    # -- looking

    def _pause(self, watch: Subscription[V], now: float) -> float:
        """Seconds until the next look at the object."""
        if watch.failures:
            return Backoff(2 * self.floor, self.ceiling).pause(watch.failures)
        expected, waited = self.expected(watch.kind), now - watch.started
        if expected is None:
            # Nothing learned: a tenth of what has been waited, so that short things are seen at once and long ones are cheap.
            return min(self.ceiling, max(self.floor, waited / 10, watch.first - waited))
        early = self._early(watch.kind, expected)
        if waited < early:
            return min(self.ceiling, max(self.floor, early - waited))
        if waited < 1.5 * expected:
            return self.floor
        return min(self.ceiling, max(self.floor, (waited - expected) / 5))

    def _arm(self, now: float) -> None:
        """Plan the next pass; with the lock held."""
        idle = [watch for watch in self._watches if watch.key not in self._asking]
        hurried = min((watch.next_look for watch in idle if not watch.patience), default=float("inf"))
        due = min(
            (hurried if watch.next_look <= hurried <= watch.next_look + watch.patience else watch.next_look for watch in idle),
            default=None,
        )
        timer = self._timer
        if due is not None and self.batch > 1:
            # Those who wait fall into step, so that one question serves them all.
            due = max(due, self._last_pass + self.floor)
        if due is None or (timer is not None and timer.when <= due):
            return
        if timer is not None:
            timer.cancel()
        self._timer = self._timers.after(due - now, self._pass)

    def _pass(self) -> None:
        """Send off the questions that are due; on the timers' thread."""
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
                if watch.next_look <= now or (watch.next_look <= now + self.floor / 4 and watch.last_look + self.floor <= now)
            )
            keys = list(due)
            if due and self.batch > 1 and (spare := -len(keys) % self.batch):
                # The question goes out anyway: ask for others too that have not been looked at just now.
                rest = sorted(
                    (
                        watch
                        for watch in idle
                        if watch.key not in due and watch.last_look + self.floor <= now and watch.next_look - now < self.floor
                    ),
                    key=lambda watch: watch.next_look,
                )
                keys += list(dict.fromkeys(watch.key for watch in rest))[:spare]
            for watch in idle:
                if watch.key in due or watch.key in keys:
                    watch.planned = min(watch.next_look, now)
            alone = {watch.key for watch in idle if watch.alone}
            shared = [key for key in keys if key not in alone]
            questions = [shared[start : start + self.batch] for start in range(0, len(shared), self.batch)]
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
            self._log.debug("Cannot look at %s of %s: %s", len(refused), self.name, refused[0])
        if error is not None or len(refused) < len(keys):
            self._report(error, len(keys))
        for watch in told:
            try:
                watch.wake()
            except Exception:
                self._log.exception("Error telling about %s:", watch.key)

    def _report(self, error: BaseException | None, count: int) -> None:
        if error is None:
            if self._complained:
                self._log.info("Looking at %s works again", self.name)
            self._complained = False
            return
        level = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        self._log.log(level, "Cannot look at %s of %s, will look again: %s", count, self.name, error)

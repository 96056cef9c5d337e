"""A call rate that is reduced when the cloud throttles and recovers automatically."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from nodepool.cloud.errors import CallsStopped, CallTimeout, ErrorKind

FLOOR = 1 / 30
"""Lowest rate in calls per second."""
STEPS = 20
"""Successful calls that raise the rate from zero to the configured one."""
FORGIVEN = 300.0
"""Seconds without throttling after which the configured rate applies again, however few calls
were made.
"""
WHEN_UNLIMITED = 10.0
"""Rate in calls per second that an unlimited lane starts from when it is halved."""

Wait = Callable[[threading.Condition, float | None], object]


def _wait(condition: threading.Condition, seconds: float | None) -> object:
    return condition.wait(seconds)


class AdaptiveRate:
    """Lets callers proceed at least ``1 / pace`` seconds apart, in the order of their arrival.

    The rate starts as ``rate`` (calls per second; 0 or None: no limit). :meth:`throttled` halves
    it, at most once for calls that ran concurrently. Each :meth:`succeeded` restores a part
    (additive increase, multiplicative decrease), and time restores the rest.

    :param wait: ``wait(condition, seconds)``, called with the condition held; for tests.
    """

    def __init__(
        self,
        name: str,
        rate: float | None,
        *,
        floor: float = FLOOR,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait = _wait,
    ) -> None:
        self.name = name
        self.rate: float | None = rate or None
        self.clock = clock
        self._full = self.rate or WHEN_UNLIMITED
        self._floor = min(floor, self._full)
        self._wait = wait
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()
        self._pace: float | None = self.rate
        self._last: float | None = None
        self._halved = float("-inf")
        self._stopped = False

    @property
    def pace(self) -> float | None:
        """Return the calls per second allowed now; None: no limit."""
        return self._pace if self.slowed else self.rate

    @property
    def slowed(self) -> bool:
        """Return True from a throttled call until the configured rate is reached again."""
        return self._pace != self.rate and self.clock() - self._halved < FORGIVEN

    def describe(self) -> str:
        """Return a text for users: ``2/s`` or ``0.25/s of 2/s (throttled)``."""
        full = "unlimited" if self.rate is None else f"{self.rate:g}/s"
        return full if not self.slowed else f"{self.pace or 0:.3g}/s of {full} (throttled)"

    def acquire(self, deadline: float | None = None) -> float:
        """Wait for a turn; return the seconds waited.

        :param deadline: on the clock; :class:`CallTimeout` is raised as soon as it is certain to be
            missed.
        :raises CallsStopped: after :meth:`stop`.
        """
        arrived = self.clock()
        ticket = object()
        with self._condition:
            self._queue.append(ticket)
            try:
                while True:
                    if self._stopped:
                        raise CallsStopped(f"{self.name} is stopping")
                    now = self.clock()
                    turn = self._turn(ticket, now)
                    if turn is not None and turn <= now:
                        self._last = now
                        return now - arrived
                    if deadline is not None and (
                        deadline <= now or (turn is not None and turn > deadline)
                    ):
                        raise CallTimeout(
                            f"no free slot for a call within {deadline - arrived:.1f} s at "
                            f"{self.describe()}",
                            ErrorKind.THROTTLED if self.slowed else ErrorKind.TRANSIENT,
                        )
                    until = min(
                        (time for time in (turn, deadline) if time is not None), default=None
                    )
                    self._wait(self._condition, None if until is None else until - now)
            finally:
                self._queue.remove(ticket)
                self._condition.notify_all()

    def _turn(self, ticket: object, now: float) -> float | None:
        """Return when it is this ticket's turn; None: others are first."""
        if self._queue[0] is not ticket:
            return None
        pace = self.pace
        if pace is None or self._last is None:
            return now
        return self._last + 1 / pace

    def throttled(self, started: float | None = None) -> None:
        """Reduce the rate after a call that started at ``started`` (on the clock) was throttled."""
        with self._condition:
            now = self.clock()
            if started is not None and started <= self._halved:
                return  # one of a burst for which the rate was already reduced
            pace = self.pace or self._full
            self._halved = now
            self._pace = max(self._floor, pace / 2)
            self._condition.notify_all()

    def succeeded(self) -> None:
        """Restore part of the rate after a successful call."""
        if not self.slowed:
            return
        with self._condition:
            if self._pace is None or not self.slowed:
                return
            self._pace += self._full / STEPS
            if self._pace >= self._full:
                self._pace = self.rate
            self._condition.notify_all()

    def __enter__(self) -> AdaptiveRate:
        self.acquire()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        pass

    def stop(self) -> None:
        """End all waits."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

"""A clock that tests move by hand, and the parts of ``nodepool.cloud`` driven by it."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nodepool.base.timers import Timer, Timers, TimerThread
from nodepool.cloud.errors import ErrorKind


class HandClock:
    """Time stands still until somebody waits; ``wait`` passes it immediately."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    monotonic = time = __call__

    def wait(self, _what: object, seconds: float | None) -> bool:
        """For ``AdaptiveRate`` and ``CloudCalls``: a wait that is never woken early."""
        assert seconds is not None, "would wait for ever"
        self.waits.append(seconds)
        self.now += seconds
        return isinstance(_what, threading.Event) and _what.is_set()


class HandTimers(Timers):
    """Timers that fire while the test moves the clock."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__("test", TimerThread(), clock)
        self.hand = clock
        self._planned: list[tuple[float, int, Timer]] = []
        self._number = itertools.count()

    def after(self, seconds: float, function: Callable[[], None]) -> Timer:
        timer = Timer(self.hand.now + max(0.0, seconds), function)
        heapq.heappush(self._planned, (timer.when, next(self._number), timer))
        return timer

    def pass_time(self, seconds: float) -> None:
        end = self.hand.now + seconds
        while self._planned and self._planned[0][0] <= end:
            when, _, timer = heapq.heappop(self._planned)
            self.hand.now = max(self.hand.now, when)
            if timer.function is not None:
                timer.function()
        self.hand.now = end


class HandExecutor:
    """Runs functions immediately, or keeps them until ``run_one`` when ``held``."""

    def __init__(self) -> None:
        self.held = False
        self.kept: list[tuple[Callable[[], Any], Future[Any]]] = []

    def __call__(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.kept.append((function, future))
        if not self.held:
            self.run_one()
        return future

    def run_one(self) -> None:
        function, future = self.kept.pop(0)
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)


class CloudError(Exception):
    def __init__(self, kind: ErrorKind, text: str = "") -> None:
        super().__init__(text or kind.value)
        self.kind = kind


def classify(error: BaseException) -> ErrorKind:
    return getattr(error, "kind", ErrorKind.OTHER)

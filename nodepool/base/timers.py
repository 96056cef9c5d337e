"""A thread that calls short functions at given times, shared by all waits of a process."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from nodepool.exceptions import FOREIGN

log = logging.getLogger("nodepool.cloud.timers")


class Timer:
    """A scheduled call; ``cancel`` may be called at any time."""

    __slots__ = ("function", "when")

    def __init__(self, when: float, function: Callable[[], None]) -> None:
        self.when = when
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self.function = None


class Timers:
    """Calls short functions of one provider after ``seconds``; submit longer work elsewhere.

    Created by :meth:`nodepool.base.threads.Threads.timers`.
    """

    def __init__(
        self, name: str, thread: TimerThread, clock: Callable[[], float] | None = None
    ) -> None:
        self.name = name
        # Not as a default: the simulation, which replaces the clock, has imported this module by
        # then.
        self.clock = clock or time.monotonic
        self.stopped = False
        self._thread = thread

    def after(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Schedule a call; ignored after :meth:`stop`."""
        timer = Timer(self.clock() + max(0.0, seconds), function)
        self._thread.add(self, timer)
        return timer

    def stop(self) -> None:
        """Cancel all timers, without waiting for a running call."""
        self.stopped = True
        self._thread.remove(self)


class TimerThread:
    """The thread of a process: from the first timer until the last :meth:`Timers.stop`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, Timer, Timers]] = []
        self._count = itertools.count()
        self._users: set[Timers] = set()
        self._thread: threading.Thread | None = None

    def add(self, user: Timers, timer: Timer) -> None:
        with self._condition:
            if user.stopped:
                return
            self._users.add(user)
            heapq.heappush(self._heap, (timer.when, next(self._count), timer, user))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="Thread-timers", daemon=True)
                thread.start()  # if it cannot, the next timer of any provider tries again
                self._thread = thread
            elif self._heap[0][2] is timer:
                self._condition.notify()

    def remove(self, user: Timers) -> None:
        with self._condition:
            self._users.discard(user)
            self._heap = [entry for entry in self._heap if entry[3] is not user]
            heapq.heapify(self._heap)
            self._condition.notify()

    def _next(self) -> tuple[Timer, Timers] | None:
        with self._condition:
            while self._users:
                left = self._heap[0][0] - self._heap[0][3].clock() if self._heap else None
                if left is None or left > 0:
                    self._condition.wait(left)
                else:
                    return heapq.heappop(self._heap)[2:]
            self._thread = None
            return None

    def _run(self) -> None:
        while (due := self._next()) is not None:
            timer, user = due
            function = timer.function
            if function is None or user.stopped:
                continue
            try:
                function()
            except FOREIGN:
                log.exception("Error in a timer of %s:", user.name)

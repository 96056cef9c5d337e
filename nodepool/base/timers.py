"""A thread that calls short functions at given times, shared by all waits of one provider."""

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
    """Calls functions after ``seconds``. They must be short: submit longer work elsewhere.

    The thread starts with the first timer and ends with :meth:`stop`.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.clock = clock
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def after(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Schedule a call; ignored after :meth:`stop`."""
        timer = Timer(self.clock() + max(0.0, seconds), function)
        with self._condition:
            if self._stopped:
                return timer
            heapq.heappush(self._heap, (timer.when, next(self._count), timer))
            if self._heap[0][2] is timer:
                self._condition.notify()
            if self._thread is None:
                # Not named "Thread-": test benches wait until threads with that prefix have ended.
                self._thread = threading.Thread(target=self._run, name=f"Thread-timers-{self.name}", daemon=True)
                self._thread.start()
        return timer

    def stop(self) -> None:
        """Cancel all timers and end the thread, without waiting for a running call."""
        with self._condition:
            self._stopped = True
            self._heap.clear()
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _next(self) -> Timer | None:
        with self._condition:
            while not self._stopped:
                if not self._heap:
                    self._condition.wait()
                    continue
                left = self._heap[0][0] - self.clock()
                if left > 0:
                    self._condition.wait(left)
                    continue
                return heapq.heappop(self._heap)[2]
            return None

    def _run(self) -> None:
        while (timer := self._next()) is not None:
            function = timer.function
            if function is None:
                continue
            try:
                function()
            except FOREIGN:
                log.exception("Error in a timer of %s:", self.name)

"""Helper threads of a pool whose driver's checks may block; few, and only as long as there is work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

#: Threads that a pool has at most, and without asking.
MOST, OWN = 8, 2
#: Further threads of all pools of the launcher together.
COMMON = 48
#: Seconds after which a thread without work ends.
IDLE = 5.0


class Helpers:
    """Runs functions on up to :data:`MOST` threads.

    Beyond :data:`OWN` each takes a place of ``common``, so that many pools do not mean very many threads, and none stands
    still because of the others.

    :param common: ``threading.BoundedSemaphore(COMMON)`` of the launcher.
    """

    def __init__(self, name: str, common: threading.BoundedSemaphore) -> None:
        self._name = name
        self._common = common
        self._condition = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._threads = self._idle = self._started = 0
        self._closed = False

    def submit(self, function: Callable[[], None]) -> bool:
        """Run it soon; it has to deal with its exceptions.  False: closed."""
        with self._condition:
            if self._closed:
                return False
            self._work.append(function)
            if self._idle >= len(self._work):
                self._condition.notify()
            elif self._threads < OWN:
                self._start(borrowed=False)
            elif self._threads < MOST and self._common.acquire(blocking=False):
                self._start(borrowed=True)
            return True

    def _start(self, borrowed: bool) -> None:
        self._threads += 1
        self._started += 1
        threading.Thread(target=self._run, args=(borrowed,), name=f"{self._name}_{self._started}", daemon=True).start()

    def _run(self, borrowed: bool) -> None:
        while (function := self._next()) is not None:
            function()
        if borrowed:
            self._common.release()

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            self._idle += 1
            self._condition.wait_for(lambda: self._work or self._closed, IDLE)
            self._idle -= 1
            if self._work and not self._closed:
                return self._work.popleft()
            self._threads -= 1
            return None

    def close(self) -> None:
        """Drop what has not begun; the threads end."""
        with self._condition:
            self._closed = True
            self._work.clear()
            self._condition.notify_all()

"""One thread that waits for many descriptors and times, and threads that work for it (C.5)."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger("nodepool.nodemanager.server")

IN, OUT = select.EPOLLIN, select.EPOLLOUT


class Waiter:
    """Something with at most one descriptor and one time that the loop watches; to be touched by the loop's thread only."""

    #: Of those that are ready at the same time, the lowest first.
    rank = 0

    def __init__(self) -> None:
        self.number = -1
        self.mask: int | None = None
        self.due: float | None = None

    def ready(self) -> None:
        """The descriptor is ready, or its other end is gone."""

    def late(self) -> None:
        """It is time."""


class EventLoop:
    """``name``: of the thread."""

    def __init__(self, name: str) -> None:
        self._poll = select.epoll()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wake_read, IN)
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._waiters: dict[int, Waiter] = {}
        self._times: list[tuple[float, int, Waiter]] = []
        self._count = itertools.count()
        self._running = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        #: Done after each round.
        self.afterwards: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._running = True
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Whether the thread has ended."""
        self._running = False
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """When the thread has ended."""
        with self._lock:
            if self._wake_write >= 0:
                self._poll.close()
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1

    # -- from any thread

    def post(self, step: Callable[[], None]) -> None:
        """Have it done by the loop's thread."""
        self._posted.append(step)
        self._wake()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    # -- from the loop's thread

    def watch(self, waiter: Waiter, mask: int | None) -> None:
        """What to be woken up for; 0: only when the other end is gone; None: nothing."""
        if mask == waiter.mask:
            return
        if mask is None:
            self._waiters.pop(waiter.number, None)
            self._poll.unregister(waiter.number)
        elif waiter.mask is None:
            self._poll.register(waiter.number, mask)
            self._waiters[waiter.number] = waiter
        else:
            self._poll.modify(waiter.number, mask)
        waiter.mask = mask

    def at(self, waiter: Waiter, when: float | None) -> None:
        """By the monotonic clock; None: never."""
        waiter.due = when
        if when is None:
            return
        heapq.heappush(self._times, (when, next(self._count), waiter))
        if len(self._times) > 4 * len(self._waiters) + 4096:
            # Most belong to what has ended before its time.
            self._times = [entry for entry in self._times if entry[2].due == entry[0]]
            heapq.heapify(self._times)

    def _run(self) -> None:
        while self._running:
            self._do(self._round)

    def _round(self) -> None:
        while self._times and self._times[0][2].due != self._times[0][0]:
            heapq.heappop(self._times)
        events = self._poll.poll(max(0.0, self._times[0][0] - time.monotonic()) if self._times else None)
        ready = [self._waiters[number] for number, _ in events if number in self._waiters]
        if len(ready) < len(events):
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        for _ in range(len(self._posted)):
            self._do(self._posted.popleft())
        for waiter in sorted(ready, key=lambda waiter: waiter.rank):
            if waiter.mask is not None:
                self._do(waiter.ready)
        now = time.monotonic()
        while self._times and self._times[0][0] <= now:
            when, _, waiter = heapq.heappop(self._times)
            if waiter.due == when:
                waiter.due = None
                self._do(waiter.late)
        self._do(self.afterwards)

    @staticmethod
    def _do(step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            log.exception("Error in the connections of the API:")


class Workers:
    """Threads that are made when they are needed."""

    def __init__(self, name: str, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, name)
        self._idle = threading.Condition()
        self._working = 0

    def do(self, job: Callable[[], None]) -> None:
        with self._idle:
            self._working += 1
        try:
            self._pool.submit(self._run, job).add_done_callback(lambda _: self._end())
        except RuntimeError as error:
            # Stopping; or no thread can be had, and those that there are will do it.
            log.error("A thread for the API cannot be had: %s", error)
            self._end()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException:
            log.exception("Error in the connections of the API:")

    def _end(self) -> None:
        with self._idle:
            self._working -= 1
            self._idle.notify_all()

    def stop(self, timeout: float) -> bool:
        """Whether all have ended."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._idle:
            return self._idle.wait_for(lambda: self._working <= 0, max(0.0, timeout))

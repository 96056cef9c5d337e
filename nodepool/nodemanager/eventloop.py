"""One thread that waits for many descriptors and timers, and worker threads (C.5)."""

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

log = logging.getLogger("nodepool.nodemanager.server")

IN, OUT = select.EPOLLIN, select.EPOLLOUT
#: Threads that are started in advance.
AHEAD = 4
#: Seconds until the next attempt to start a thread after a failure.
SHORTAGE_WAIT = 1.0


class Waiter:
    """A descriptor and a timer that the loop watches; used by the loop's thread only."""

    #: Of several that are ready, the lowest goes first.
    rank = 0

    def __init__(self) -> None:
        self.number = -1
        self.mask: int | None = None
        self.due: float | None = None

    def ready(self) -> None:
        """Handle a descriptor that is ready or whose other end is closed."""

    def late(self) -> None:
        """Handle the end of the time limit."""


class EventLoop:
    """The loop. ``name``: of the thread."""

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
        #: Called after each round.
        self.afterwards: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._running = True
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Stop the thread; return whether it has ended."""
        self._running = False
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Close the descriptors, after the thread has ended."""
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
        """Set the events to wait for; 0: only the end of the connection; None: nothing."""
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
        """Set the time limit by the monotonic clock; None: never."""
        waiter.due = when
        if when is None:
            return
        heapq.heappush(self._times, (when, next(self._count), waiter))
        if len(self._times) > 4 * len(self._waiters) + 4096:
            # Most belong to waiters that ended before their time limit.
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
    """Threads that are started on demand, as long as there can be more.

    One separate thread starts them: without memory for the first step of a new thread, Python lets the caller of start() wait
    forever (CPython issue 140746). In that case the existing threads do all the work.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        lock = threading.Lock()
        self._work, self._need, self._idle = threading.Condition(lock), threading.Condition(lock), threading.Condition(lock)
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads = 0
        #: Threads without a job.
        self._free = 0
        #: Jobs that are waiting or running.
        self._working = 0
        self._running = True

    def start(self) -> None:
        """Start the first threads. Raises RuntimeError: the host has none available."""
        for _ in range(min(AHEAD, self._most)):
            with self._work:
                self._threads += 1
            self._add()
        if self._threads < self._most:
            threading.Thread(target=self._make, name=f"{self._name}_more", daemon=True).start()

    def _add(self) -> None:
        threading.Thread(target=self._run, name=f"{self._name}_{self._threads}", daemon=True).start()

    def do(self, job: Callable[[], None]) -> None:
        with self._work:
            if not self._running:
                return
            self._working += 1
            self._jobs.append(job)
            if len(self._jobs) <= self._free:
                self._work.notify()
            else:
                self._need.notify()

    def _make(self) -> None:
        while True:
            with self._need:
                self._need.wait_for(lambda: not self._running or (self._threads < self._most and len(self._jobs) > self._free))
                if not self._running:
                    return
                self._threads += 1
            try:
                self._add()
            except RuntimeError as error:
                log.error("Starting a thread for the API failed, continuing with %s threads: %s", self._threads - 1, error)
                with self._need:
                    self._threads -= 1
                    self._need.wait(SHORTAGE_WAIT)

    def _run(self) -> None:
        while True:
            with self._work:
                self._free += 1
                self._work.wait_for(lambda: self._jobs or not self._running)
                self._free -= 1
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException:
                log.exception("Error in the connections of the API:")
            with self._work:
                self._working -= 1
                self._idle.notify_all()

    def stop(self, timeout: float) -> bool:
        """Drop waiting jobs; return whether all others have ended."""
        with self._work:
            self._running = False
            self._working -= len(self._jobs)
            self._jobs.clear()
            self._work.notify_all()
            self._need.notify_all()
            return self._idle.wait_for(lambda: self._working <= 0, max(0.0, timeout))

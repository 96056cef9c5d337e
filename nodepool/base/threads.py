"""Threads that all parts of a process share, with a limit for each part.

A thread per provider and type of call would be idle nearly always. Here a thread that has finished
one job takes the next one of any lane. The number of threads grows when jobs wait, so a lane whose
jobs hang delays no other lane.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from nodepool.base.timers import Timers, TimerThread

T = TypeVar("T")
log = logging.getLogger("nodepool.threads")

#: Threads that are started without a delay.
AT_ONCE = 8
#: Seconds that the oldest job waits before a further thread starts for it.
PATIENCE = 0.005
#: Seconds after which a thread without work ends.
IDLE = 5.0


class Lane(Executor):
    """An executor that starts jobs in order, at most ``limit`` at a time. See Threads.lane."""

    def __init__(self, threads: Threads, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        #: Jobs that run or that a thread is about to take, at most `limit`.
        self.active = 0
        #: Of these, the ones that no thread has taken.
        self.offered = 0
        self.closed = False
        self._threads = threads
        self.idle = threading.Condition(threads.lock)

    def submit(self, function: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        """:raises RuntimeError: the executor was shut down."""
        future: Future[T] = Future()
        self._threads.add(self, future, lambda: function(*args, **kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._threads.lock:
            self.closed = True
            dropped = [future for future, _job in self.jobs] if cancel_futures else []
            if cancel_futures:
                self.jobs.clear()
        for future in dropped:
            future.cancel()
        if wait:
            with self.idle:
                self.idle.wait_for(lambda: not self.active)


class Threads:
    """The threads. They end when they have had no work for `IDLE` seconds."""

    def __init__(self, name: str) -> None:
        self.lock = threading.Lock()
        self._name = name
        self._work = threading.Condition(self.lock)
        #: Since when a lane has had a job that no thread has taken, once for each such job within
        #: its limit.
        self._ready: deque[tuple[float, Lane]] = deque()
        self.count = 0
        #: Those without work.
        self.waiting = 0
        self._started = 0
        #: Whether a further thread has started that takes no job before the oldest one has waited.
        self._growing = False
        self._timer_thread = TimerThread()

    def lane(self, name: str, limit: int) -> Lane:
        """Return an executor with at most ``limit`` threads, which have its name while they
        work.
        """
        return Lane(self, name, limit)

    def timers(self, name: str) -> Timers:
        """Return timers that can be stopped without stopping those of others."""
        return Timers(name, self._timer_thread)

    def add(self, lane: Lane, future: Future[Any], job: Callable[[], Any]) -> None:
        with self.lock:
            if lane.closed:
                raise RuntimeError(f"{lane.name} was shut down")
            lane.jobs.append((future, job))
            if lane.active < lane.limit:
                lane.active += 1
                self._offer(lane)
                if self.waiting >= len(self._ready):
                    self._work.notify()
            thread = self._further()
        self._begin(thread)

    def _offer(self, lane: Lane) -> None:
        lane.offered += 1
        self._ready.append((time.monotonic(), lane))

    def _further(self) -> threading.Thread | None:
        """Return a thread to start if none waits for the last of the jobs."""
        if self._growing or self.waiting >= len(self._ready):
            return None
        self._growing = self.count >= AT_ONCE
        self.count += 1
        self._started += 1
        name = f"{self._name}-{self._started}"
        return threading.Thread(target=self._run, args=(self._growing,), name=name, daemon=True)

    def _begin(self, thread: threading.Thread | None) -> None:
        """Start it. This takes time, so the caller does not hold the lock."""
        if thread is None:
            return
        try:
            thread.start()
        except RuntimeError as error:  # as many as the system allows
            log.error(
                "Cannot start a thread; jobs wait for the other %d threads: %s",
                self.count - 1,
                error,
            )
            with self.lock:
                self.count -= 1
                self._growing = False

    def _is_needed(self) -> bool:
        """Wait for `PATIENCE`; return whether the oldest job has waited as long."""
        left = PATIENCE
        while left > 0:
            time.sleep(left)
            with self.lock:
                if self.waiting >= len(self._ready):
                    self._growing = False
                    self.count -= 1
                    return False
                left = self._ready[0][0] + PATIENCE - time.monotonic()
                self._growing = left > 0
        return True

    def _run(self, hesitate: bool) -> None:
        if hesitate and not self._is_needed():
            return
        thread = threading.current_thread()
        name = thread.name
        lane: Lane | None = None
        while True:
            with self.lock:
                if lane is not None:
                    self._finished(lane)
                lane, future, job = self._take()
                further = self._further()
            self._begin(further)
            if lane is None:
                return
            if future is None or not future.set_running_or_notify_cancel():
                continue
            thread.name = lane.name
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            thread.name = name
            del future, job

    def _finished(self, lane: Lane) -> None:
        if len(lane.jobs) > lane.offered:
            self._offer(lane)  # to this thread, unless another is faster
            return
        lane.active -= 1
        if not lane.active:
            lane.idle.notify_all()

    def _take(self) -> tuple[Lane | None, Any, Any]:
        """Return a lane with its next job, if not canceled; no lane after `IDLE` seconds."""
        self.waiting += 1
        self._work.wait_for(lambda: self._ready, IDLE)
        self.waiting -= 1
        if not self._ready:
            self.count -= 1
            return None, None, None
        _since, lane = self._ready.popleft()
        lane.offered -= 1
        return (lane, *(lane.jobs.popleft() if lane.jobs else (None, None)))


_threads = Threads("Thread-shared")


def shared() -> Threads:
    """Return the threads of this process."""
    return _threads

"""A queue of keys with merging, delays, priorities and exclusion, and its worker loop.

Keys only say *which object to check*.  Adding a key that is already queued has no effect; a key
that is being processed is handed out again afterwards, never to two workers at the same time.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from nodepool.base.backoff import Backoff
from nodepool.exceptions import FOREIGN

K = TypeVar("K", bound=Hashable)
#: Longest wait at a time (seconds): threads cannot wait for thousands of years, which a record may
#: ask for.
LONGEST = 86400.0


class WorkQueue(Generic[K]):
    """A thread-safe queue. ``monotonic`` is injected so that tests of delays do not wait."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now = monotonic
        self._condition = threading.Condition()
        self._urgent: deque[K] = deque()
        self._normal: deque[K] = deque()
        self._ready: set[K] = set()
        self._working: set[K] = set()
        self._again: dict[K, bool] = {}
        self._delayed: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        self._count = itertools.count()
        self._closed = False

    def __len__(self) -> int:
        with self._condition:
            return len(self._ready) + len(self._due)

    def add(self, key: K) -> None:
        """Make the key ready now, even if it was delayed."""
        with self._condition:
            self._due.pop(key, None)
            if self._add(key, True):
                self._condition.notify()

    def add_all(self, keys: Iterable[K]) -> None:
        """Make all the keys ready now, after those that are added one by one."""
        with self._condition:
            for key in keys:
                self._due.pop(key, None)
                self._add(key, False)
            self._condition.notify_all()

    def _add(self, key: K, urgent: bool) -> bool:
        if key in self._working:
            self._again[key] = self._again.get(key, False) or urgent
            return False
        if key in self._ready:
            return False
        self._ready.add(key)
        (self._urgent if urgent else self._normal).append(key)
        return True

    def add_later(self, key: K, delay: float) -> None:
        """Make the key ready in ``delay`` seconds, or earlier if it was already due earlier."""
        self.add_all_later({key: delay})

    def add_all_later(self, delays: Mapping[K, float]) -> None:
        """Make each key ready in its seconds, or earlier if it was already due earlier."""
        with self._condition:
            now = self._now()
            for key, delay in delays.items():
                due = now + delay
                if key not in self._ready and self._due.get(key, due + 1) > due:
                    self._due[key] = due
                    heapq.heappush(self._delayed, (due, next(self._count), key))
            self._condition.notify()

    def _promote(self) -> float | None:
        """Move due keys to the ready ones; return the seconds until the next, or None."""
        while self._delayed:
            due, _, key = self._delayed[0]
            if self._due.get(key) != due:
                heapq.heappop(self._delayed)
                continue
            left = due - self._now()
            if left > 0:
                return left
            heapq.heappop(self._delayed)
            del self._due[key]
            self._add(key, False)
        return None

    def get(self) -> K | None:
        """Wait for the next key and return it; None when closed.

        Call :meth:`done` when the key has been processed.
        """
        with self._condition:
            while True:
                wait = self._promote()
                if self._closed:
                    return None
                if self._urgent or self._normal:
                    key = (self._urgent or self._normal).popleft()
                    self._ready.discard(key)
                    self._working.add(key)
                    return key
                self._condition.wait(None if wait is None else min(wait, LONGEST))

    def done(self, key: K) -> None:
        with self._condition:
            self._working.discard(key)
            urgent = self._again.pop(key, None)
            if urgent is not None and self._add(key, urgent):
                self._condition.notify()

    def close(self) -> None:
        """Wake all workers; no further keys are handed out."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


class Reconciler(Generic[K]):
    """Threads that call ``reconcile(key)`` for each key.

    It returns None (done) or the seconds until the next check. After an exception, which is logged,
    it is called again with a growing delay.
    """

    BACKOFF = Backoff(0.5, 60.0)

    def __init__(
        self,
        name: str,
        reconcile: Callable[[K], float | None],
        log: logging.Logger,
        threads: int = 1,
        queue: WorkQueue[K] | None = None,
    ) -> None:
        self.name = name
        self.queue: WorkQueue[K] = WorkQueue() if queue is None else queue
        self._reconcile = reconcile
        self._log = log
        self._failures: dict[K, int] = {}
        self._threads = [
            threading.Thread(
                target=self._run, name=name if threads == 1 else f"{name}_{i}", daemon=True
            )
            for i in range(threads)
        ]

    @property
    def threads(self) -> list[threading.Thread]:
        return self._threads

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self.queue.close()

    def join(self, timeout: float | None = None) -> None:
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout)

    def _run(self) -> None:
        queue = self.queue
        while (key := queue.get()) is not None:
            try:
                again = self._reconcile(key)
            except FOREIGN:
                count = self._failures[key] = self._failures.get(key, 0) + 1
                again = self.BACKOFF.pause(count)
                self._log.exception("Reconciling %s failed; retrying in %.1f s", key, again)
            else:
                self._failures.pop(key, None)
            finally:
                queue.done(key)
            if again is not None:
                queue.add_later(key, again)

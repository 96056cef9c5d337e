"""How long to wait after failures: the formula, and the same by key."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Seconds: ``first`` after the first failure, ``factor`` times as many after each further one, at most ``longest``.

    :param jitter: the part of a pause that is left to chance, so that those who failed together do not try again together.
    """

    first: float
    longest: float
    factor: float = 2.0
    jitter: float = 0.0

    def pause(self, failures: int, chance: Callable[[], float] = random.random) -> float:
        """Seconds to wait after so many failures in a row."""
        if failures < 1:
            return 0.0
        # Bounded: a float has no room for what grows for days.
        pause = min(self.longest, self.first * self.factor ** min(failures - 1, 60))
        return pause * (1 - self.jitter + self.jitter * chance())


@dataclass
class _Failures:
    count: int
    until: float
    #: What was tried; when it is another thing now, there is no pause.
    subject: Hashable


class KeyedBackoff:
    """Pauses by key; kept in memory, a restart tries everything at once."""

    def __init__(self, backoff: Backoff, now: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff
        self._now = now
        self._lock = threading.Lock()
        self._failures: dict[Hashable, _Failures] = {}

    def failed(self, key: Hashable, subject: Hashable = None, *, together: bool = False) -> float:
        """Note a failure; returns when (by the clock given) to try again.

        :param together: those that fail before that count as one; they were under way at the same time.
        """
        with self._lock:
            now, before = self._now(), self._failures.get(key)
            if before is None or before.subject != subject:
                before = _Failures(0, now, subject)
            if not (together and now < before.until):
                before.count += 1
                before.until = now + self._backoff.pause(before.count)
            self._failures[key] = before
            return before.until

    def succeeded(self, key: Hashable) -> None:
        with self._lock:
            self._failures.pop(key, None)

    def attempts(self, key: Hashable, subject: Hashable = None) -> int:
        """Failures in a row of this subject."""
        with self._lock:
            failures = self._failures.get(key)
            return failures.count if failures is not None and failures.subject == subject else 0

    def wait(self, key: Hashable, subject: Hashable = None) -> float:
        """Seconds to wait before the next attempt; 0 when it may be now."""
        with self._lock:
            failures = self._failures.get(key)
            if failures is None or failures.subject != subject:
                return 0.0
            return max(0.0, failures.until - self._now())

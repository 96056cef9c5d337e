"""Exponential back-off: the formula, and pauses by key."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Compute pauses in seconds after consecutive failures.

    The pause is ``first`` after the first failure, multiplied by ``factor`` after each further one,
    and at most ``longest``.

    :param jitter: the random part of a pause, so that parties that failed together do not retry
        together.
    """

    first: float
    longest: float
    factor: float = 2.0
    jitter: float = 0.0

    def pause(self, failures: int, chance: Callable[[], float] = random.random) -> float:
        """Return the seconds to wait after this many consecutive failures."""
        if failures < 1:
            return 0.0
        # Bounded: after days of failures the power would overflow a float.
        pause = min(self.longest, self.first * self.factor ** min(failures - 1, 60))
        return pause * (1 - self.jitter + self.jitter * chance())


@dataclass
class _Failures:
    count: int
    until: float
    #: What was tried; a failure of something else starts without a pause.
    subject: Hashable


class KeyedBackoff:
    """Pauses by key. They are kept in memory: after a restart everything is tried immediately."""

    def __init__(self, backoff: Backoff, now: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff
        self._now = now
        self._lock = threading.Lock()
        self._failures: dict[Hashable, _Failures] = {}

    def failed(
        self,
        key: Hashable,
        subject: Hashable = None,
        *,
        together: bool = False,
        final: bool = False,
    ) -> float:
        """Record a failure; return when (by the given clock) to retry.

        :param final: no attempt with this subject can succeed: infinity is returned.
        :param together: failures before this time count as one, because those attempts ran
            concurrently.
        """
        with self._lock:
            now, before = self._now(), self._failures.get(key)
            if before is None or before.subject != subject:
                before = _Failures(0, now, subject)
            if not (together and now < before.until):
                before.count += 1
                before.until = math.inf if final else now + self._backoff.pause(before.count)
            self._failures[key] = before
            return before.until

    def succeeded(self, key: Hashable) -> None:
        with self._lock:
            self._failures.pop(key, None)

    def attempts(self, key: Hashable, subject: Hashable = None) -> int:
        """Return the number of consecutive failures of this subject."""
        with self._lock:
            failures = self._failures.get(key)
            return failures.count if failures is not None and failures.subject == subject else 0

    def wait(self, key: Hashable, subject: Hashable = None) -> float:
        """Return the seconds until the next attempt; 0 if it may start now."""
        with self._lock:
            failures = self._failures.get(key)
            if failures is None or failures.subject != subject:
                return 0.0
            return max(0.0, failures.until - self._now())

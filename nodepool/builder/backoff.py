"""Growing delays between attempts (builder.md sections 6 and 9)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

#: Seconds; no delay grows longer.
MAX_DELAY = 3600.0


@dataclass
class _Failures:
    count: int
    until: float
    #: What was tried; when it is another thing now, there is no delay.
    subject: Hashable


class Backoff:
    """Delays by key; kept in memory, a restart tries everything at once.

    :param first: seconds after the first failure; doubled with each further one.
    """

    def __init__(self, first: float, now: Callable[[], float]) -> None:
        self._first = first
        self._now = now
        self._lock = threading.Lock()
        self._failures: dict[Hashable, _Failures] = {}

    def failed(self, key: Hashable, subject: Hashable = None) -> float:
        """Note a failure; returns when (by the clock given) to try again."""
        with self._lock:
            before = self._failures.get(key)
            count = before.count + 1 if before is not None and before.subject == subject else 1
            until = self._now() + min(MAX_DELAY, self._first * 2.0 ** min(count - 1, 30))
            self._failures[key] = _Failures(count, until, subject)
            return until

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

    def keep(self, keys: set[Hashable]) -> None:
        """Forget all others."""
        with self._lock:
            for key in set(self._failures) - keys:
                del self._failures[key]

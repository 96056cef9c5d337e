"""Spacing of calls to a service (driver-api.md 6.5)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


class RateLimitInstance:
    """One use of a limiter; logs how long the work and the wait before it took."""

    def __init__(self, limiter: RateLimiter, logmethod: Callable[..., Any] | None, msg: str | None) -> None:
        self.limiter = limiter
        self.logmethod = logmethod
        self.msg = msg
        self.delay = 0.0
        self.start_time = 0.0
        self.end_time = 0.0

    def __enter__(self) -> RateLimitInstance:
        self.delay = self.limiter.wait()
        self.start_time = self.limiter.clock()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.end_time = self.limiter.clock()
        if self.logmethod:
            self.logmethod("%s in %ss after %ss delay", self.msg, self.end_time - self.start_time, self.delay)


class RateLimiter:
    """Lets callers pass at least ``1 / rate_limit`` seconds apart.

    ``rate_limit`` is in operations per second; 0 or None means no limit. The first caller never waits. The work inside
    the ``with`` block is not serialized.
    """

    def __init__(
        self,
        name: str,
        rate_limit: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] = time.sleep,
    ) -> None:
        self.name = name
        self.rate_limit = rate_limit
        self.delta = 1.0 / rate_limit if rate_limit else 0.0
        self.clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._last: float | None = None

    def wait(self) -> float:
        """Return when the next operation may start; the result is the time waited in seconds."""
        if not self.delta:
            return 0.0
        arrived = self.clock()
        # Sleeping under the lock keeps callers in the order of the lock and strictly apart.
        with self._lock:
            now = self.clock()
            while self._last is not None and (remaining := self._last + self.delta - now) > 0:
                self._sleep(remaining)
                now = self.clock()
            self._last = now
        return now - arrived

    def __call__(self, logmethod: Callable[..., Any] | None, msg: str) -> RateLimitInstance:
        return RateLimitInstance(self, logmethod, msg)

    def __enter__(self) -> RateLimiter:
        self.wait()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

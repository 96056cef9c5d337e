"""Spacing of calls to a service (DRV-6.5)."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from nodepool.cloud.rates import AdaptiveRate


class RateLimitInstance:
    """One use of a limiter; logs how long the work and the wait before it took."""

    def __init__(
        self, limiter: RateLimiter, logmethod: Callable[..., Any] | None, msg: str | None
    ) -> None:
        self.limiter = limiter
        self.logmethod = logmethod
        self.msg = msg
        self.delay = 0.0
        self.start_time = 0.0
        self.end_time = 0.0

    def __enter__(self) -> RateLimitInstance:
        self.delay = self.limiter.acquire()
        self.start_time = self.limiter.clock()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.end_time = self.limiter.clock()
        if self.logmethod:
            self.logmethod(
                "%s in %ss after %ss delay", self.msg, self.end_time - self.start_time, self.delay
            )


class RateLimiter(AdaptiveRate):
    """Lets callers pass at least ``1 / rate_limit`` seconds apart.

    ``rate_limit`` is in operations per second; 0 or None means no limit. The first caller never
    waits. The work inside the ``with`` block is not serialized.
    """

    def __init__(self, name: str, rate_limit: float | None, **options: Any) -> None:
        super().__init__(name, rate_limit, **options)
        self.rate_limit = rate_limit

    def __call__(self, logmethod: Callable[..., Any] | None, msg: str) -> RateLimitInstance:
        return RateLimitInstance(self, logmethod, msg)

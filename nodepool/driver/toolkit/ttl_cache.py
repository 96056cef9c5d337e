"""A cached answer that is refreshed in the background (DRV-6.6)."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

T = TypeVar("T")

LOG = logging.getLogger("nodepool.driver.LazyExecutorTTLCache")


class _CachedCall(Generic[T]):
    """The state of one wrapped function."""

    def __init__(self, cache: LazyExecutorTTLCache, func: Callable[..., T]) -> None:
        self._cache = cache
        self._func = func
        # reentrant: the done-callback of a refresh that has ended already runs immediately, under
        # the lock
        self._lock = threading.RLock()
        #: The last value and the last error, if that is newer, with their times.
        self._value: tuple[float, T] | None = None
        self._failure: tuple[float, BaseException] | None = None
        self._refreshing = False

    def __call__(self, *args: object, **kw: object) -> T:
        cache = self._cache
        with self._lock:
            now, failure = cache.clock(), self._failure
            may_ask = not self._refreshing and (failure is None or now >= failure[0] + cache.ttl)
            if self._value is None:
                return self._ask(*args, **kw)
            fetched, value = self._value
            if failure is not None and now - fetched > cache.max_age:
                if may_ask:  # the error is outdated, too: this call waits for an answer
                    return self._ask(*args, **kw)
                raise failure[1]
            if now - fetched >= cache.ttl and may_ask:
                self._refresh(*args, **kw)
            return value

    def _ask(self, *args: object, **kw: object) -> T:
        try:
            value = self._func(*args, **kw)
        except Exception as error:
            self._failure = self._cache.clock(), error
            raise
        self._value, self._failure = (self._cache.clock(), value), None
        return value

    def _refresh(self, *args: object, **kw: object) -> None:
        try:
            future = self._cache.executor.submit(self._ask, *args, **kw)
        except RuntimeError:
            return  # the provider is stopping: the last value has to do
        self._refreshing = True
        future.add_done_callback(functools.partial(self._refreshed, self._failure is None))

    def _refreshed(self, first: bool, future: Future[T]) -> None:
        with self._lock:
            self._refreshing = False
        if not future.cancelled() and (error := future.exception()) is not None:
            name = getattr(self._func, "__qualname__", repr(self._func))
            if first:
                LOG.warning(
                    "Refreshing %s failed, keeping the last answer: %s", name, error, exc_info=error
                )
            else:
                LOG.warning("Refreshing %s failed again: %s", name, error)


class LazyExecutorTTLCache:
    """Decorator that caches one value for all arguments, renewed after ``ttl`` s.

    Renewals run on ``executor``. Only the first call waits (and raises what the function raises). A
    failing renewal is logged and tried again after ``ttl``; callers keep getting the last value
    until it is older than ``max_age`` s. Then a call ``ttl`` or more after the error waits for a
    new answer, as the first call did; the others get the error.
    """

    def __init__(
        self,
        ttl: float,
        executor: Executor,
        *,
        max_age: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ttl = ttl
        self.executor = executor
        self.max_age = max(10 * ttl, 60.0) if max_age is None else max_age
        self.clock = clock

    def __call__(self, func: Callable[..., T]) -> Callable[..., T]:
        call = _CachedCall(self, func)

        @functools.wraps(func)
        def wrapper(*args: object, **kw: object) -> T:
            return call(*args, **kw)

        return wrapper

"""A cached answer that is refreshed in the background (DRV-6.6)."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LOG = logging.getLogger("nodepool.driver.LazyExecutorTTLCache")


class _CachedCall(Generic[T]):
    """The state of one wrapped function."""

    def __init__(self, cache: LazyExecutorTTLCache, func: Callable[..., T]) -> None:
        self._cache = cache
        self._func = func
        # reentrant: the done-callback of a refresh that has ended already runs immediately, under the lock
        self._lock = threading.RLock()
        self._have_value = False
        self._value: Any = None
        self._fetched = 0.0
        self._refreshing = False
        self._error: BaseException | None = None
        self._retry_at = 0.0

    def __call__(self, *args: object, **kw: object) -> T:
        cache = self._cache
        with self._lock:
            now = cache.clock()
            age = now - self._fetched
            error = self._error if age > cache.max_age else None
            may_ask = not self._refreshing and now >= self._retry_at
            if not self._have_value or (error is not None and may_ask):
                # There is no usable answer, or the error is outdated, too: this call waits for an answer.
                return self._fetch(args, kw)
            if error is not None:
                raise error
            value: T = self._value
            if age >= cache.ttl and may_ask:
                self._start_refresh(args, kw)
            return value

    def _fetch(self, args: tuple[Any, ...], kw: dict[str, Any]) -> T:
        try:
            value = self._func(*args, **kw)
        except Exception as error:
            self._failed(error)
            raise
        self._store(value)
        return value

    def _failed(self, error: BaseException) -> None:
        self._error = error
        self._retry_at = self._cache.clock() + self._cache.ttl

    def _store(self, value: T) -> None:
        self._value, self._have_value = value, True
        self._fetched = self._cache.clock()
        self._error = None

    def _start_refresh(self, args: tuple[Any, ...], kw: dict[str, Any]) -> None:
        try:
            future = self._cache.executor.submit(self._func, *args, **kw)
        except RuntimeError:
            return  # the provider is stopping: the last value has to do
        self._refreshing = True
        future.add_done_callback(self._refreshed)

    def _refreshed(self, future: Future[T]) -> None:
        with self._lock:
            self._refreshing = False
            if future.cancelled():
                return
            error, first = future.exception(), self._error is None
            if error is None:
                self._store(future.result())
                return
            self._failed(error)
            name = getattr(self._func, "__qualname__", repr(self._func))
            if first:
                LOG.warning("Refreshing %s failed, keeping the last answer: %s", name, error, exc_info=error)
            else:
                LOG.warning("Refreshing %s failed again: %s", name, error)


class LazyExecutorTTLCache:
    """Decorator that caches one value for all arguments, renewed after ``ttl`` s.

    Renewals run on ``executor``. Only the first call waits (and raises what the function raises). A failing renewal is logged
    and tried again after ``ttl``; callers keep getting the last value until it is older than ``max_age`` s. Then a call ``ttl``
    or more after the error waits for a new answer, as the first call did; the others get the error.
    """

    def __init__(
        self, ttl: float, executor: Executor, *, max_age: float | None = None, clock: Callable[[], float] = time.monotonic
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

"""Caches responses for a moment, so that many dashboards cost no more than one."""

from __future__ import annotations

import collections
import http
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from nodepool.web.http import HttpError

MAX_ENTRIES = 64
#: Seconds to wait for a body that another thread is generating.
MAKE_TIMEOUT = 2.0


T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    body: T
    made_at: float
    """UNIX time, whole seconds: the resolution of HTTP dates."""
    expires_at: float


class ResponseCache(Generic[T]):
    """A bounded mapping of recent bodies, or of their data.

    The oldest entries are dropped first, and expired ones when the next entry is added.
    """

    def __init__(
        self,
        expiry: float,
        max_entries: int = MAX_ENTRIES,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache: collections.OrderedDict[Hashable, Entry[T]] = collections.OrderedDict()
        self._expiry = expiry
        self._max_entries = max_entries
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._making: dict[Hashable, Future[Entry[T]]] = {}

    def _expired(self) -> bool:
        """Return whether the oldest entry has expired."""
        oldest = next(iter(self.cache.values()), None)
        return oldest is not None and oldest.expires_at <= self._monotonic()

    def renew(self) -> None:
        """Invalidate entries that exist or are being generated."""
        with self._lock:
            self.cache.clear()
            self._making = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> Entry[T]:
        """Return the cached entry, or a new one.

        Concurrent equal requests are computed once, without blocking others.

        :raises HttpError: another thread has been generating it for longer than
            :data:`MAKE_TIMEOUT` (503).
        """
        with self._lock:
            entry = self.cache.get(key)
            if entry is not None and self._monotonic() < entry.expires_at:
                return entry
            making = self._making
            theirs = making.get(key)
            if theirs is None:
                ours = making[key] = Future()
        if theirs is not None:
            if not wait([theirs], MAKE_TIMEOUT).done:
                text = "Being generated for another client, try again"
                raise HttpError(http.HTTPStatus.SERVICE_UNAVAILABLE, text)
            return theirs.result()
        try:
            entry = Entry(make(), float(int(self._clock())), self._monotonic() + self._expiry)
        except BaseException as error:
            with self._lock:
                del making[key]
            ours.set_exception(error)
            raise
        with self._lock:
            del making[key]
            if making is self._making:
                self.cache[key] = entry
                self.cache.move_to_end(key)
            # Expired entries are useless, and may be large.
            while len(self.cache) > self._max_entries or self._expired():
                self.cache.popitem(last=False)
        ours.set_result(entry)
        return entry

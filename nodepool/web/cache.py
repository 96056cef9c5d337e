"""Keeps responses for a moment, so that many dashboards cost no more than one."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

MAX_ENTRIES = 64


@dataclass(frozen=True)
class Entry:
    body: bytes
    made_at: float
    """UNIX time, whole seconds: the resolution of HTTP dates."""
    expires_at: float


class ResponseCache:
    """A bounded mapping of recent bodies; the oldest go first."""

    def __init__(
        self,
        expiry: float,
        max_entries: int = MAX_ENTRIES,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache: collections.OrderedDict[Hashable, Entry] = collections.OrderedDict()
        self._expiry = expiry
        self._max_entries = max_entries
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], bytes]) -> Entry:
        """The kept entry, or a new one; equal requests at one time are computed once."""
        with self._lock:
            entry = self.cache.get(key)
            if entry is not None and self._monotonic() < entry.expires_at:
                return entry
            body = make()
            entry = Entry(body, float(int(self._clock())), self._monotonic() + self._expiry)
            self.cache[key] = entry
            self.cache.move_to_end(key)
            while len(self.cache) > self._max_entries:
                self.cache.popitem(last=False)
            return entry

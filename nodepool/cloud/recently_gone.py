"""Remember recently deleted machines, for callers that have an older listing."""

from __future__ import annotations

import threading
import time


class RecentlyGone:
    """Ids of machines whose absence was confirmed.

    Listings may show them a little longer, while their records no longer exist.
    """

    SECONDS = 60.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._when: dict[str, float] = {}

    def add(self, machine_id: str) -> None:
        with self._lock:
            self._when.pop(machine_id, None)
            self._when[machine_id] = time.monotonic()
            self._expire()

    def recent(self) -> set[str]:
        with self._lock:
            self._expire()
            return set(self._when)

    def _expire(self) -> None:
        """Remove expired ids, oldest first. Called with the lock held."""
        limit = time.monotonic() - self.SECONDS
        while self._when and next(iter(self._when.values())) < limit:
            del self._when[next(iter(self._when))]

"""What was there a moment ago, for those who have a list of that time."""

from __future__ import annotations

import threading
import time


class RecentlyGone:
    """Ids of machines whose absence was confirmed: listings show them a little longer, and their records are no more."""

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
        """With the lock held; the oldest come first."""
        limit = time.monotonic() - self.SECONDS
        while self._when and next(iter(self._when.values())) < limit:
            del self._when[next(iter(self._when))]

"""What the upload workers of one process are at."""

from __future__ import annotations

import threading
import time


class UploadClaims:
    """Which (image, provider) a worker of this process is at, and with which build."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[tuple[str, str], str] = {}
        self._seconds: dict[str, int] = {}

    def take(self, pair: tuple[str, str], build_id: str) -> bool:
        """False: another worker has it."""
        with self._lock:
            if pair in self._claims:
                return False
            self._claims[pair] = build_id
            return True

    def release(self, pair: tuple[str, str]) -> None:
        with self._lock:
            self._claims.pop(pair, None)

    def running(self) -> set[tuple[str, str, str]]:
        """(image, build, provider) of each."""
        with self._lock:
            return {(image, build, provider) for (image, provider), build in self._claims.items()}

    def second(self, image: str) -> int:
        """UNIX time for an external name, never the same twice: providers may share what names must be unique in (a bucket)."""
        with self._lock:
            found = self._seconds[image] = max(int(time.time()), self._seconds.get(image, 0) + 1)
            return found

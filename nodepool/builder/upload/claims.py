"""Which uploads the workers of one process are making."""

from __future__ import annotations

import threading
import time


class UploadClaims:
    """The (image, provider) pairs and builds that workers of this process are uploading."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[tuple[str, str], str] = {}
        self._seconds: dict[str, int] = {}

    def take(self, pair: tuple[str, str], build_id: str) -> bool:
        """Claim a pair; return False if another worker has it."""
        with self._lock:
            if pair in self._claims:
                return False
            self._claims[pair] = build_id
            return True

    def release(self, pair: tuple[str, str]) -> None:
        with self._lock:
            self._claims.pop(pair, None)

    def running(self) -> set[tuple[str, str, str]]:
        """Return (image, build, provider) of each upload."""
        with self._lock:
            return {(image, build, provider) for (image, provider), build in self._claims.items()}

    def second(self, image: str) -> int:
        """Return a UNIX time for an external name, never the same twice.

        Providers may share a container (a bucket) in which names must be unique.
        """
        with self._lock:
            found = self._seconds[image] = max(int(time.time()), self._seconds.get(image, 0) + 1)
            return found

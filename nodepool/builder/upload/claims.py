"""Which uploads the workers of one process are working on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class UploadClaims:
    """The (image, provider) pairs that workers of this process are uploading."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: (image, provider) -> build.
        self._claims: dict[tuple[str, str], str] = {}
        self._seconds: dict[str, int] = {}

    @contextmanager
    def claim(self, pair: tuple[str, str], build_id: str) -> Iterator[bool]:
        """Yield True if no other worker of this process has the pair until the block ends."""
        with self._lock:
            ours = pair not in self._claims
            if ours:
                self._claims[pair] = build_id
        try:
            yield ours
        finally:
            if ours:
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

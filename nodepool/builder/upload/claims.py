"""Which images and uploads the workers of one process are working on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

K = TypeVar("K")


class Claims(Generic[K]):
    """Keys of which each belongs to one worker of this process at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[K, str] = {}

    @contextmanager
    def claim(self, key: K, build_id: str = "") -> Iterator[bool]:
        """Yield True if no other worker of this process has the key until the block ends."""
        with self._lock:
            ours = key not in self._claims
            if ours:
                self._claims[key] = build_id
        try:
            yield ours
        finally:
            if ours:
                with self._lock:
                    self._claims.pop(key, None)


class UploadClaims(Claims[tuple[str, str]]):
    """The (image, provider) pairs and builds that workers of this process are uploading."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds: dict[str, int] = {}

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

"""Notices changed configuration files within a second (CFG-11)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable

#: Seconds between two checks. Checking a few files costs microseconds, and works on every file system.
INTERVAL = 0.5
COALESCE = 0.05  # seconds; an editor writes a file in several steps


def modification_time(path: str) -> int | None:
    """Return the modification time in ns; None if there is no such file."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


class ConfigWatcher:
    """Calls *callback* in a separate thread when one of *paths* changes, appears or vanishes."""

    log = logging.getLogger("nodepool.config.watch")

    def __init__(self, paths: Iterable[str | None], callback: Callable[[], None], name: str = "CleanupWorker") -> None:
        self._own = [os.path.abspath(path) for path in paths if path]
        self.paths = self._own
        self.callback = callback
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopped = threading.Event()
        self._seen = self._signature()

    def start(self) -> None:
        self._thread.start()

    def watch_also(self, paths: Iterable[str]) -> None:
        """Also watch these paths, instead of those of the last call.

        They may have changed just before: *callback* is called.
        """
        self.paths = [*self._own, *(os.path.abspath(path) for path in paths)]

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; harmless if repeated or never started."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _signature(self) -> dict[str, tuple[int, int, int] | None]:
        result: dict[str, tuple[int, int, int] | None] = {}
        for path in self.paths:
            try:
                stat = os.stat(path)
                result[path] = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            except OSError:
                result[path] = None
        return result

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL):
            if self._signature() == self._seen:
                continue
            self._stopped.wait(COALESCE)
            self._seen = self._signature()
            try:
                self.callback()
            except Exception:
                self.log.exception("Cannot process a changed configuration:")

"""Notices changed configuration files (CFG-11)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable

from nodepool.base.file_events import FileEvents
from nodepool.base.files import FileIdentity, file_identity

COALESCE = 0.05  # seconds; an editor writes a file in several steps


class ConfigWatcher:
    """Calls *callback* in a separate thread when one of *paths* changes, appears or vanishes."""

    log = logging.getLogger("nodepool.config.watch")

    def __init__(
        self, paths: Iterable[str | None], callback: Callable[[], None], name: str = "CleanupWorker"
    ) -> None:
        self._own = [os.path.abspath(path) for path in paths if path]
        self.paths = self._own
        self.callback = callback
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopped = threading.Event()
        self._events = FileEvents()
        self._seen = self._signature()

    def start(self) -> None:
        self._events.watch(self._directories())
        self._thread.start()

    def watch_also(self, paths: Iterable[str]) -> None:
        """Also watch these paths, instead of those of the last call.

        They may have changed just before: *callback* is called.
        """
        wanted = [*self._own, *(os.path.abspath(path) for path in paths)]
        if wanted != self.paths:
            self.paths = wanted
            self._events.wake()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; harmless if repeated or never started."""
        self._stopped.set()
        self._events.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if not self._thread.is_alive():
            self._events.close()

    def _signature(self) -> dict[str, FileIdentity | None]:
        return {path: file_identity(path) for path in self.paths}

    def _directories(self) -> set[str]:
        """Return the directories: editors replace files, and links are replaced."""
        return {
            os.path.dirname(path) for each in self.paths for path in (each, os.path.realpath(each))
        }

    def _run(self) -> None:
        while True:
            self._events.wait()
            if self._stopped.is_set():
                break
            if self._signature() == self._seen:
                continue
            self._stopped.wait(COALESCE)
            self._events.watch(self._directories())
            self._seen = self._signature()
            try:
                self.callback()
            except Exception:
                self.log.exception("Cannot process a changed configuration:")
        self._events.close()

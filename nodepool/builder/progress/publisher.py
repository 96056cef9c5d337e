"""Writes progress to ZooKeeper in a separate thread.

A slow or lost ZooKeeper thus never delays a build or an upload.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any

from nodepool.zk.mirror.progress import ProgressStore

#: Seconds between two writes of details, and between two attempts to write.
INTERVAL = 1.0
#: Seconds for writing the last records when stopping.
FLUSH_TIMEOUT = 3.0

Write = Callable[[ProgressStore], Any]


class Publisher(threading.Thread):
    """A thread that writes the latest state of each record and drops older unwritten states."""

    log = logging.getLogger("nodepool.builder.Publisher")

    def __init__(self, session_usable: threading.Event, kazoo: Callable[[], Any]) -> None:
        super().__init__(name="BuildWorker-publisher", daemon=True)
        self._session_usable = session_usable
        self._kazoo = kazoo
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, Write] = {}
        #: Records that end with the session.
        self._kept: dict[Hashable, Write] = {}
        self._filled = threading.Event()
        self._urgent = threading.Event()
        self._running = True

    def detail(self, key: Hashable, write: Write) -> None:
        """Write this record within a second; it replaces a waiting one with the same key."""
        with self._lock:
            self._waiting[key] = write
            self._filled.set()

    def write(self, key: Hashable, write: Write) -> None:
        """As :meth:`detail`, but immediately."""
        self.detail(key, write)
        self._urgent.set()

    def keep(self, key: Hashable, write: Write) -> None:
        """Write this record now and after each :meth:`renew`, until :meth:`forget`."""
        with self._lock:
            self._kept[key] = write
        self.write(key, write)

    def forget(self, key: Hashable) -> None:
        with self._lock:
            del self._kept[key]

    def renew(self) -> None:
        """Write the kept records again: the session in which they were written may have ended."""
        with self._lock:
            self._waiting = {**self._kept, **self._waiting}
            self._filled.set()

    def flush(self, timeout: float = FLUSH_TIMEOUT) -> bool:
        """Wait until everything is written; return False on time-out."""
        done = threading.Event()
        self.write(object(), lambda _store: done.set())
        return done.wait(timeout)

    def stop(self) -> None:
        """Write the remaining records within a short time, and end."""
        if self.is_alive():
            if self._session_usable.is_set():
                self.flush()
            self._running = False
            self._filled.set()
            self._urgent.set()
            self.join(FLUSH_TIMEOUT)

    def run(self) -> None:
        while self._running:
            self._filled.wait()
            self._urgent.clear()
            with self._lock:
                work, self._waiting = self._waiting, {}
                self._filled.clear()
            for key, write in work.items():
                self._write(key, write)
            self._urgent.wait(INTERVAL)

    def _write(self, key: Hashable, write: Write) -> None:
        """Write a record; keep it for the next attempt if ZooKeeper cannot be written now."""
        try:
            if not self._session_usable.is_set():
                raise ConnectionError("the ZooKeeper session is not usable")
            write(ProgressStore(self._kazoo()))
        except Exception as error:
            self.log.debug("Cannot write the progress of %s now: %r", key, error)
            with self._lock:
                self._waiting.setdefault(key, write)
                self._filled.set()

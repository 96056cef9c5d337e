"""Writes progress to ZooKeeper in a separate thread.

A slow or lost ZooKeeper thus never delays a build or an upload.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from nodepool.zk.mirror.progress import ProgressStore

#: Seconds between two writes of a record whose details change continuously.
DETAIL_INTERVAL = 1.0
#: Seconds for writing the last records when stopping.
FLUSH_TIMEOUT = 3.0

Write = Callable[[ProgressStore], Any]
#: Called each second while registered; returns what to write, or None.
Sampler = Callable[[], Write | None]


class Publisher(threading.Thread):
    """A thread that writes the latest state of each record and drops older unwritten states."""

    log = logging.getLogger("nodepool.builder.Publisher")

    def __init__(self, session_usable: threading.Event, kazoo: Callable[[], Any]) -> None:
        super().__init__(name="BuildWorker-publisher", daemon=True)
        self._session_usable = session_usable
        self._kazoo = kazoo
        self._condition = threading.Condition()
        self._urgent: dict[Any, Write] = {}
        self._details: dict[Any, Write] = {}
        self._samplers: dict[Any, Sampler] = {}
        self._running = True
        self._next_details = 0.0
        self._busy = False

    def write(self, key: Hashable, write: Write) -> None:
        """Write this record immediately; it replaces a waiting one with the same key."""
        with self._condition:
            self._details.pop(key, None)
            self._urgent[key] = write
            self._condition.notify_all()

    def detail(self, key: Hashable, write: Write) -> None:
        """Write this record within a second."""
        with self._condition:
            if key in self._urgent:
                self._urgent[key] = write
                return
            first = not self._details
            self._details[key] = write
            if first:
                self._condition.notify_all()

    def sample(self, key: Hashable, sampler: Sampler | None) -> None:
        """Call the sampler each second from now on; None: stop calling it."""
        with self._condition:
            if sampler is None:
                self._samplers.pop(key, None)
            else:
                self._samplers[key] = sampler
                self._condition.notify_all()

    def flush(self, timeout: float = FLUSH_TIMEOUT) -> bool:
        """Wait until everything is written; return False on time-out."""
        with self._condition:
            self._next_details = 0.0
            self._condition.notify_all()
            return self._condition.wait_for(
                lambda: not (self._urgent or self._details or self._busy) or not self.is_alive(), timeout
            )

    def stop(self) -> None:
        """Write the remaining records within a short time, and end."""
        with self._condition:
            self._samplers.clear()
        if self.is_alive():
            if self._session_usable.is_set():
                self.flush()
            with self._condition:
                self._running = False
                self._condition.notify_all()
            self.join(FLUSH_TIMEOUT)

    def run(self) -> None:
        while True:
            with self._condition:
                while self._running and not self._urgent and not self._details_due():
                    self._condition.wait(self._until_details())
                if not self._running:
                    return
                samplers = dict(self._samplers) if self._details_due() else {}
                if not self._urgent:
                    self._next_details = time.monotonic() + DETAIL_INTERVAL
                work, self._urgent = self._urgent, {}
                if not work:
                    work, self._details = self._details, {}
                self._busy = True
            try:
                self._sample(samplers, work)
                if not self._write_all(work):
                    self._session_usable.wait(DETAIL_INTERVAL)
            finally:
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()

    def _details_due(self) -> bool:
        return bool(self._details or self._samplers) and time.monotonic() >= self._next_details

    def _until_details(self) -> float | None:
        if not self._details and not self._samplers:
            return None
        return max(0.0, self._next_details - time.monotonic())

    def _sample(self, samplers: dict[Any, Sampler], work: dict[Any, Write]) -> None:
        for key, sampler in samplers.items():
            try:
                write = sampler()
            except Exception:  # a failing sampler must not block other records
                self.log.exception("Cannot read the progress of %s:", key)
                continue
            with self._condition:
                if write is not None and key in self._samplers:
                    work.setdefault(key, write)

    def _write_all(self, work: dict[Any, Write]) -> bool:
        """Write the waiting records; return False if ZooKeeper cannot be written now."""
        done = True
        for key, write in work.items():
            try:
                if not self._session_usable.is_set():
                    raise ConnectionError("the ZooKeeper session is not usable")
                write(ProgressStore(self._kazoo()))
            except Exception as error:
                self.log.debug("Cannot write the progress of %s now: %r", key, error)
                with self._condition:
                    if key not in self._urgent:
                        self._details.setdefault(key, write)
                done = False
        return done

"""``--startup``: start every enabled sliver once, also stopped ones (NM A, introduction)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from nodepool.nodemanager.api.methods import NodeError
from nodepool.nodemanager.records import records
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.slivers.slivers import RUNNING, Slivers

log = logging.getLogger("nodepool.nodemanager.startup")


class Startup:
    """Delays slivers until the first complete update of their source, which may drop them.

    A running sliver is not touched: its start script ran when it started.
    """

    def __init__(self, database: Database, slivers: Slivers) -> None:
        self._database = database
        self._slivers = slivers
        self._lock = threading.Lock()
        #: Sources that have not delivered yet.
        self._waiting: set[str] = set()

    def begin(self, sources: Iterable[str]) -> None:
        """Start the slivers that need not wait; call this once, before the sources start."""
        with self._lock:
            self._waiting = set(sources)
            waiting = frozenset(self._waiting)
        self._start_all(lambda source: source not in waiting)

    def synced(self, source: str) -> None:
        """Start the slivers of a source that has delivered a complete update."""
        with self._lock:
            if source not in self._waiting:
                return
            self._waiting.discard(source)
        self._start_all(lambda other: other == source)

    def _start_all(self, chosen: Callable[[str], bool]) -> None:
        effective = self._slivers.effective()
        for record in self._database.records():
            if record.content.get("account_type") != records.SLIVER or not chosen(record.source):
                continue
            name = record.content["name"]
            if effective.get(name, {}).get("nm_enabled") and not self._database.local(
                record.key
            ).get(RUNNING, True):
                log.info("Starting stopped sliver %s (--startup)", name)
                try:
                    self._slivers.start(name)
                except NodeError as error:  # it went, or was disabled, this moment
                    log.info("Not starting sliver %s: %s", name, error)

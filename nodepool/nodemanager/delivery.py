"""From the sources to the slivers: merge updates, and apply what they change (NM-C.6)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nodepool.nodemanager.host import Host
from nodepool.nodemanager.records import merge, records
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.slivers.slivers import Slivers, key_of
from nodepool.nodemanager.slivers.startup import Startup
from nodepool.nodemanager.sources.sources import Source


class Delivery:
    """The sources, and the way of their records.

    :param startup: start every enabled sliver once; None: leave stopped ones stopped.
    """

    def __init__(
        self, database: Database, slivers: Slivers, host: Host, startup: Startup | None
    ) -> None:
        self._database = database
        self._slivers = slivers
        self._host = host
        self._startup = startup
        self._sources: Sequence[Source] = ()
        #: Held from the state before a change until the change is followed.
        self.lock = threading.RLock()
        #: Set when the next expiry may have changed.
        self.wake = threading.Event()

    def start(self, sources: Sequence[Source]) -> None:
        """Start the sources; the database must be open for their creation."""
        self._sources = sources
        if self._startup is not None:
            self._startup.begin(source.name for source in self._sources)
        for source in self._sources:
            source.start()

    def stop(self) -> None:
        for source in self._sources:
            source.stop()

    def deliver(
        self, source: str, serial: float | None, given: Iterable[Any], complete: bool
    ) -> merge.Changes:
        """Merge an update of a source and reconcile the slivers it changes."""
        with self.lock:
            before = self._slivers.effective()
            changes = merge.deliver(self._database, source, serial, given, complete)
            self.follow(changes, before)
        if changes.complete and self._startup is not None:
            self._startup.synced(source)
        return changes

    def until_expiry(self, limit: float) -> float:
        """Return the seconds until the next record expires, at most `limit`."""
        due = self._database.next_expiry()
        return limit if due is None else max(0.0, min(limit, due - time.time() + 0.01))

    def expire(self) -> None:
        """Delete the records that have expired."""
        with self.lock:
            due = self._database.next_expiry()
            if due is None or due >= time.time():
                return
            before = self._slivers.effective()
            self.follow(merge.expire(self._database, time.time()), before)

    def follow(self, changes: merge.Changes, before: Mapping[str, Mapping[str, int]]) -> None:
        """Apply what has changed in the database; call it with the lock.

        :param before: name -> RSpec with loans, before the change.
        """
        after = self._slivers.effective()
        names = {
            key.partition("_")[2]
            for key in changes.changed | changes.deleted
            if key.startswith("sliver_")
        }
        names |= {
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        }
        for name in sorted(names):
            self._slivers.check_soon(name, replaced=key_of(name) in changes.changed)
        if changes.complete:
            self._slivers.check_all()
        if {key for key in changes.changed | changes.deleted if key.startswith("delegate_")}:
            self.update_delegates()
        if "bwcap" in changes.changed and (record := self._database.get("bwcap")) is not None:
            self._host.cap(record.content["cap"], record.content["exempt_ips"])
        self.wake.set()
        self.announce()

    def announce(self) -> None:
        """Notify the sources that publish this host's capacity."""
        for source in self._sources:
            source.changed()

    def update_delegates(self) -> None:
        """Update the accounts or keys of delegates to match the records."""
        self._host.delegates_changed(
            {
                r.content["name"]: r.content
                for r in self._database.records()
                if r.content.get("account_type") == records.DELEGATE
            }
        )

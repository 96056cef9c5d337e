"""Follow what the pool reports: drains, which decide where runners may wait, and kills."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from nodepool.adapters.runners.fleet import Fleet
from nodepool.adapters.runners.runner import RETRY
from nodepool.client import NodepoolError, Pool

#: Type of the event of a process that was killed for memory.
KILLED = "node-killed"
log = logging.getLogger("nodepool.adapters.runners")


class Follower:
    """Notifies fleets of drains, and of processes that were killed for memory.

    One connection to the launcher is for all of them. A launcher only sends the kills of providers
    in its configuration: runners that have ended ask for those of their leases.
    """

    def __init__(self, fleets: Sequence[Fleet], pool: Pool, stopping: threading.Event) -> None:
        self._fleets, self._pool, self._stopping = fleets, pool, stopping
        self._thread = threading.Thread(target=self._follow, name="drains", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _follow(self) -> None:
        trouble = ""
        while not self._stopping.is_set():
            try:
                for event in self._pool.events("drain-changed", "component-changed", KILLED):
                    trouble = ""
                    if event is not None and event.get("type") == KILLED:
                        for fleet in self._fleets:
                            fleet.killed(event)
                    else:
                        self._read()
                text = "the launcher has ended the connection"
            except Exception as error:
                text = f"{'' if isinstance(error, NodepoolError) else type(error).__name__} {error}"
            if text != trouble and not self._stopping.is_set():
                log.warning("Drains of the pool are not followed: %s", text.strip())
            trouble = text
            self._stopping.wait(RETRY)

    def _read(self) -> None:
        found = self._pool.call("GET", "/drains")
        leases = self._pool.leases(owner="me") if found["drains"] else []
        drained = {lease.id: lease.drained or "" for lease in leases}
        for fleet in self._fleets:
            fleet.drain(found["labels"].get(fleet.kind.label, ""), drained)

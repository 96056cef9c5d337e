"""SafetyNet: when events were lost it finds out, and tells that it has."""

from __future__ import annotations

import logging
from typing import Any

from nodepool import metrics
from nodepool.base import hostnames
from nodepool.metrics import Metrics

#: Seconds between two looks.
RESYNC = 30.0
#: Seconds after which what looks lost has to look so still.
CONFIRM = 1.0


class SafetyNet:
    """The clock of the net, and the count of what it found.  All under the lock of the assignment.

    Whatever it finds is a defect: a request that was in no list, or one that was taken although nothing had
    happened since it was last found to have to wait.  The counter is ``nodepool.launcher.HOST.found_by_resync``.
    """

    log = logging.getLogger("nodepool.SafetyNet")

    def __init__(self, statsd: Metrics, now: float) -> None:
        self._statsd = statsd
        statsd.incr(self._name(), 0)  # there from the beginning
        self.due = now + RESYNC
        #: Requests handed out because of the net, with the moment of its look, and why they had waited.
        self.offered: dict[str, tuple[int, str]] = {}
        self._adrift: set[Any] = set()

    def delay(self, now: float) -> None:
        self.due = now + RESYNC

    def confirmed(self, adrift: set[Any], now: float) -> set[Any]:
        """Of the requests in no list those that were in none a moment ago; they are counted."""
        found = adrift & self._adrift
        self._adrift = adrift - found
        if self._adrift:
            self.due = now + min(CONFIRM, RESYNC)
        for request_id in sorted(found):
            self._count(request_id, "it was in no list")
        return found

    def taken(self, request_id: str, nothing_happened: bool) -> None:
        """A request that was handed out because of the net has been taken."""
        offered = self.offered.pop(request_id, None)
        if offered is not None and nothing_happened:
            self._count(request_id, f"it could go on, but no event had told so ({offered[1]})")

    def _count(self, request_id: str, why: str) -> None:
        self.log.warning(
            "Request %s was missed by the watchers and found by the periodic resync: %s; please report a bug", request_id, why
        )
        self._statsd.incr(self._name())

    @staticmethod
    def _name() -> str:
        return metrics.FOUND_BY_RESYNC(hostnames.short())

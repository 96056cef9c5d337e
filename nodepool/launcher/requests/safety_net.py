"""SafetyNet: finds requests that no event announced, and counts them."""

from __future__ import annotations

import logging
from typing import Any

from nodepool import metrics
from nodepool.base import hostnames
from nodepool.metrics import Metrics
from nodepool.reasons import Reason, render

#: Seconds between two checks.
RESYNC = 30.0
#: Seconds for which a request must look lost.
CONFIRM = 1.0


class SafetyNet:
    """The schedule and the counter of the safety net, guarded by the assignment's lock.

    Each finding is a defect: a request that was in no list, or one that was served although no event happened since it
    was last found to have to wait. The counter is ``nodepool.launcher.HOST.found_by_resync``.
    """

    log = logging.getLogger("nodepool.SafetyNet")

    def __init__(self, statsd: Metrics, now: float) -> None:
        self._statsd = statsd
        self._metric = metrics.FOUND_BY_RESYNC(hostnames.short())
        statsd.incr(self._metric, 0)  # exported from the start
        self.due = now + RESYNC
        #: Requests handed out by the safety net, with the event count of its check, and why they had waited.
        self.offered: dict[str, tuple[int, tuple[Reason, ...]]] = {}
        self._adrift: set[Any] = set()

    def confirmed(self, adrift: set[Any], now: float) -> set[Any]:
        """Return and count the requests in no list that were already in none at the last check."""
        found = adrift & self._adrift
        self._adrift = adrift - found
        if self._adrift:
            self.due = now + min(CONFIRM, RESYNC)
        for request_id in sorted(found):
            self._count(request_id, "it was in no list")
        return found

    def taken(self, request_id: str, nothing_happened: bool) -> None:
        """Count a request that was handed out because of the safety net and was served."""
        offered = self.offered.pop(request_id, None)
        if offered is not None and nothing_happened:
            self._count(request_id, f"it could proceed, but no event announced that ({render(offered[1])})")

    def _count(self, request_id: str, why: str) -> None:
        self.log.warning(
            "Request %s was missed by the watchers and found by the periodic resync: %s; please report a bug", request_id, why
        )
        self._statsd.incr(self._metric)

"""Regular tasks of the node manager (NM-A.2, NM-C.7)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from nodepool.nodemanager.delivery import Delivery

log = logging.getLogger("nodepool.nodemanager")

#: Maximum seconds between two checks of the expiry timer.
EXPIRY_CHECK = 60.0


class RegularTasks:
    """Deletes expired records in time, and runs tasks each minute, in one thread.

    :param tasks: by their names for the log.
    """

    def __init__(self, delivery: Delivery, tasks: Mapping[str, Callable[[], object]]) -> None:
        self._delivery = delivery
        self._tasks = tasks
        self._running = True
        self._thread = threading.Thread(target=self._run, name="Thread-nm-expiry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._running = False
        self._delivery.wake.set()
        if self._thread.ident is not None:
            self._thread.join(5)

    def _run(self) -> None:
        checked = time.monotonic()
        while self._running:
            wait = max(0.0, checked + EXPIRY_CHECK - time.monotonic())
            try:
                wait = self._delivery.until_expiry(wait)
            except Exception:
                log.exception("Error about expired records:")
            self._delivery.wake.wait(wait)
            self._delivery.wake.clear()
            if not self._running:
                return
            try:
                if time.monotonic() >= checked + EXPIRY_CHECK:
                    checked = time.monotonic()
                    self.each_minute()
                self._delivery.expire()
            except Exception:
                log.exception("Error about expired records:")

    def each_minute(self) -> None:
        """Run the tasks; one that fails does not stop the others."""
        for name, task in self._tasks.items():
            try:
                task()
            except Exception:
                log.exception("Periodic task failed, retrying in a minute: %s:", name)

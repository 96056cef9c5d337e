"""Base class of the builder's threads (BLD-3)."""

from __future__ import annotations

import logging
import threading

from nodepool.builder.state import BuilderState
from nodepool.config.model import Config
from nodepool.zk.connection.protocol import BROKEN
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds between two messages while the ZooKeeper session is suspended or lost.
SUSPEND_WAIT_TIME = 30.0
#: Seconds to wait after a failed pass.
ERROR_WAIT_TIME = 10.0


class Worker(threading.Thread):
    """Runs a pass when something happened (:meth:`wake`), at the latest after the interval.

    :param interval: seconds between two passes without an event.
    """

    def __init__(self, name: str, state: BuilderState, interval: float) -> None:
        super().__init__(name=name, daemon=True)
        self.log = logging.getLogger(f"nodepool.builder.{name}")
        self._state = state
        self._interval = interval
        self._event = threading.Event()
        self._running = True

    @property
    def _config(self) -> Config:
        return self._state.config

    @property
    def _zk(self) -> ZooKeeper:
        return self._state.zk

    @property
    def running(self) -> bool:
        return self._running

    def wake(self) -> None:
        """Run a pass soon; thread-safe, returns immediately."""
        self._event.set()

    def shutdown(self) -> None:
        """Run no further pass; the current one is finished."""
        self._running = False
        self._event.set()

    def make_pass(self) -> float | None:
        """Do the pending work; return the seconds until more is known to be due, or None."""
        raise NotImplementedError

    def run(self) -> None:
        self.log.debug("Starting")
        while self._running:
            if not self._state.session_usable.wait(0):
                self.log.info("The ZooKeeper session is not usable; waiting until it is")
                self._state.session_usable.wait(SUSPEND_WAIT_TIME)
                continue
            self._event.clear()
            try:
                due = self.make_pass()
            except BROKEN as error:
                self.log.warning(
                    "The connection to ZooKeeper broke (%r); repeating the pass", error
                )
                due = 1.0
            except Exception:  # the thread lives as long as the builder; the pass is repeated
                self.log.exception("Error in %s:", self.name)
                due = ERROR_WAIT_TIME if self._running else 0
                self._event.clear()
            if self._running:
                self._event.wait(
                    self._interval if due is None else max(0.0, min(due, self._interval))
                )
        self.log.debug("Stopped")

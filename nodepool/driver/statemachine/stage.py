"""Interface of a node's launch to provider and request handler."""

from __future__ import annotations

import abc
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from nodepool.base.backoff import KeyedBackoff
from nodepool.driver.provider import Provider
from nodepool.driver.quota.support import QuotaSupport
from nodepool.driver.request.base import RequestHandler
from nodepool.driver.statemachine.loop import MachineLoop
from nodepool.driver.statemachine.model import Adapter
from nodepool.nodescan import NodescanWorker


class LaunchProvider(Provider, QuotaSupport):
    """What handlers and launches need of a state machine provider."""

    #: Upper bounds of the pauses between two checks of a machine, in seconds.
    MINIMUM_SLEEP: float = 1
    MAXIMUM_SLEEP: float = 1

    adapter: Adapter
    #: Labels that the cloud has refused for quota although its figures are sufficient for them.
    refusals: KeyedBackoff
    create_loop: MachineLoop
    delete_loop: MachineLoop
    launchers: list[Any]
    nodescan_worker: NodescanWorker

    #: Starts that need less than this many seconds need no separate thread.
    QUICK_START = 0.001
    _slow_starts = 3
    #: The threads for starts.
    state_machine_start_worker: Executor | None = None

    @property
    def starts_quickly(self) -> bool:
        """Return whether the adapter has recently created its machines without waiting."""
        return self._slow_starts == 0

    def note_start(self, seconds: float) -> None:
        """Use the start threads after one slow start, until three quick ones."""
        self._slow_starts = max(0, self._slow_starts - 1) if seconds < self.QUICK_START else 3

    def start_executor(self, function: Callable[[], Any]) -> Future[Any]:
        """Run something that may block on one of the start threads."""
        if self.state_machine_start_worker is None:
            raise RuntimeError(f"provider {self.provider.name} is not started")
        return self.state_machine_start_worker.submit(function)


class Serving(RequestHandler, abc.ABC):
    """The handler of the request that the node is launched for."""

    manager: LaunchProvider

"""Interface of a node's launch to provider and request handler."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from nodepool.base.backoff import Backoff, KeyedBackoff
from nodepool.config.model import ProviderConfig
from nodepool.driver.provider import Provider
from nodepool.driver.quota.support import QuotaSupport
from nodepool.driver.request.base import RequestHandler
from nodepool.driver.statemachine.loop import MachineLoop
from nodepool.driver.statemachine.model import Adapter
from nodepool.driver.statemachine.upload_trials import UploadTrials
from nodepool.nodescan import NodescanWorker

#: For a label whose nodes the cloud refuses for quota although the reported figures are sufficient.
#: The first pause is less than the interval at which pools check such a node.
REFUSED = Backoff(0.5, 15.0)


class LaunchProvider(Provider, QuotaSupport):
    """What handlers and launches need of a state machine provider."""

    #: Upper bounds of the pauses between two checks of a machine, in seconds.
    MINIMUM_SLEEP: float = 1
    MAXIMUM_SLEEP: float = 1

    #: Starts that need less than this many seconds need no separate thread.
    QUICK_START = 0.001
    _slow_starts = 3
    #: The threads for starts.
    state_machine_start_worker: Executor | None = None

    def __init__(self, adapter: Adapter, provider: ProviderConfig) -> None:
        super().__init__()
        self.adapter = adapter
        self.provider = provider
        self.log: logging.Logger = logging.getLogger(
            f"nodepool.StateMachineProvider.{provider.name}"
        )
        #: Labels that the cloud has refused for quota although its figures are sufficient for them.
        self.refusals = KeyedBackoff(REFUSED)
        self.upload_trials = UploadTrials(self.clock.time)
        self.nodescan_worker = NodescanWorker()
        self.create_loop = MachineLoop(provider.name, self.log)
        self.delete_loop = MachineLoop(provider.name, self.log)

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

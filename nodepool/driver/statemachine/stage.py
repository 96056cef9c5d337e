"""Interface of a node's launch to provider and request handler."""

from __future__ import annotations

import abc
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nodepool.base.backoff import KeyedBackoff
from nodepool.base.problems import LabelProblems
from nodepool.driver.provider import Provider
from nodepool.driver.quota.support import QuotaSupport
from nodepool.driver.request.base import RequestHandler
from nodepool.driver.statemachine.loop import MachineLoop
from nodepool.driver.statemachine.model import Adapter
from nodepool.nodescan import NodescanWorker


class LaunchProvider(Provider, QuotaSupport, abc.ABC):
    """Interface of a state machine provider for handlers and launches."""

    #: Upper bounds of the pauses between two checks of a machine, in seconds.
    MINIMUM_SLEEP: float = 1
    MAXIMUM_SLEEP: float = 1

    adapter: Adapter
    label_problems: LabelProblems
    #: Labels that the cloud has refused for quota although its figures are sufficient for them.
    refusals: KeyedBackoff
    create_loop: MachineLoop
    delete_loop: MachineLoop
    launchers: list[Any]
    nodescan_worker: NodescanWorker

    @property
    @abc.abstractmethod
    def starts_quickly(self) -> bool:
        """Return whether the adapter has recently created its machines without waiting."""

    @abc.abstractmethod
    def note_start(self, seconds: float) -> None:
        """Record how long the adapter took to create a create machine."""

    @abc.abstractmethod
    def start_executor(self, function: Callable[[], Any]) -> Future[Any]:
        """Run something that may block on one of the start threads."""


class Serving(RequestHandler, abc.ABC):
    """The handler of the request that the node is launched for."""

    manager: LaunchProvider

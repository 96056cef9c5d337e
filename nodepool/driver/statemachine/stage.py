"""Stages of a node's launch, and its interface to provider and request handler."""

from __future__ import annotations

import abc
import enum
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


class Stage(enum.Enum):
    """Stage of a node's launch."""

    #: To be started by the create loop itself, as starts are quick.
    QUEUED = "queued"
    #: To be started on a start thread: a further attempt.
    AGAIN = "again"
    #: A start thread creates the create machine.
    STARTING = "starting"
    #: The create machine is advanced.
    CREATING = "creating"
    #: The machine is up, its host keys are being read.
    SCANNING = "scanning"
    #: A failed scan is reported to the adapter, on a start thread.
    REPORTING = "reporting"
    #: The remains of a failed attempt are deleted before the next attempt.
    CLEANING = "cleaning"
    #: The record is not ours any more, and does not contain what is being deleted here.
    ORPHANED = "orphaned"
    ENDED = "ended"

"""Where the launch of a node can stand, and what it needs of the handler of its request."""

from __future__ import annotations

import enum
from typing import Any, Protocol

from nodepool.zk import zookeeper as zk


class Serving(Protocol):
    """The handler of the request that the node is launched for."""

    pw: Any
    zk: Any
    manager: Any
    request: zk.NodeRequest

    @property
    def pool(self) -> Any: ...

    def launchesComplete(self) -> bool: ...


class Stage(enum.Enum):
    """Where the launch of a node stands."""

    #: To be begun by the create loop itself, as starts are quick.
    QUEUED = "queued"
    #: To be begun on a start thread: a further attempt.
    AGAIN = "again"
    #: A start thread makes the create machine.
    STARTING = "starting"
    #: The create machine is advanced.
    CREATING = "creating"
    #: The machine is up, its host keys are being read.
    SCANNING = "scanning"
    #: The adapter is told of a failed scan, on a start thread.
    REPORTING = "reporting"
    #: What a failed attempt has left is deleted; then comes the next one.
    CLEANING = "cleaning"
    #: The record is not ours any more, and does not know what is being deleted here.
    ORPHANED = "orphaned"
    ENDED = "ended"

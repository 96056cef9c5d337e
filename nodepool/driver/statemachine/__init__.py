"""State machine framework for cloud drivers, which supply an Adapter.

Names and behaviour: DRV-7.
"""

from __future__ import annotations

import importlib
from typing import Any

from nodepool.driver.statemachine.driver import StateMachineDriver
from nodepool.driver.statemachine.model import Adapter, Instance, Resource, StateMachine

# The provider imports the launch code, the scanner and ZooKeeper; configuration checks do not need
# them.
_LATE = {
    "StateMachineProvider": "nodepool.driver.statemachine.provider",
    "StateMachineHandler": "nodepool.driver.statemachine.handler",
    "StateMachineNodeLauncher": "nodepool.driver.statemachine.launcher",
    "StateMachineNodeDeleter": "nodepool.driver.statemachine.deleter",
    "NodescanWorker": "nodepool.nodescan",
    "NodescanRequest": "nodepool.nodescan",
    "NodescanEvent": "nodepool.nodescan",
}

__all__ = [
    "Adapter",
    "Instance",
    "NodescanEvent",
    "NodescanRequest",
    "NodescanWorker",
    "Resource",
    "StateMachine",
    "StateMachineDriver",
    "StateMachineHandler",
    "StateMachineNodeDeleter",
    "StateMachineNodeLauncher",
    "StateMachineProvider",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)

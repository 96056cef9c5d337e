"""Cache data read from ZooKeeper while lists, causes and explanations are shown together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from nodepool.zk.mirror.nodes import NodeCounts, count_nodes
from nodepool.zk.zookeeper import ZooKeeper

T = TypeVar("T")
Facade: TypeAlias = "ZooKeeper | Once"
#: What is read at most once.
_LISTS = frozenset(
    {
        "readNodes",
        "readUnreleasedNodes",
        "readRequests",
        "readReports",
        "readImages",
        "readProgress",
        "getLaunchers",
        "getBuilders",
        "getRegisteredPools",
    }
)


def remembered(zk: Facade, name: str, make: Callable[[], T]) -> T:
    """Return what ``make`` returns; with a :class:`Once` its first result."""
    return zk.remember(name, make) if isinstance(zk, Once) else make()


class Once:
    """A facade that reads each list at most once."""

    def __init__(self, zk: Facade) -> None:
        self._zk = zk
        self._read: dict[str, Any] = {}

    def remember(self, name: str, make: Callable[[], T]) -> T:
        """Return the first result of ``make``."""
        if name not in self._read:
            self._read[name] = make()
        found: T = self._read[name]
        return found

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._zk, name)
        return partial(self.remember, name, found) if name in _LISTS else found

    def countNodes(self) -> NodeCounts:
        """Count nodes; without a mirror from the list that is read anyway."""
        tree = self._zk.node_tree
        return self.remember(
            "counts",
            lambda: self._zk.countNodes() if tree is not None else count_nodes(self.readNodes()),
        )

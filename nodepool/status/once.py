"""Cache data read from ZooKeeper while lists, causes and explanations are shown together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from nodepool.zk.components import RegisteredPool
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.mirror.nodes import NodeCounts, count_nodes
from nodepool.zk.mirror.progress import ProgressData
from nodepool.zk.records import Node, NodeRequest
from nodepool.zk.zookeeper import ZooKeeper

T = TypeVar("T")
Facade: TypeAlias = "ZooKeeper | Once"


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
        return getattr(self._zk, name)

    def readNodes(self) -> list[Node]:
        return self.remember("readNodes", self._zk.readNodes)

    def countNodes(self) -> NodeCounts:
        """Count nodes; without a mirror from the list that is read anyway."""
        tree = self._zk.node_tree
        return self.remember(
            "counts",
            lambda: self._zk.countNodes() if tree is not None else count_nodes(self.readNodes()),
        )

    def readRequests(self) -> list[NodeRequest]:
        return self.remember("readRequests", self._zk.readRequests)

    def readReports(self) -> list[dict[str, Any]]:
        return self.remember("readReports", self._zk.readReports)

    def readImages(self) -> ImageData:
        return self.remember("readImages", self._zk.readImages)

    def readProgress(self) -> ProgressData:
        return self.remember("readProgress", self._zk.readProgress)

    def getLaunchers(self) -> list[dict[str, Any]]:
        return self.remember("getLaunchers", self._zk.getLaunchers)

    def getBuilders(self) -> list[dict[str, Any]]:
        return self.remember("getBuilders", self._zk.getBuilders)

    def getRegisteredPools(self) -> list[RegisteredPool]:
        return self.remember("getRegisteredPools", self._zk.getRegisteredPools)

"""Requests for static nodes (STA-5)."""

from __future__ import annotations

import abc

from nodepool.driver.provider import Provider
from nodepool.driver.request.handler import NodeRequestHandler
from nodepool.zk.records import Node


class StaticManager(Provider, abc.ABC):
    """Interface of the provider for its handlers."""

    @abc.abstractmethod
    def checkNodeLiveness(self, node: Node) -> bool: ...


class StaticNodeRequestHandler(NodeRequestHandler):
    """Serves requests from registered nodes only: nothing is ever launched."""

    manager: StaticManager

    @property
    def alive_thread_count(self) -> int:
        return 1

    def imagesAvailable(self) -> bool:
        return True

    def hasRemainingQuota(self, ntype: str) -> bool:
        # A label without a free node has to wait until one is released.
        return False

    def launch(self, node: Node) -> None:
        raise NotImplementedError("static nodes cannot be launched")

    def launchesComplete(self) -> bool:
        return True

    def checkReusableNode(self, node: Node) -> bool:
        return bool(self.manager.checkNodeLiveness(node))

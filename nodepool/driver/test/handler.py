"""A request handler whose nodes are ready immediately."""

from __future__ import annotations

from nodepool.driver import NodeRequestHandler
from nodepool.zk import zookeeper as zk
from nodepool.zk.records import Node


class TestHandler(NodeRequestHandler):
    __test__ = False

    @property
    def alive_thread_count(self) -> int:
        return 1

    def imagesAvailable(self) -> bool:
        return True

    def launchesComplete(self) -> bool:
        return True

    def launch(self, node: Node) -> None:
        node.state = zk.READY
        node.external_id = f"test-{self.request.id}"
        self.zk.storeNode(node)

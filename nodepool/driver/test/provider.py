"""A provider of the classic plug-in interface, without state machines."""

from __future__ import annotations

from nodepool.config.model import ProviderConfig
from nodepool.driver import Provider
from nodepool.driver.request.base import RequestHost
from nodepool.driver.test.handler import TestHandler
from nodepool.driver.utils import NodeDeleter
from nodepool.zk.records import Node, NodeRequest
from nodepool.zk.zookeeper import ZooKeeper


class TestProvider(Provider):
    __test__ = False

    def __init__(self, provider: ProviderConfig, *args: object) -> None:
        super().__init__()
        self.provider = provider
        self._zk: ZooKeeper | None = None

    def start(self, zk_conn: ZooKeeper | None) -> None:
        self._zk = zk_conn

    def startNodeCleanup(self, node: Node) -> NodeDeleter:
        thread = NodeDeleter(self._zk, self, node)
        thread.start()
        return thread

    def cleanupNode(self, node_id: object) -> None:
        return

    def getRequestHandler(self, poolworker: RequestHost, request: NodeRequest) -> TestHandler:
        return TestHandler(poolworker, request)

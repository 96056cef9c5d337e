"""A provider of the classic plug-in interface, without state machines."""

from __future__ import annotations

from typing import Any

from nodepool.driver import Provider
from nodepool.driver.test.handler import TestHandler
from nodepool.driver.utils import NodeDeleter


class TestProvider(Provider):
    __test__ = False

    def __init__(self, provider: Any, *args: Any) -> None:
        super().__init__()
        self.provider = provider
        self._zk: Any = None

    def start(self, zk_conn: Any) -> None:
        self._zk = zk_conn

    def labelReady(self, name: Any) -> bool:
        return True

    def listNodes(self) -> list[Any]:
        return []

    def startNodeCleanup(self, node: Any) -> NodeDeleter:
        thread = NodeDeleter(self._zk, self, node)
        thread.start()
        return thread

    def cleanupNode(self, node_id: Any) -> None:
        return

    def getRequestHandler(self, poolworker: Any, request: Any) -> TestHandler:
        return TestHandler(poolworker, request)

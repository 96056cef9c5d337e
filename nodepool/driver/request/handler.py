"""NodeRequestHandler: the base of the request handlers of all drivers (DRV-5)."""

from __future__ import annotations

from nodepool.driver.request.base import RequestHandler, RequestHost
from nodepool.driver.request.life import Life
from nodepool.zk.zookeeper import NodeRequest


class NodeRequestHandler(RequestHandler):
    """Base of the request handlers of all drivers."""

    def __init__(self, pw: RequestHost, request: NodeRequest) -> None:
        super().__init__(pw, request)
        self.life = Life(self, self._satisfied_types)

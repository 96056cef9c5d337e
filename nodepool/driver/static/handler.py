"""Requests for static nodes (STA-5)."""

from __future__ import annotations

from typing import Any

from nodepool.driver.request.handler import NodeRequestHandler


class StaticNodeRequestHandler(NodeRequestHandler):
    """Serves from registered nodes only: nothing is ever launched."""

    @property
    def alive_thread_count(self) -> int:
        return 1

    def imagesAvailable(self) -> bool:
        return True

    def hasRemainingQuota(self, ntype: str) -> bool:
        # A label without a free node has to wait until one comes back.
        return False

    def launch(self, node: Any) -> None:
        raise NotImplementedError("static nodes cannot be launched")

    def launchesComplete(self) -> bool:
        return True

    def checkReusableNode(self, node: Any) -> bool:
        return bool(self.manager.checkNodeLiveness(node))

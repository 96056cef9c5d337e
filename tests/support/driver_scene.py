"""A launcher and somebody who uses its nodes, in one process, for tests of whole drivers."""

from __future__ import annotations

from typing import Any

from nodepool.launcher import NodePool
from nodepool.zk.zookeeper import (
    FULFILLED,
    IN_USE,
    READY,
    REQUESTED,
    USED,
    Node,
    NodeRequest,
    ZooKeeper,
)
from tests.conftest import Chroot, wait_for


class DriverBench:
    """Plays Zuul: submits requests, uses the nodes, gives them back."""

    def __init__(self, chroot: Chroot) -> None:
        self.chroot = chroot
        self.zk = ZooKeeper(chroot.connect())
        assert self.zk.wait_synced(20)
        self.pools: list[NodePool] = []

    def start(
        self, content: dict[str, Any], name: str = "nodepool.yaml", **settings: Any
    ) -> NodePool:
        pool = NodePool(None, self.chroot.config(content, name))
        for key, value in settings.items():
            setattr(pool, key, value)
        self.pools.append(pool)
        pool.start()
        return pool

    def stop(self) -> None:
        for pool in self.pools:
            pool.stop()
        self.pools.clear()

    def reconfigure(self, content: dict[str, Any]) -> None:
        self.chroot.config(content)

    # Nodes

    def nodes(
        self, label: str | None = None, state: str | None = READY, provider: str | None = None
    ) -> list[Node]:
        return [
            node
            for node in self.zk.nodeIterator()
            if (label is None or label in node.type)
            and (state is None or node.state == state)
            and (provider is None or node.provider == provider)
        ]

    def wait_nodes(self, label: str, count: int = 1, timeout: float = 20) -> list[Node]:
        """Exactly this many ready, unallocated nodes of the label."""

        def there() -> list[Node] | None:
            found = [node for node in self.nodes(label) if not node.allocated_to]
            return found if len(found) == count else None

        if count == 0:
            wait_for(lambda: there() is not None, timeout, f"no node of {label}")
            return []
        found: list[Node] = wait_for(there, timeout, f"{count} nodes of {label}")
        return found

    def wait_gone(self, node_id: str | None) -> None:
        wait_for(
            lambda: self.zk.getCachedNode(node_id or "") is None, what=f"deletion of {node_id}"
        )

    # Requests

    def submit(self, *labels: str, priority: str = "100", **attributes: Any) -> NodeRequest:
        request = NodeRequest()
        request.state = REQUESTED
        request.requestor = "driver-bench"
        request.node_types = list(labels)
        for key, value in attributes.items():
            setattr(request, key, value)
        self.zk.storeNodeRequest(request, priority)
        return request

    def state(self, request: NodeRequest) -> str | None:
        found = self.zk.getCachedRequest(request.id or "")
        return found.state if found is not None else None

    def wait_state(self, request: NodeRequest, state: str, timeout: float = 20) -> NodeRequest:
        wait_for(lambda: self.state(request) == state, timeout, f"request {request.id} {state}")
        found = self.zk.getNodeRequest(request.id or "")
        assert found is not None
        return found

    def accept(self, request: NodeRequest) -> list[Node]:
        """Wait for the nodes, lock them and mark them in use, as Zuul does."""
        found = self.wait_state(request, FULFILLED)
        nodes = []
        for node_id in found.nodes:
            node = self.zk.getNode(node_id)
            assert node is not None
            assert node.allocated_to == request.id
            self.zk.lockNode(node, blocking=False)
            node.state = IN_USE
            self.zk.storeNode(node)
            nodes.append(node)
        self.zk.deleteNodeRequest(found)
        return nodes

    def give_back(self, *nodes: Node) -> None:
        for node in nodes:
            node.state = USED
            self.zk.storeNode(node)
            self.zk.unlockNode(node)

    def get(self, *labels: str, **attributes: Any) -> list[Node]:
        return self.accept(self.submit(*labels, **attributes))

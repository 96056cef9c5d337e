"""The provider: passes its ZooKeeper connection to the adapter, and runs programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nodepool.driver.nodemanager.adapter import NodeManagerAdapter
from nodepool.driver.provider import Execution
from nodepool.driver.statemachine.provider import StateMachineProvider
from nodepool.zk.zookeeper import Node, ZooKeeper


class NodeManagerProvider(StateMachineProvider):
    adapter: NodeManagerAdapter

    def start(self, zk_conn: ZooKeeper | None) -> None:
        self.adapter.start(zk_conn)
        super().start(zk_conn)

    def execute(
        self,
        node: Node,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        user: str = "",
        timeout: float = 30.0,
    ) -> Execution | None:
        return self.adapter.execute(node.external_id, argv, env, user, timeout)

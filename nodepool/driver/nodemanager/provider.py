"""The provider: passes its ZooKeeper connection to the adapter, for announcements."""

from __future__ import annotations

from nodepool.driver.statemachine.provider import StateMachineProvider
from nodepool.zk.zookeeper import ZooKeeper


class NodeManagerProvider(StateMachineProvider):
    def start(self, zk_conn: ZooKeeper | None) -> None:
        self.adapter.start(zk_conn)  # type: ignore[attr-defined]
        super().start(zk_conn)

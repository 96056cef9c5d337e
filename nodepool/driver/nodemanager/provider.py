"""The provider: gives its adapter the connection to ZooKeeper, where hosts announce themselves."""

from __future__ import annotations

from typing import Any

from nodepool.driver.statemachine.provider import StateMachineProvider


class NodeManagerProvider(StateMachineProvider):
    def start(self, zk_conn: Any) -> None:
        self.adapter.start(zk_conn)  # type: ignore[attr-defined]
        super().start(zk_conn)

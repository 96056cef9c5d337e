"""Adapter for node managers that are pushed to backing nodes over SSH (NM-C.8)."""

from __future__ import annotations

import math
from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver.nodemanager.adapter import NodeManagerAdapter
from nodepool.driver.nodemanager.config import NodeManagerLabel
from nodepool.driver.nodemanager.pushed.machines import BackedCreateMachine, BackedDeleteMachine
from nodepool.driver.nodemanager.pushed.slots import BackingNodes
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest
from nodepool.zk.zookeeper import ZooKeeper


class BackedAdapter(NodeManagerAdapter):
    """Adapter whose hosts are created and deleted on demand."""

    def __init__(self, provider_config: ProviderConfig) -> None:
        super().__init__(provider_config)
        self.slots = BackingNodes(provider_config, lambda: self._zk, self.hosts, self.log)

    def start(self, zk_conn: ZooKeeper | None) -> None:
        self._zk = zk_conn
        self.slots.start()

    def stop(self) -> None:
        self.slots.stop()

    def getCreateStateMachine(
        self,
        hostname: str,
        label: DriverLabel,
        image_external_id: object,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: Log,
    ) -> BackedCreateMachine:
        return BackedCreateMachine(
            self.slots, hostname, label, str(label.cloud_image.root), metadata, request, log
        )

    def getDeleteStateMachine(self, external_id: object, log: Log) -> BackedDeleteMachine:
        return BackedDeleteMachine(self.slots, external_id, log)

    def periodic(self) -> None:
        self.slots.initialize()
        self.slots.follow_book()
        try:
            super().periodic()
        finally:
            self.slots.housekeeping.run()

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """Return missing slivers, also of backing nodes that ended while no launcher was
        running.
        """
        if not self.slots.performed_init:
            return []
        missing = super().findMissingInstances(external_ids)
        return missing + [
            external_id
            for external_id in external_ids
            if external_id not in missing
            and isinstance(external_id, dict)
            and not self.slots.may_have(str(external_id.get("host")))
        ]

    def getQuotaLimits(self) -> QuotaInformation:
        """Return the capacity of all backing nodes, once no more may be requested."""
        with self.slots.lock:
            full, count = self.slots.full, sum(1 for record in self.slots.book if not record.lost)
        if not full or len(self.hosts.capacities()) < count:
            return QuotaInformation(default=math.inf)
        return super().getQuotaLimits()

    def getAZs(self) -> list[str | None]:
        return [None]

    def labelReady(self, label: NodeManagerLabel) -> bool:
        return True

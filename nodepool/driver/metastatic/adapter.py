"""The driver's adapter: nodes are slots of backing nodes (MST-5 and MST-6)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver.backing.records import BackingNodeRecord
from nodepool.driver.backing.slots import BackingSlots
from nodepool.driver.metastatic.config import MetastaticLabel
from nodepool.driver.metastatic.machines import (
    MetastaticCreateStateMachine,
    MetastaticDeleteStateMachine,
    MetastaticInstance,
)
from nodepool.driver.statemachine import Adapter, Instance, Resource
from nodepool.driver.statemachine.provider import StateMachineProvider
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest
from nodepool.zk.zookeeper import DELETED, DELETING, ZooKeeper

__all__ = [
    "BackingNodeRecord",
    "MetastaticAdapter",
    "MetastaticCreateStateMachine",
    "MetastaticDeleteStateMachine",
    "MetastaticInstance",
]


#: Why a backing node is not used any more whose record does not say so.
SILENT = "does not answer and gets no more nodes"


class MetastaticAdapter(Adapter):
    """The cloud of its provider, and at the same time a user of other providers."""

    log = logging.getLogger("nodepool.driver.metastatic.MetastaticAdapter")

    def __init__(self, provider_config: ProviderConfig) -> None:
        super().__init__(provider_config)
        self.provider = provider_config
        self._provider: StateMachineProvider = None  # type: ignore[assignment]  # set by _setProvider
        self.slots = BackingSlots(provider_config, lambda: self.zk, self.log)
        # Names that external code reads.
        self.my_id = self.slots.my_id
        self.backing_node_records = self.slots.book.records
        self.pending_requests: list[Any] = []

    def _setProvider(self, provider: StateMachineProvider) -> None:
        self._provider = provider

    @property
    def zk(self) -> ZooKeeper:
        return self._provider._zk

    @property
    def performed_init(self) -> bool:
        return self.slots.performed_init

    # The framework's side

    def getCreateStateMachine(
        self,
        hostname: str,
        label: MetastaticLabel,
        image_external_id: object,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: Log,
    ) -> MetastaticCreateStateMachine:
        return MetastaticCreateStateMachine(self.slots, hostname, label, metadata, request, log)

    def getDeleteStateMachine(self, external_id: str, log: Log) -> MetastaticDeleteStateMachine:
        return MetastaticDeleteStateMachine(self.slots, external_id, log)

    def listInstances(self) -> Iterable[Instance]:
        return []

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """Return the slots whose backing node no longer exists."""
        gone = set()
        for node_id in set(external_ids):
            node = self.zk.getNode(node_id)
            if node is None or node.state in (DELETED, DELETING):
                gone.add(node_id)
        return [external_id for external_id in external_ids if external_id in gone]

    def periodic(self) -> None:
        self.slots.initialize()
        self.slots.housekeeping.run()

    def listResources(self) -> Iterable[Resource]:
        """Return nothing: slots cannot leak."""
        return []

    def deleteResource(self, resource: Resource) -> None:
        self.log.warning("Metastatic has no resources to delete: %s", resource)

    def notifyNodescanFailure(self, label: MetastaticLabel, external_id: str) -> None:
        self.slots.scan_failed(external_id)

    def describeHosts(self) -> list[dict[str, Any]]:
        """Return the backing nodes that did not answer when a slot was handed out, or failed
        their probes.
        """
        return [
            {
                "name": record.node_id,
                "usable": False,
                "problem": f"{record.node_id} (backing node) "
                + (f"gets no more nodes: {record.reason}" if record.reason else SILENT)
                + "; check its machine",
                "used": {"slots": sum(node_id is not None for node_id in record.allocated_nodes)},
                "limits": {"slots": record.slot_count},
            }
            for record in self.slots.book
            if record.failed and not record.lost and record.node_id is not None
        ]

    def stop(self) -> None:
        self.slots.stop()

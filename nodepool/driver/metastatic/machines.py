"""Instance, create machine and delete machine of a slot (MST-5)."""

from __future__ import annotations

import time

from nodepool.driver.backing.requests import Occupant
from nodepool.driver.backing.slots import BackingSlots
from nodepool.driver.metastatic.config import MetastaticLabel
from nodepool.driver.statemachine import Instance, StateMachine
from nodepool.driver.statemachine.steps import SteppedMachine, Steps, Wait
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.zk.records import Node, NodeRequest


class MetastaticInstance(Instance):
    """A slot of a backing node, with the addresses and settings of that node."""

    COPIED = (
        "interface_ip",
        "public_ipv4",
        "public_ipv6",
        "private_ipv4",
        "az",
        "region",
        "cloud",
        "username",
        "python_path",
        "shell_type",
        "connection_port",
        "connection_type",
    )

    def __init__(
        self,
        backing_node: Node,
        slot: int | None,
        node: Node,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.metadata = metadata or {}
        self.slot = slot
        if backing_node is not None:
            self.ready = True
            for name in self.COPIED:
                setattr(self, name, getattr(backing_node, name))
            self.host_keys = list(backing_node.host_keys)
            self.node_attributes = backing_node.attributes
        node_id = node.id if node is not None else None
        self.external_id = node_id
        self.driver_data = {
            "metadata": self.metadata,
            "backing_node": backing_node.id if backing_node is not None else None,
            "slot": slot,
            "node": node_id,
        }

    def getQuotaInformation(self) -> QuotaInformation:
        return QuotaInformation(instances=1)


class MetastaticCreateStateMachine(SteppedMachine, Occupant):
    """Gets a slot; most of its life it waits to be woken."""

    REQUESTING = "requesting backing node"

    def __init__(
        self,
        slots: BackingSlots,
        hostname: str,
        label: MetastaticLabel,
        metadata: dict[str, str],
        request: NodeRequest,
        log: Log,
    ) -> None:
        super().__init__()
        self._slots = slots
        self.hostname = hostname
        self.label = label
        self.metadata = metadata
        self.request = request
        self.log = log
        self.node_id = metadata["nodepool_node_id"]

    def steps(self) -> Steps[MetastaticInstance]:
        self.state = self.REQUESTING
        self._slots.allocate(self)
        while (backing_node := self._slots.poll(self)) is None:
            # The slots wake us; this is for lost events.
            yield Wait(until=time.monotonic() + 1.0)
        # Not earlier: a waiting node that is abandoned leaves nothing that an id would identify,
        # and storing it would cost one write per slot.
        self.external_id = self.node_id
        node = self._slots.zk.getNode(self.node_id, cached=True) or Node(self.node_id)
        return MetastaticInstance(backing_node, self.slot, node, self.metadata)


class MetastaticDeleteStateMachine(StateMachine):
    """Frees a slot; makes no cloud calls."""

    COMPLETE = "complete"

    def __init__(self, slots: BackingSlots, external_id: str, log: Log) -> None:
        super().__init__()
        self._slots = slots
        self.node_id = external_id
        self.log = log

    def advance(self) -> None:
        if self.state == self.START:
            self._slots.free(self.node_id)
            self.state = self.COMPLETE
            self.complete = True

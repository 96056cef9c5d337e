"""State machines of slivers on backing nodes (NM-C.8, ``backing-label``)."""

from __future__ import annotations

import time
from typing import Any

from nodepool import exceptions
from nodepool.driver.backing.records import BackingNodeRecord
from nodepool.driver.backing.requests import Occupant
from nodepool.driver.nodemanager.config import NodeManagerLabel
from nodepool.driver.nodemanager.host import INTERNAL, ManagedHost
from nodepool.driver.nodemanager.machines import CreateMachine, DeleteMachine, NodeManagerInstance
from nodepool.driver.nodemanager.pushed.slots import BackingNodes
from nodepool.driver.statemachine.steps import Steps, Wait
from nodepool.logconfig import Log
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk.records import NodeRequest

#: How often one launch moves to another backing node before it counts as failed.
MAX_MOVES = 3
#: Seconds after which a machine polls, in case an event was lost.
LOOK_AGAIN = 1.0


class BackedCreateMachine(CreateMachine, Occupant):
    """Creates a sliver: gets a backing node, waits for its node manager, stores the record."""

    _patience = 0.0

    def __init__(
        self,
        slots: BackingNodes,
        name: str,
        label: NodeManagerLabel,
        image: str,
        metadata: dict[str, str],
        request: NodeRequest,
        log: Log,
    ) -> None:
        super().__init__(slots.hosts, name, label, image, metadata, None, log)
        self._slots = slots
        self.label = label
        self.request = request
        self.node_id = metadata["nodepool_node_id"]
        #: Backing nodes whose node manager refused the sliver for lack of capacity.
        self.refused: list[BackingNodeRecord] = []
        #: None: capacity on another one is required.
        self._backing_node: Any = None

    def _find_host(self) -> Steps[ManagedHost]:
        slots = self._slots
        if self._backing_node is not None:
            # Its node manager has just failed to answer.
            yield Wait(until=time.monotonic() + LOOK_AGAIN)
        while True:
            if self._backing_node is None:
                yield from self._get()
            record, node_id = self.record, self._backing_node.id
            assert record is not None
            host = self._hosts.get(node_id)
            if host is not None and host.usable and not record.lost:
                return host
            if record.lost or record.failed:
                self._move("it no longer exists" if record.lost else slots.problem(node_id))
                continue
            slots.connect(record)
            self._hosts.wake_on_change(self._wake)
            if host is not None:
                host.refresh()
            yield Wait(until=time.monotonic() + LOOK_AGAIN)

    def _get(self) -> Steps[None]:
        """Wait for capacity on a backing node."""
        slots = self._slots
        slots.allocate(self)
        while True:
            slots.move_to_room(self)
            self._backing_node = slots.poll(self)
            if self._backing_node is not None:
                return
            yield Wait(until=time.monotonic() + LOOK_AGAIN)

    def _move(self, reason: str) -> None:
        """Give up this backing node and use another one."""
        text = f"Backing node {self._backing_node.id} cannot be used: {reason}"
        self.moves += 1
        if self.moves > MAX_MOVES:
            raise exceptions.LaunchStatusException(text)
        self._log.warning("%s; sliver %s is moved to another", text, self._name)
        self._backing_node = None

    # -- steps that differ from those on other hosts

    def _reserve(self, host: ManagedHost) -> None:
        super()._reserve(host)
        self._slots.sent(self)

    def _refused(self, host: ManagedHost, fault: RpcFault) -> None:
        assert self.record is not None
        host.forget()
        host.refresh()
        self.external_id = None
        alone = len(self.record.allocations()) <= 1
        if alone or fault.code != INTERNAL or not fault.text.startswith("quota:"):
            raise exceptions.LaunchStatusException(
                f"backing node {host.name} rejects {self._name}: {fault.text}"
            ) from None
        self._log.info(
            "Backing node %s has no capacity for %s: %s", host.name, self._name, fault.text
        )
        self.refused.append(self.record)
        self._backing_node = None

    def _host_failed(self, host: ManagedHost, error: RpcError) -> None:
        """Keep waiting: slivers survive the loss of both the connection and the node manager.

        Sending the same record again does not create another sliver.
        """
        self._log.info("Sliver %s waits for its node manager: %s", self._name, error)

    def _instance(self, host: ManagedHost, sliver: dict[str, Any]) -> NodeManagerInstance:
        instance, backing = super()._instance(host, sliver), self._backing_node
        for name in ("cloud", "region", "az"):
            setattr(instance, name, getattr(backing, name))
        if not sliver.get("own_ssh"):
            for name in ("public_ipv4", "public_ipv6", "private_ipv4"):
                setattr(instance, name, getattr(backing, name))
        instance.node_attributes = backing.attributes
        instance.slot = self.slot
        instance.driver_data = {
            "metadata": self._metadata,
            "backing_node": backing.id,
            "slot": self.slot,
            "node": self.node_id,
            **instance.driver_data,
        }
        return instance


class BackedDeleteMachine(DeleteMachine):
    """Deletes a sliver and then frees its slot."""

    def __init__(self, slots: BackingNodes, external_id: object, log: Log) -> None:
        super().__init__(slots.delete, external_id, log)
        self._slots = slots

    def steps(self) -> Steps[None]:
        yield from super().steps()
        self._slots.free(str(self.external_id.get("sliver")).removeprefix("np"))

"""One sliver on a backing node, on its way to being ready, or gone (NM-C.8, ``backing-label``)."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, Protocol

from nodepool import exceptions
from nodepool.driver.backing.records import BackingNodeRecord
from nodepool.driver.nodemanager.config import NodeManagerLabel
from nodepool.driver.nodemanager.hosts import ManagedHost
from nodepool.driver.nodemanager.machines import INTERNAL, CreateMachine, DeleteMachine, Hosting, NodeManagerInstance, needed_by
from nodepool.driver.nodemanager.pushed.slots import BackingNodes
from nodepool.logconfig import Log
from nodepool.nodemanager.api.client import RpcError, RpcFault
from nodepool.zk.records import NodeRequest

#: How often one launch moves to another backing node before it counts as failed.
MAX_MOVES = 3
#: Seconds after which a machine looks by itself, should an event have been lost.
LOOK_AGAIN = 1.0


class BackedHosting(Hosting, Protocol):
    """So, on backing nodes."""

    slots: BackingNodes

    def connect(self, record: BackingNodeRecord) -> None: ...

    def problem(self, node_id: str) -> str: ...


class BackedCreateMachine(CreateMachine):
    """Get room on a backing node, wait for the node manager there, put the record, wait for the sliver."""

    GETTING, CONNECTING = "requesting backing node", "waiting for the node manager"
    _adapter: BackedHosting

    def __init__(
        self,
        adapter: BackedHosting,
        name: str,
        label: NodeManagerLabel,
        image: str,
        metadata: dict[str, str],
        request: NodeRequest,
        log: Log,
    ) -> None:
        super().__init__(adapter, name, label, image, metadata, None, log)
        self.label = label
        self.request = request
        self.node_id = metadata["nodepool_node_id"]
        # Kept by the bookkeeping, under its lock:
        self.record: BackingNodeRecord | None = None
        self.slot: int | None = None
        self.granted = False
        self.problem: Exception | None = None
        self.moves = 0
        #: Backing nodes whose node manager had no room after all.
        self.refused: list[BackingNodeRecord] = []
        self._backing_node: Any = None

    def advance(self) -> NodeManagerInstance | None:
        slots = self._adapter.slots
        if self.state == self.START:
            self._get()
        if self.state == self.GETTING:
            slots.move_to_room(self)
            self._backing_node = slots.poll(self)
            if self._backing_node is None:
                self.next_wake = time.monotonic() + LOOK_AGAIN
                return None
            self.state = self.CONNECTING
        if self.state == self.CONNECTING and not self._connected():
            return None
        return super().advance()

    def _get(self) -> None:
        self.state = self.GETTING
        self._backing_node = self._host = None
        self._adapter.slots.allocate(self)
        self.next_wake = None

    def _connected(self) -> bool:
        record = self.record
        assert record is not None
        host = self._adapter.hosts.get(self._backing_node.id)
        if host is not None and host.usable and not record.lost:
            self.next_wake = None
            return True
        if record.lost or record.failed:
            self._move("it is gone" if record.lost else self._adapter.problem(self._backing_node.id))
            return False
        self._adapter.connect(record)
        self._adapter.wait_for_hosts(self)
        if host is not None:
            host.look()
        self.next_wake = time.monotonic() + LOOK_AGAIN
        return False

    def _move(self, reason: str) -> None:
        """This backing node is no good: take another."""
        text = f"Backing node {self._backing_node.id} cannot be used: {reason}"
        self.moves += 1
        if self.moves > MAX_MOVES:
            raise exceptions.LaunchStatusException(text)
        self._log.warning("%s; sliver %s goes to another", text, self._name)
        self._get()

    # -- of the framework's other hosts these steps are different

    def _place(self) -> None:
        host = self._adapter.hosts.get(self._backing_node.id)
        if host is None:
            self.state = self.CONNECTING
            return
        self.state = self.PLACING
        self._host = host
        # Before the record goes out: whatever happens, deletion knows where to look.
        self.external_id = {"host": host.name, "sliver": self._name}
        host.reserve(lambda capacity: needed_by(self._label, capacity))
        self._adapter.slots.sent(self)
        record = self._adapter.record(self._name, self._label, self._image, self._metadata, host)
        self.waiting_future = host.ask("PutRecord", record)

    def _placed(self, future: Future[Any]) -> NodeManagerInstance | None:
        host = self._host
        assert host is not None and self.record is not None
        try:
            sliver: dict[str, Any] = future.result()
        except RpcFault as fault:
            host.forget()
            host.look()
            self.external_id = None
            alone = len(self.record.allocations()) <= 1
            if alone or fault.code != INTERNAL or not fault.text.startswith("quota:"):
                raise exceptions.LaunchStatusException(
                    f"backing node {host.name} does not take {self._name}: {fault.text}"
                ) from None
            self._log.info("Backing node %s has no room for %s: %s", host.name, self._name, fault.text)
            self.refused.append(self.record)
            self._get()
            return None
        except RpcError as error:
            self._leave(host, error)
            return None
        return self._look(sliver)

    def _waited(self, future: Future[Any]) -> NodeManagerInstance | None:
        host = self._host
        assert host is not None
        try:
            sliver: dict[str, Any] = future.result()
        except RpcError as error:
            self._leave(host, error)
            return None
        return self._look(sliver)

    def _leave(self, host: ManagedHost, error: RpcError) -> None:
        """Slivers survive both the connection and the node manager; the same record again is no other sliver."""
        self._log.info("Sliver %s waits for its node manager: %s", self._name, error)
        self.state = self.CONNECTING
        self.next_wake = time.monotonic() + LOOK_AGAIN

    def _look(self, sliver: dict[str, Any]) -> NodeManagerInstance | None:
        instance = super()._look(sliver)
        if instance is not None:
            backing = self._backing_node
            for name in ("cloud", "region", "az"):
                setattr(instance, name, getattr(backing, name))
            if not sliver.get("own_ssh"):
                for name in ("public_ipv4", "public_ipv6", "private_ipv4"):
                    setattr(instance, name, getattr(backing, name))
            instance.node_attributes = backing.attributes  # type: ignore[attr-defined]
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
    """The slot is free when the sliver is gone."""

    _adapter: BackedHosting

    def _end(self) -> None:
        name = str(self.external_id.get("sliver"))
        self._adapter.slots.free(name.removeprefix("np"))
        super()._end()

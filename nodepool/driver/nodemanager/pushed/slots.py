"""Assigns slivers to backing nodes by the actual capacity of their node managers.

Bookkeeping, records, locks and writes are those of the metastatic driver (MST-3). ``label`` in ``user_data`` is the backing
label, as all labels of the provider share a backing node, and ``slots`` is the number of slivers that its node manager admits;
a slot is reserved before the sliver is created, so that no launcher releases what another one is about to use.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from nodepool import exceptions
from nodepool.driver.backing import transactions
from nodepool.driver.backing.records import BackingNodeRecord, parse_user_data
from nodepool.driver.backing.requests import Action
from nodepool.driver.backing.slots import BackingSlots
from nodepool.driver.nodemanager.hosts import Free, Hosts, Needs
from nodepool.driver.nodemanager.machines import needed_by, too_large
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.zk import zookeeper as zk
from nodepool.zk.writer import TransactionFailed


class Owner(Protocol):
    """The adapter whose backing nodes these are."""

    hosts: Hosts

    def lost(self, record: BackingNodeRecord) -> None: ...

    def vacate(self, record: BackingNodeRecord) -> bool: ...


class BackingNodes(BackingSlots):
    """Requests, shares and releases the backing nodes of one provider."""

    def __init__(self, provider_config: Any, zk_conn: Callable[[], Any], owner: Owner) -> None:
        super().__init__(provider_config, zk_conn, logging.getLogger("nodepool.NodeManagerAdapter.backing"))
        self.owner = owner
        self.options = provider_config.backing
        #: By node: machines that have a slot and have not sent their record yet.
        self.unsent: dict[str, Any] = {}
        #: By backing label: the largest known capacity, which further backing nodes are expected to have.
        self._seen: dict[str, dict[str, Any]] = {}

    # -- capacity

    def new_record(self, label: DriverLabel) -> BackingNodeRecord:
        return BackingNodeRecord(label.backing_label, self.options.max_slivers)

    def place(self, machine: Any, actions: list[Action]) -> None:
        self.book.deallocate(machine.node_id)
        self.unsent.pop(machine.node_id, None)
        problem = self._impossible(machine.label)
        if problem is not None:
            machine.problem = exceptions.LaunchStatusException(problem)
        elif self.full and self.find_free(machine) is None:
            machine.problem = exceptions.QuotaException(
                f"all {self.options.max_nodes} backing nodes (max-backing-nodes) are full"
            )
        else:
            super().place(machine, actions)
            self.unsent[machine.node_id] = machine

    @property
    def full(self) -> bool:
        """Whether no further backing node may be requested."""
        limit = self.options.max_nodes
        return limit is not None and sum(1 for record in self.book if not record.lost) >= limit

    def _impossible(self, label: DriverLabel) -> str | None:
        """Return why no backing node that we know of could ever run this label."""
        seen = self._seen.get(label.backing_label)
        if seen is None:
            return None
        reason = too_large(label, "they have", seen)
        if reason is None:
            return None
        return f"label {label.name} is too large for backing nodes of label {label.backing_label}: {reason}"

    def move_to_room(self, machine: Any) -> None:
        """Move a machine that waits for a new backing node to capacity that became free elsewhere."""
        with self.changing() as actions:
            record = machine.record
            if record is None or record.node_id is not None or record.taking or machine.problem is not None:
                return
            found = self.find_free(machine)
            host = self.owner.hosts.get(found.node_id or "") if found is not None else None
            if host is None or not host.usable:
                return
            self.place(machine, actions)
            idle = record.isEmpty()
        if idle:
            self.housekeeping.became_idle(record)

    def slot_freed(self, record: BackingNodeRecord, actions: list[Action]) -> BackingNodeRecord | None:
        return None  # a slot does not imply enough capacity: see move_to_room

    def find_free(self, machine: Any) -> BackingNodeRecord | None:
        oldest = time.time() - self.options.max_age if self.options.max_age is not None else 0.0
        found = []
        for number, record in enumerate(self.book.records.get(machine.label.backing_label, ())):
            if not record.hasAvailableSlot() or record.lost or record.launched <= oldest or record in machine.refused:
                continue
            room = self._room(record, machine)
            if room is not None:
                host = self.owner.hosts.get(record.node_id or "")
                # Available, requested, not answering.
                order = 1 if host is None else 0 if host.usable else 2
                found.append((order, room if self.provider.placement == "pack" else -room, number, record))
        return min(found, key=lambda entry: entry[:-1])[-1] if found else None

    def _room(self, record: BackingNodeRecord, machine: Any) -> float | None:
        """Return the free CPU (per mille) there, if known; None: the sliver does not fit."""
        host = self.owner.hosts.get(record.node_id or "")
        capacity = host.capacity if host is not None else None
        if host is not None and capacity is not None:
            self._note(record.label_name, capacity)
            free = host.free()
        else:
            capacity = self._seen.get(record.label_name)
            if capacity is None:
                return math.inf  # the first one shows their size: until then all wait for it
            free = Free(Needs(capacity["cpu"], capacity["memory"], capacity["disk"]), capacity["slivers"])
        for other in list(self.unsent.values()):
            if other.record is record and other is not machine:
                free = free.without(needed_by(other.label, capacity))
        return free.amounts.cpu if free.fits(needed_by(machine.label, capacity)) else None

    def _note(self, label_name: str, capacity: dict[str, Any]) -> None:
        seen = self._seen.get(label_name)
        if seen is None or _size(capacity) > _size(seen):
            self._seen[label_name] = capacity

    def sent(self, machine: Any) -> None:
        """Count the sliver by the host's answers from now on."""
        with self.lock:
            self.unsent.pop(machine.node_id, None)

    def poll(self, machine: Any) -> zk.Node | None:
        try:
            return super().poll(machine)
        except Exception:
            self.sent(machine)
            raise

    def free(self, node_id: str) -> None:
        with self.lock:
            self.unsent.pop(node_id, None)
        super().free(node_id)

    # -- backing nodes that cannot be used any more

    def backing_node_lost(self, record: BackingNodeRecord, actions: list[Action]) -> None:
        if record.releasing and record.isEmpty():
            return  # by ourselves
        known = record.lost
        super().backing_node_lost(record, actions)
        if not known:
            actions.append(lambda: self.in_background(self.owner.lost, record))

    def give_up(self, record: BackingNodeRecord) -> None:
        """Abandon a backing node that does not answer: it is released when it is empty."""
        with self.changing() as actions:
            if record.failed:
                return
            record.failed = True
            if record.node_id is not None and not record.lost:
                self.store(record, actions)
        self.in_background(self.retire, record)

    def retire(self, record: BackingNodeRecord) -> None:
        """Delete ready nodes on a failed backing node; those in use are left to their users."""
        for node_id in list(record.allocations().values()):
            node = self.zk.getNode(node_id)
            if node is None or node.provider != self.provider.name or not _idle(node):
                continue
            try:
                self.zk.lockNode(node, blocking=False)
            except (exceptions.ZKLockException, exceptions.TimeoutException):
                continue
            try:
                if _idle(node):
                    self.log.warning("Deleting node %s: its backing node %s cannot be used any more", node_id, record.node_id)
                    node.state = zk.USED
                    self.zk.storeNode(node)
            finally:
                self.zk.unlockNode(node)

    # -- release

    def release(self, record: BackingNodeRecord) -> None:
        self.in_background(self._vacate_and_release, record)

    def _vacate_and_release(self, record: BackingNodeRecord) -> None:
        try:
            if self.owner.vacate(record):
                self.housekeeping.release(record)
        finally:
            record.releasing = False

    def close(self, record: BackingNodeRecord) -> bool:
        """Have no launcher put anything there any more; False when one just has.

        :raises KazooException: ZooKeeper cannot be reached.
        """
        node = self.zk.getNode(str(record.node_id))
        if node is None or node.state != zk.IN_USE:
            return True
        data = parse_user_data(node.user_data, self.my_id)
        if data is not None:
            present = {user for user in data.allocations.values() if self.zk.getNode(user, cached=True) is not None}
            with self.lock:
                self.book.merge(record, data.allocations, present.__contains__)
        with self.lock:
            if not record.isEmpty() or record.busy:
                return False
            before, record.failed = record.failed, True
            txn = transactions.store_slots(self.zk, node, record, self.my_id)
        try:
            self.zk.writer.run(txn)
        except TransactionFailed:
            record.failed = before
            return False
        return True


def _size(capacity: dict[str, Any]) -> tuple[float, float]:
    return capacity["cpu"] * capacity["cores"], capacity["memory"]


def _idle(node: zk.Node) -> bool:
    return node.state == zk.READY and not node.allocated_to

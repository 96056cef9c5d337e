"""Assigns nodes to slots of backing nodes (MST-5 and MST-6).

The mirror of ZooKeeper reports changes; callbacks only update the book under ``lock`` and send
writes, they never wait. Waiting work runs on a small executor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from nodepool import exceptions
from nodepool.driver.backing import transactions
from nodepool.driver.backing.housekeeping import Housekeeping
from nodepool.driver.backing.records import BackingNodeRecord, UserData, parse_user_data
from nodepool.driver.backing.requests import Action, BackingRequests, Occupant, wake
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.zk.writer import TransactionFailed
from nodepool.zk.zookeeper import IN_USE, Node, ZooKeeper

#: Maximum moves of one launch to another backing node before it fails.
MAX_MOVES = 3


class BackingSlots(BackingRequests):
    """The backing nodes of one provider and their nodes."""

    def __init__(
        self, provider_config: Any, zk: Callable[[], ZooKeeper], log: logging.Logger
    ) -> None:
        super().__init__(provider_config, zk, log)
        self.housekeeping = Housekeeping(self)
        self._init_lock = threading.Lock()
        self._listening: list[tuple[list[Any], Any]] = []

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            self.stop_event.set()
            requests = list(self.open)
        listening, self._listening = self._listening, []
        for listeners, listener in listening:
            listeners.remove(listener)
        self.housekeeping.stop()
        for request_id in requests:
            # Its node would not be used.
            self.forget(request_id, delete=True)
        self._executor.shutdown(wait=True, cancel_futures=True)

    def scan_failed(self, node_id: str) -> None:
        """Put nothing more on the backing node of this slot; its jobs may finish."""
        with self.changing() as actions:
            record = self.book.by_node.get(node_id)
            if record is not None:
                self.log.warning("%s failed a scan and gets no more nodes", record)
                record.failed = True
                if record.node_id is not None:
                    self.store(record, actions)

    # Slots

    def allocate(self, machine: Occupant) -> None:
        """Find a slot for this machine, or ask for a backing node. It is woken when there is
        news.
        """
        self.initialize()
        with self.changing() as actions:
            self.place(machine, actions)

    def place(self, machine: Occupant, actions: list[Action]) -> None:
        # A retried launch still has its slot of the last attempt.
        self.book.deallocate(machine.node_id)
        machine.granted = False
        record = self.find_free(machine)
        if record is None:
            record = self.new_record(machine.label)
            self.book.add(record)
            self.ask(record, machine, actions)
        self._put(machine, record, actions)

    def _put(self, machine: Occupant, record: BackingNodeRecord, actions: list[Action]) -> None:
        machine.record = record
        machine.slot = self.book.allocate(record, machine.node_id)
        self._waiting[machine.node_id] = machine
        if record.node_id is not None:
            self.store(record, actions)

    def find_free(self, machine: Occupant) -> BackingNodeRecord | None:
        """Return the record with a slot for this machine's node; call it under the lock."""
        label = machine.label
        oldest = time.time() - label.max_age if label.max_age is not None else None
        return self.book.find_free(
            label.name,
            oldest,
            lambda record: (
                self.drain_of(record) is None
                and len(record.allocations()) < label.max_parallel_jobs
            ),
        )

    def new_record(self, label: DriverLabel) -> BackingNodeRecord:
        return BackingNodeRecord(label.name, label.max_parallel_jobs)

    def release(self, record: BackingNodeRecord) -> None:
        """Release an empty backing node; ``record.releasing`` keeps new nodes off it meanwhile."""
        self.housekeeping.release(record)

    def poll(self, machine: Occupant) -> Node | None:
        """Return the backing node once the slot is ours; raises when that has failed."""
        backing_node = None
        with self.changing() as actions:
            record = machine.record
            if machine.problem is not None:
                self._waiting.pop(machine.node_id, None)
                raise machine.problem
            assert record is not None
            if machine.granted:
                backing_node = self.live(record.node_id)
                if backing_node is None:
                    self.backing_node_lost(record, actions)
            elif record.node_id is not None:
                # Usually in progress already; after a lost connection this sends it again.
                self.store(record, actions)
            elif (
                record.request_id is not None
                and not record.taking
                and not self.is_request(record, self.zk.getCachedRequest(record.request_id))
            ):
                self.fail_without_request(record, actions)
            if backing_node is not None:
                self._waiting.pop(machine.node_id, None)
        return backing_node

    def free(self, node_id: str) -> None:
        """Free the slot of a node without writing: deleted nodes have no slot."""
        with self.changing() as actions:
            self._waiting.pop(node_id, None)
            record = self.book.deallocate(node_id)
            if record is None:
                return
            left = self.slot_freed(record, actions)
            if record.isEmpty() and record.lost:
                self.book.drop(record)
            idle = [each for each in (record, left) if each is not None and each.isEmpty()]
        for each in idle:
            self.housekeeping.became_idle(each)

    def slot_freed(
        self, record: BackingNodeRecord, actions: list[Action]
    ) -> BackingNodeRecord | None:
        """Give the slot to the first node that waits for a backing node; return that one.

        The backing node that it waited for stays requested: the next node may use it, and
        housekeeping cancels it when none does.
        """
        if record.node_id is None or record.lost or not record.hasAvailableSlot():
            return None
        if self.drain_of(record) is not None:
            return None
        for machine in list(self._waiting.values()):
            awaited, label = machine.record, machine.label
            if (
                awaited is None
                or awaited.node_id is not None
                or awaited.taking
                or machine.problem is not None
            ):
                continue
            if (
                label.name != record.label_name
                or len(record.allocations()) >= label.max_parallel_jobs
                or (label.max_age is not None and record.launched <= time.time() - label.max_age)
            ):
                continue
            self.log.info("Node %s takes a free slot of %s", machine.node_id, record)
            self.book.deallocate(machine.node_id)
            self._put(machine, record, actions)
            return awaited
        return None

    def store(
        self, record: BackingNodeRecord, actions: list[Action], node: Node | None = None
    ) -> None:
        """Reserve the slots of waiting machines, all in one write."""
        if record.busy:
            record.dirty = True
            return
        node = node or self.live(record.node_id)
        if node is None:
            self.backing_node_lost(record, actions)
            return
        record.busy = True
        self._merge(record, parse_user_data(node.user_data, self.my_id), actions)
        machines = [machine for machine in self.machines(record) if not machine.granted]
        if record.failed:
            for machine in machines:
                self.place(machine, actions)
            machines = []
        record.dirty = False
        stored = record.allocations()
        txn = transactions.store_slots(self.zk, node, record, self.my_id)
        actions.append(
            lambda: self.submit(
                txn, lambda _results, error: self._stored(record, machines, stored, error)
            )
        )

    def _stored(
        self,
        record: BackingNodeRecord,
        machines: list[Occupant],
        stored: dict[int, str],
        error: BaseException | None,
    ) -> None:
        with self.changing() as actions:
            record.busy = False
            if error is None:
                record.stored = stored
                self.grant(record, machines, actions)
                if record.dirty:
                    self.store(record, actions)
            elif isinstance(error, TransactionFailed):
                # Another launcher was faster: read what it stored. The mirror may not have it yet.
                record.busy = True
                actions.append(lambda: self.in_background(self._store_again, record))
            else:
                self.log.warning("Cannot store the slots of %s: %r", record, error)

    def _store_again(self, record: BackingNodeRecord) -> None:
        try:
            node = self.zk.getNode(str(record.node_id))
        except Exception as error:
            self.log.warning("Cannot read %s: %r", record, error)
            with self.lock:
                record.busy = False  # waiting machines send it again
            return
        with self.changing() as actions:
            record.busy = False
            if not self.is_used(node):
                self.backing_node_lost(record, actions)
            else:
                self.store(record, actions, node)

    def _merge(
        self, record: BackingNodeRecord, data: UserData | None, actions: list[Action]
    ) -> None:
        """Adopt what another launcher stored; nodes that lost their slot get another one."""
        if data is None:
            return
        record.failed = record.failed or data.failed
        record.reason = record.reason or data.reason
        for node_id in self.book.merge(record, data.allocations):
            machine = self._waiting.get(node_id)
            if machine is not None:
                self.place(machine, actions)

    # -- loss of backing nodes

    def backing_node_lost(self, record: BackingNodeRecord, actions: list[Action]) -> None:
        """Move the nodes that wait for its slots. An idle one was released, by any launcher."""
        if not record.lost and not record.isEmpty():
            self.log.warning(
                "%s no longer exists or left state in-use; nodes that wait for its slots are moved",
                record,
            )
        record.lost = record.failed = True
        for machine in self.machines(record):
            machine.moves += 1
            if machine.moves > MAX_MOVES:
                machine.problem = exceptions.LaunchStatusException(
                    f"Backing node {record.node_id} was lost"
                )
                self.book.deallocate(machine.node_id)
            else:
                self.place(machine, actions)
            actions.append(lambda machine=machine: wake(machine))  # type: ignore[misc]
        if record.isEmpty():
            self.book.drop(record)

    # -- changes in ZooKeeper

    def initialize(self) -> None:
        """Find our previous backing nodes, once."""
        with self._init_lock:
            if self.performed_init or self.stopped:
                return
            if not self._listening:
                self._listening = [
                    (self.zk.node_tree.listeners, self._node_event),
                    (self.zk.request_tree.listeners, self.request_changed),
                    (self.zk.note_tree.listeners, self.housekeeping.check_all),
                ]
                for listeners, listener in self._listening:
                    listeners.append(listener)
            self.housekeeping.recover()
            self.housekeeping.start()
            self.performed_init = True

    def _node_event(self, node_id: str, old: Node | None, new: Node | None) -> None:
        """Handle a change of any node, on the connection thread."""
        try:
            if node_id in self.book.by_backing_node:
                self._backing_node_changed(node_id, new)
            elif new is None:
                if node_id in self.book.by_node:
                    self.free(node_id)
            elif new.user_data is not None and new.state == IN_USE and node_id not in self.taking:
                if parse_user_data(new.user_data, self.my_id) is not None:
                    # Another launcher has it, or had it.
                    self.housekeeping.queue.add(node_id)
            elif new.driver_data is not None and new.provider == self.provider.name:
                self.note_slot(new)
        except Exception:
            self.log.exception("Error checking node %s:", node_id)

    def _backing_node_changed(self, node_id: str, node: Node | None) -> None:
        with self.changing() as actions:
            record = self.book.by_backing_node.get(node_id)
            if record is None or record.lost:
                return
            if node is None or not self.is_used(node):
                self.backing_node_lost(record, actions)
            elif not record.busy:
                self._merge(record, parse_user_data(node.user_data, self.my_id), actions)
                if record.failed and record.isEmpty():
                    self.housekeeping.became_idle(record)

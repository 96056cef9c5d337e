"""Assigns nodes to slots of backing nodes (MST-5 and MST-6).

The mirror of ZooKeeper reports changes; callbacks only update the book under ``lock`` and send writes, they never
wait. Waiting work runs on a small executor.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from nodepool import exceptions
from nodepool.base import threads
from nodepool.base.workqueue import WorkQueue
from nodepool.driver.backing import transactions
from nodepool.driver.backing.records import BackingNodeRecord, SlotBook, UserData, decode_driver_data, parse_user_data
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import DELETED, DELETING, IN_USE, Node, NodeRequest, ZooKeeper

#: Maximum moves of one launch to another backing node before it fails.
MAX_MOVES = 3

Action = Callable[[], Any]


class Occupant(Protocol):
    """A launch that gets a slot; the attributes after the first four are set under the lock."""

    node_id: str
    label: DriverLabel
    request: NodeRequest
    wake: Callable[[], None] | None
    record: BackingNodeRecord | None
    slot: int | None
    #: The slot belongs to this launch and is stored.
    granted: bool
    problem: Exception | None
    moves: int


def wake(machine: Occupant) -> None:
    """Have the framework advance it soon."""
    if machine.wake is not None:
        machine.wake()


class Asking(Protocol):
    """The requests for backing nodes."""

    open: dict[str, BackingNodeRecord]
    taking: dict[str, BackingNodeRecord]
    doubtful: set[float]

    def ask(self, record: BackingNodeRecord, machine: Occupant, actions: list[Action]) -> None:
        """Request a backing node for the machine."""

    def request_changed(self, request_id: str, _old: NodeRequest | None, request: NodeRequest | None) -> None:
        """Handle a change of any request, on the connection thread."""

    def gone(self, record: BackingNodeRecord, actions: list[Action]) -> None:
        """Fail the launches whose request no longer exists."""

    def forget(self, request_id: str, delete: bool) -> None:
        """End our interest in a request, and the request itself."""


class Keeping(Protocol):
    """Periodic work on backing nodes."""

    #: Ids of nodes to adopt, and backing nodes that may be idle for long enough.
    queue: WorkQueue[str | BackingNodeRecord]

    def start(self) -> None:
        """Start to process the queue."""

    def stop(self) -> None:
        """End that, and wait for it."""

    def recover(self) -> None:
        """Build the book from ZooKeeper."""

    def run(self) -> None:
        """Check all backing nodes; release idle ones."""

    def became_idle(self, record: BackingNodeRecord) -> None:
        """Check the backing node after its grace time."""

    def release(self, record: BackingNodeRecord) -> None:
        """Release a backing node without nodes."""


class BackingSlots:
    """The backing nodes of one provider and their nodes, completed by ``housekeeping.wire``.

    :param zk: returns the ZooKeeper facade, once the provider has one.
    """

    requests: Asking
    housekeeping: Keeping

    def __init__(self, provider_config: Any, zk: Callable[[], ZooKeeper], log: logging.Logger) -> None:
        self.provider = provider_config
        self.log = log
        self._zk = zk
        self.my_id = f"NodePool:metastatic:{provider_config.name}"
        self.book = SlotBook()
        self.performed_init = False
        self.stopped = False
        # Guards book, waiting machines and the flags of records; held only briefly.
        self.lock = threading.RLock()
        self._init_lock = threading.Lock()
        self._waiting: dict[str, Occupant] = {}
        self._executor = threads.shared().lane(f"Thread-metastatic-{provider_config.name}", 4)
        self._listening: list[tuple[list[Any], Any]] = []
        self.stop_event = threading.Event()

    @property
    def zk(self) -> ZooKeeper:
        return self._zk()

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            self.stop_event.set()
            requests = list(self.requests.open)
        listening, self._listening = self._listening, []
        for listeners, listener in listening:
            listeners.remove(listener)
        self.housekeeping.stop()
        for request_id in requests:
            # Its node would not be used.
            self.requests.forget(request_id, delete=True)
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
        """Find a slot for this machine, or ask for a backing node. It is woken when there is news."""
        self.initialize()
        with self.changing() as actions:
            self.place(machine, actions)

    def place(self, machine: Occupant, actions: list[Action]) -> None:
        label = machine.label
        # A retried launch still has its slot of the last attempt.
        self.book.deallocate(machine.node_id)
        machine.granted = False
        record = self.find_free(machine)
        if record is None:
            record = self.new_record(label)
            self.book.add(record)
            self.requests.ask(record, machine, actions)
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
        return self.book.find_free(label.name, oldest)

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
                backing_node = self.live_node(record)
                if backing_node is None:
                    self.backing_node_lost(record, actions)
            elif record.node_id is not None:
                # Usually in progress already; after a lost connection this sends it again.
                self.store(record, actions)
            elif record.request_id is not None and not record.taking and self.zk.getCachedRequest(record.request_id) is None:
                self.requests.gone(record, actions)
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

    def slot_freed(self, record: BackingNodeRecord, actions: list[Action]) -> BackingNodeRecord | None:
        """Give the slot to the first node that waits for a backing node; return that one.

        The backing node that it waited for stays requested: the next node may use it, and housekeeping cancels it when none
        does.
        """
        if record.node_id is None or record.lost or not record.hasAvailableSlot():
            return None
        for machine in list(self._waiting.values()):
            awaited, label = machine.record, machine.label
            if awaited is None or awaited.node_id is not None or awaited.taking or machine.problem is not None:
                continue
            if label.name != record.label_name or (label.max_age is not None and record.launched <= time.time() - label.max_age):
                continue
            self.log.info("Node %s takes a free slot of %s", machine.node_id, record)
            self.book.deallocate(machine.node_id)
            self._put(machine, record, actions)
            return awaited
        return None

    def live_node(self, record: BackingNodeRecord) -> Node | None:
        """Return the backing node, None when it cannot be used any more."""
        return self.live(record.node_id) if record.node_id is not None else None

    def live(self, node_id: str) -> Node | None:
        """Return the node, None when the mirror does not show it in use."""
        node: Node | None = self.zk.getCachedNode(node_id)
        return node if node is not None and node.state == IN_USE else None

    def waits(self, node_id: str) -> bool:
        """Return whether a slot is being searched for this node here."""
        return node_id in self._waiting

    def machines(self, record: BackingNodeRecord) -> list[Occupant]:
        """Return the machines that wait for a slot of this record."""
        waiting = (self._waiting.get(node_id) for node_id in record.allocations().values())
        return [machine for machine in waiting if machine is not None and machine.record is record]

    def store(self, record: BackingNodeRecord, actions: list[Action], node: Node | None = None) -> None:
        """Reserve the slots of waiting machines, all in one write."""
        if record.busy:
            record.dirty = True
            return
        node = node or self.live_node(record)
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
        actions.append(lambda: self.submit(txn, lambda _results, error: self._stored(record, machines, stored, error)))

    def _stored(
        self, record: BackingNodeRecord, machines: list[Occupant], stored: dict[int, str], error: BaseException | None
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
            if node is None or node.state != IN_USE:
                self.backing_node_lost(record, actions)
            else:
                self.store(record, actions, node)

    def grant(self, record: BackingNodeRecord, machines: list[Occupant], actions: list[Action]) -> None:
        for machine in machines:
            if self._waiting.get(machine.node_id) is machine and machine.record is record:
                machine.granted = True
                actions.append(lambda machine=machine: wake(machine))  # type: ignore[misc]

    def _merge(self, record: BackingNodeRecord, data: UserData | None, actions: list[Action]) -> None:
        """Adopt what another launcher stored; nodes that lost their slot get another one."""
        if data is None:
            return
        record.failed = record.failed or data.failed
        for node_id in self.book.merge(record, data.allocations):
            machine = self._waiting.get(node_id)
            if machine is not None:
                self.place(machine, actions)

    # -- loss of backing nodes

    def backing_node_lost(self, record: BackingNodeRecord, actions: list[Action]) -> None:
        """Move the nodes that wait for its slots. An idle one was released, by any launcher."""
        if not record.lost and not record.isEmpty():
            self.log.warning("%s no longer exists or left state in-use; nodes that wait for its slots are moved", record)
        record.lost = record.failed = True
        for machine in self.machines(record):
            machine.moves += 1
            if machine.moves > MAX_MOVES:
                machine.problem = exceptions.LaunchStatusException(f"Backing node {record.node_id} was lost")
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
                    (self.zk.request_tree.listeners, self.requests.request_changed),
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
            elif new.user_data is not None and new.state == IN_USE and node_id not in self.requests.taking:
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
            if node is None or node.state != IN_USE:
                self.backing_node_lost(record, actions)
            elif not record.busy:
                self._merge(record, parse_user_data(node.user_data, self.my_id), actions)

    def note_slot(self, node: Node) -> None:
        """Store the slot that a requested node names; 11.0.0 stores it nowhere else."""
        place = decode_driver_data(node.driver_data)
        if place is None or node.id is None or node.id in self._waiting or node.state in (DELETING, DELETED):
            return
        with self.lock:
            record = self.book.by_backing_node.get(place[0])
            if record is None or self.book.by_node.get(node.id) is record:
                return
            slot = place[1]
            if not 0 <= slot < record.slot_count or record.allocated_nodes[slot] is not None:
                if not record.busy:  # our write is in progress: its result decides which node has the slot
                    self.log.warning("Node %s claims slot %s of %s, which is not free", node.id, slot, record)
                return
            self.book.deallocate(node.id)
            self.book.allocate(record, node.id, slot)

    def check_backing_node(self, record: BackingNodeRecord) -> None:
        """Check whether the backing node still exists, in case the event was missed."""
        with self.changing() as actions:
            if self.live_node(record) is None:
                self.backing_node_lost(record, actions)

    # -- work outside the lock

    @contextlib.contextmanager
    def changing(self) -> Iterator[list[Action]]:
        """Hold the lock; then do what is to be done without it."""
        actions: list[Action] = []
        with self.lock:
            yield actions
        for action in actions:
            try:
                action()
            except Exception:
                self.log.exception("Error about backing nodes of provider %s:", self.provider.name)

    def submit(self, txn: Txn, callback: Callable[[list[Any] | None, BaseException | None], Any]) -> None:
        try:
            self.zk.writer.submit(txn, callback)
        except Exception as error:
            callback(None, error)

    def in_background(self, function: Callable[..., None], *args: object) -> None:
        with self.lock:
            if self.stopped:
                return
            future = self._executor.submit(function, *args)
        future.add_done_callback(self._log_failure)

    def _log_failure(self, future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is not None:
            self.log.error("Error about backing nodes of provider %s:", self.provider.name, exc_info=future.exception())

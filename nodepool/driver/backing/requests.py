"""Requests for backing nodes, their adoption, and what slots and housekeeping share."""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from kazoo.exceptions import NoNodeError

from nodepool import exceptions
from nodepool.base import threads
from nodepool.base.backoff import Backoff
from nodepool.driver.backing import transactions
from nodepool.driver.backing.records import (
    METASTATIC,
    BackingNodeRecord,
    SlotBook,
    UserData,
    decode_driver_data,
    parse_user_data,
)
from nodepool.driver.statemachine.model import DriverLabel, StateMachine
from nodepool.zk import paths
from nodepool.zk.drains import Drain, covering, names_of
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import (
    DELETED,
    DELETING,
    FAILED,
    FULFILLED,
    IN_USE,
    READY,
    Node,
    NodeRequest,
    ZooKeeper,
)

#: Maximum seconds for locking a backing node that was assigned to us.
TAKE_OVER_TIMEOUT = 30.0
TAKE_OVER_BACKOFF = Backoff(0.02, 1.0)

Action = Callable[[], Any]


class Occupant(StateMachine):
    """A launch that gets a slot; the attributes after the first three are set under the lock."""

    node_id: str
    label: DriverLabel
    request: NodeRequest
    record: BackingNodeRecord | None = None
    slot: int | None = None
    #: The slot belongs to this launch and is stored.
    granted = False
    problem: Exception | None = None
    moves = 0


def wake(machine: Occupant) -> None:
    """Have the framework advance it soon."""
    if machine.wake is not None:
        machine.wake()


class BackingRequests(abc.ABC):
    """The backing nodes of one provider, requested or in use, and launches that wait.

    Callbacks of ZooKeeper never wait here.

    :param zk: returns the ZooKeeper facade, once the provider has one.
    """

    def __init__(
        self, provider_config: Any, zk: Callable[[], ZooKeeper], log: logging.Logger
    ) -> None:
        self.provider = provider_config
        self.log = log
        self._zk = zk
        self.my_id = f"{METASTATIC}{provider_config.name}"
        self.book = SlotBook()
        self.performed_init = False
        self.stopped = False
        # Guards book, waiting machines and the flags of records; held only briefly.
        self.lock = threading.RLock()
        self._waiting: dict[str, Occupant] = {}
        self._executor = threads.shared().lane(f"Thread-metastatic-{provider_config.name}", 4)
        self.stop_event = threading.Event()
        #: Pending requests by id.
        self.open: dict[str, BackingNodeRecord] = {}
        #: By id of a node that is being adopted.
        self.taking: dict[str, BackingNodeRecord] = {}
        #: ``created_time`` of unwanted requests that may or may not exist.
        self.doubtful: set[float] = set()

    @property
    def zk(self) -> ZooKeeper:
        return self._zk()

    # -- slots

    @abc.abstractmethod
    def store(
        self, record: BackingNodeRecord, actions: list[Action], node: Node | None = None
    ) -> None:
        """Reserve the slots of waiting machines, all in one write."""

    @abc.abstractmethod
    def free(self, node_id: str) -> None:
        """Free the slot of a node without writing: deleted nodes have no slot."""

    @abc.abstractmethod
    def release(self, record: BackingNodeRecord) -> None:
        """Release an empty backing node; ``record.releasing`` keeps new nodes off it meanwhile."""

    @abc.abstractmethod
    def backing_node_lost(self, record: BackingNodeRecord, actions: list[Action]) -> None:
        """Move the nodes that wait for its slots. An idle one was released, by any launcher."""

    def live(self, node_id: str | None) -> Node | None:
        """Return the node, None when the mirror does not show it in use by us."""
        node: Node | None = self.zk.getCachedNode(node_id or "")
        return node if self.is_used(node) else None

    def is_used(self, node: Node | None) -> bool:
        """Return whether we use it as a backing node: its id can be that of another node.

        ZooKeeper assigns ids again after it has lost data.
        """
        return (
            node is not None
            and node.state == IN_USE
            and parse_user_data(node.user_data, self.my_id) is not None
        )

    def is_request(self, record: BackingNodeRecord, request: NodeRequest | None) -> bool:
        """Return whether it is the request of this record: its id can be that of another one."""
        return (
            request is not None
            and request.requestor == self.my_id
            and request.created_time == record.requested
        )

    def drain_of(self, record: BackingNodeRecord) -> Drain | None:
        """Return why the backing node gets no more nodes, if an operator drains it."""
        drains = self.zk.note_tree.of(Drain)
        node = self.live(record.node_id) if drains else None
        return None if node is None else covering(drains, names_of(node))

    def waits(self, node_id: str) -> bool:
        """Return whether a slot is being searched for this node here."""
        return node_id in self._waiting

    def machines(self, record: BackingNodeRecord) -> list[Occupant]:
        """Return the machines that wait for a slot of this record."""
        waiting = (self._waiting.get(node_id) for node_id in record.allocations().values())
        return [machine for machine in waiting if machine is not None and machine.record is record]

    def merge_stored(self, record: BackingNodeRecord, data: UserData) -> None:
        """Adopt the slots that are stored, but those of deleted nodes."""
        present = {
            user
            for user in data.allocations.values()
            if self.zk.getNode(user, cached=True) is not None
        }
        with self.lock:
            self.book.merge(record, data.allocations, present.__contains__)

    def grant(
        self, record: BackingNodeRecord, machines: list[Occupant], actions: list[Action]
    ) -> None:
        for machine in machines:
            if self._waiting.get(machine.node_id) is machine and machine.record is record:
                machine.granted = True
                actions.append(lambda machine=machine: wake(machine))  # type: ignore[misc]

    def note_slot(self, node: Node) -> None:
        """Store the slot that a requested node names; 11.0.0 stores it nowhere else."""
        place = decode_driver_data(node.driver_data)
        if (
            place is None
            or node.id is None
            or node.id in self._waiting
            or node.state in (DELETING, DELETED)
        ):
            return
        with self.lock:
            record = self.book.by_backing_node.get(place[0])
            if record is None or self.book.by_node.get(node.id) is record:
                return
            slot = place[1]
            if not 0 <= slot < record.slot_count or record.allocated_nodes[slot] is not None:
                if (
                    not record.busy
                ):  # our write is in progress: its result decides which node has the slot
                    self.log.warning(
                        "Node %s claims slot %s of %s, which is not free", node.id, slot, record
                    )
                return
            self.book.deallocate(node.id)
            self.book.allocate(record, node.id, slot)

    # -- requests

    def ask(self, record: BackingNodeRecord, machine: Occupant, actions: list[Action]) -> None:
        backing, txn = transactions.backing_request(
            self.zk, machine.label, self.my_id, machine.request
        )
        record.requested = backing.created_time

        def answered(results: list[Any] | None, error: BaseException | None) -> None:
            if results is None and backing.created_time is not None:
                # It may exist all the same, with an id that we do not know.
                self.doubtful.add(backing.created_time)
            self._requested(record, results, error)

        actions.append(lambda: self.submit(txn, answered))

    def _requested(
        self, record: BackingNodeRecord, results: list[Any] | None, error: BaseException | None
    ) -> None:
        if results is None:
            with self.changing() as actions:
                self.fail(
                    record,
                    f"The request for a backing node could not be stored: {error!r}",
                    actions,
                )
            return
        request_id = str(results[0]).rsplit("/", 1)[1]
        self.log.info(
            "Requested a backing node for label %s: request %s", record.label_name, request_id
        )
        with self.lock:
            record.request_id = request_id
            self.open[request_id] = record
            # It may have been abandoned before it was stored.
            unwanted = self.stopped or record not in self.book
        # It may have been fulfilled before we knew its id.
        request = self.zk.getCachedRequest(request_id)
        if unwanted:
            self.forget(request_id, delete=True)
        elif request is not None:
            self.request_changed(request_id, None, request)

    def request_changed(
        self, request_id: str, _old: NodeRequest | None, request: NodeRequest | None
    ) -> None:
        """Handle a change of any request, or a new connection, on the connection thread."""
        if request is not None and self.is_doubtful(request):
            self.cancel(request_id, request.created_time)
        if request_id not in self.open:
            return
        with self.changing() as actions:
            record = self.open.get(request_id)
            if record is None or record.node_id is not None or record.taking:
                return
            if request is None or not self.is_request(record, request):
                self.fail_without_request(record, actions)
            elif request.state == FAILED:
                self.fail(record, f"Backing node failed: request {request_id}", actions)
            elif request.state == FULFILLED and request.nodes:
                node_id = request.nodes[0]
                record.taking = True
                self.taking[node_id] = record
                actions.append(
                    lambda: self.in_background(self._take_over, record, request_id, node_id)
                )

    def fail_without_request(self, record: BackingNodeRecord, actions: list[Action]) -> None:
        self.fail(
            record, f"Backing node failed: request {record.request_id} no longer exists", actions
        )

    def fail(self, record: BackingNodeRecord, reason: str, actions: list[Action]) -> None:
        """Fail the launches that waited for the backing node."""
        self.log.warning("%s", reason)
        record.failed = True
        request_id = record.request_id
        if request_id is not None:
            actions.append(lambda: self.forget(request_id, delete=True))
        for machine in self.machines(record):
            machine.problem = exceptions.LaunchStatusException(reason)
            actions.append(lambda machine=machine: wake(machine))  # type: ignore[misc]
        self.book.drop(record)

    def forget(self, request_id: str, delete: bool) -> None:
        """End our interest in a request, and the request itself, if the mirror shows it."""
        with self.lock:
            record = self.open.pop(request_id, None)
            if record is None:
                return
            record.request_id = None
        if delete and self.is_request(record, self.zk.getCachedRequest(request_id)):
            self.cancel(request_id, record.requested)

    def is_doubtful(self, request: NodeRequest) -> bool:
        """Return whether it is a request of ours that was to be deleted, or may not exist."""
        return request.requestor == self.my_id and request.created_time in self.doubtful

    def cancel(self, request_id: str, created: float | None) -> None:
        """Delete a request of ours; with the next connection if this one breaks."""

        def deleted(_results: object, error: BaseException | None) -> None:
            if isinstance(error, TransactionFailed) and isinstance(error.cause, NoNodeError):
                return
            if error is not None:
                self.log.warning("Cannot delete backing request %s now: %r", request_id, error)
                if created is not None:
                    self.doubtful.add(created)

        self.doubtful.discard(created or 0.0)
        txn = Txn(self.zk.kazoo_client)
        txn.delete(paths.request(request_id))
        self.submit(txn, deleted)

    def _register(
        self, record: BackingNodeRecord, request_id: str, node_id: str, stored: dict[int, str]
    ) -> None:
        """Register the adopted backing node, whose slots are stored."""
        self.log.info("Adopted backing node %s for label %s", node_id, record.label_name)
        with self.changing() as actions:
            record.taking = False
            self.taking.pop(node_id, None)
            self.book.set_backing_node(record, node_id)
            record.stored = stored
            machines = self.machines(record)
            known = [
                machine for machine in machines if stored.get(machine.slot or 0) == machine.node_id
            ]
            self.grant(record, known, actions)
            if len(known) < len(machines):
                self.store(record, actions)
        self.forget(request_id, delete=False)

    def _take_over(self, record: BackingNodeRecord, request_id: str, node_id: str) -> None:
        """Adopt the node; wait while its lock is held for a moment, or the mirror is behind."""
        deadline = time.monotonic() + TAKE_OVER_TIMEOUT
        reason = "no time"
        tries = 0
        lock_exists = node_id in self.zk.node_tree.lock_dirs
        while not self.stop_event.is_set() and time.monotonic() < deadline:
            tries += 1
            try:
                node = self.zk.getNode(node_id)
                if node is None or node.allocated_to != request_id:
                    reason = "it no longer exists or is not ours"
                    break
                data = parse_user_data(node.user_data, self.my_id)
                if node.state == IN_USE and data is not None:
                    # The connection broke after the write.
                    if not self.zk.getNodeLockContenders(node):
                        reason = "its lock no longer exists"
                        break
                    if self.live(node_id) is not None:
                        self._register(record, request_id, node_id, data.allocations)
                        return
                    # The mirror is being reloaded; while it shows the node as free, the node would
                    # count as lost.
                    reason = "it is not assigned to us yet"
                elif node.state != READY:
                    reason = f"it is {node.state}"
                    break
                elif not self.is_request(record, self.zk.getCachedRequest(request_id)):
                    reason = "the request no longer exists"
                    break
                else:
                    with self.lock:
                        stored = record.allocations()
                        txn = transactions.take_over(
                            self.zk, node, request_id, record, self.my_id, lock_exists
                        )
                    self.zk.writer.run(txn)
                    self._register(record, request_id, node_id, stored)
                    return
            except Exception as error:
                cause = error.cause if isinstance(error, TransactionFailed) else error
                reason = repr(cause)
                if isinstance(error, TransactionFailed) and error.path == paths.request(request_id):
                    reason = "the request no longer exists"
                    break
                # Whether the directory of the lock exists: the server knows better than the mirror.
                lock_exists = not isinstance(cause, NoNodeError)
            self.stop_event.wait(TAKE_OVER_BACKOFF.pause(tries))
        with self.changing() as actions:
            record.taking = False
            self.taking.pop(node_id, None)
            self.fail(
                record, f"Backing node failed: cannot adopt node {node_id}: {reason}", actions
            )

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

    def submit(
        self, txn: Txn, callback: Callable[[list[Any] | None, BaseException | None], Any]
    ) -> None:
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
            self.log.error(
                "Error about backing nodes of provider %s:",
                self.provider.name,
                exc_info=future.exception(),
            )

"""Requests for backing nodes, and the adoption of fulfilled ones."""

from __future__ import annotations

import time
from typing import Any

from kazoo.exceptions import NoNodeError

from nodepool import exceptions
from nodepool.base.backoff import Backoff
from nodepool.driver.backing import transactions
from nodepool.driver.backing.records import BackingNodeRecord, parse_user_data
from nodepool.driver.backing.slots import Action, BackingSlots, Occupant, wake
from nodepool.zk import paths
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import FAILED, FULFILLED, IN_USE, READY, NodeRequest

#: Maximum seconds for locking a backing node that was assigned to us.
TAKE_OVER_TIMEOUT = 30.0
TAKE_OVER_BACKOFF = Backoff(0.02, 1.0)


class BackingRequests:
    """The pending requests of one provider. Callbacks of ZooKeeper never wait here."""

    def __init__(self, slots: BackingSlots) -> None:
        self._slots = slots
        self.log = slots.log
        #: By request id.
        self.open: dict[str, BackingNodeRecord] = {}
        #: By id of a node that is being adopted.
        self.taking: dict[str, BackingNodeRecord] = {}
        #: ``created_time`` of requests that may or may not exist.
        self.doubtful: set[float] = set()

    def ask(self, record: BackingNodeRecord, machine: Occupant, actions: list[Action]) -> None:
        backing, priority = transactions.backing_request(machine.label, self._slots.my_id, machine.request)
        txn = transactions.create_request(self._slots.zk, backing, priority)

        def answered(results: list[Any] | None, error: BaseException | None) -> None:
            if results is None and backing.created_time is not None:
                # It may exist all the same, with an id that we do not know.
                self.doubtful.add(backing.created_time)
            self._requested(record, results, error)

        actions.append(lambda: self._slots.submit(txn, answered))

    def _requested(self, record: BackingNodeRecord, results: list[Any] | None, error: BaseException | None) -> None:
        if results is None:
            with self._slots.changing() as actions:
                self.fail(record, f"The request for a backing node could not be stored: {error!r}", actions)
            return
        request_id = str(results[0]).rsplit("/", 1)[1]
        self.log.info("Requested a backing node for label %s: request %s", record.label_name, request_id)
        with self._slots.lock:
            record.request_id = request_id
            self.open[request_id] = record
            # It may have been abandoned before it was stored.
            unwanted = self._slots.stopped or record not in self._slots.book
        # It may have been fulfilled before we knew its id.
        request = self._slots.zk.getCachedRequest(request_id)
        if unwanted:
            self.forget(request_id, delete=True)
        elif request is not None:
            self.request_changed(request_id, None, request)

    def request_changed(self, request_id: str, _old: NodeRequest | None, request: NodeRequest | None) -> None:
        """Handle a change of any request, on the connection thread."""
        if request_id not in self.open:
            return
        with self._slots.changing() as actions:
            record = self.open.get(request_id)
            if record is None or record.node_id is not None or record.taking:
                return
            if request is None:
                self.gone(record, actions)
            elif request.state == FAILED:
                self.fail(record, f"Backing node failed: request {request_id}", actions)
            elif request.state == FULFILLED and request.nodes:
                node_id = request.nodes[0]
                record.taking = True
                self.taking[node_id] = record
                actions.append(lambda: self._slots.in_background(self._take_over, record, request_id, node_id))

    def gone(self, record: BackingNodeRecord, actions: list[Action]) -> None:
        self.fail(record, f"Backing node failed: request {record.request_id} no longer exists", actions)

    def fail(self, record: BackingNodeRecord, reason: str, actions: list[Action]) -> None:
        """Fail the launches that waited for the backing node."""
        self.log.warning("%s", reason)
        record.failed = True
        request_id = record.request_id
        if request_id is not None:
            actions.append(lambda: self.forget(request_id, delete=True))
        for machine in self._slots.machines(record):
            machine.problem = exceptions.LaunchStatusException(reason)
            actions.append(lambda machine=machine: wake(machine))  # type: ignore[misc]
        self._slots.book.drop(record)

    def forget(self, request_id: str, delete: bool) -> None:
        """End our interest in a request, and the request itself."""
        with self._slots.lock:
            record = self.open.pop(request_id, None)
            if record is not None:
                record.request_id = None
        if delete:
            txn = Txn(self._slots.zk.kazoo_client)
            txn.delete(paths.request(request_id))
            self._slots.submit(txn, lambda _results, error: self._log_leftover(request_id, error))

    def _log_leftover(self, request_id: str, error: BaseException | None) -> None:
        if error is not None and not (isinstance(error, TransactionFailed) and isinstance(error.cause, NoNodeError)):
            self.log.warning("Cannot delete backing request %s: %r", request_id, error)

    def _taken(self, record: BackingNodeRecord, request_id: str, node_id: str, stored: dict[int, str]) -> None:
        """Register the adopted backing node, whose slots are stored."""
        self.log.info("Adopted backing node %s for label %s", node_id, record.label_name)
        with self._slots.changing() as actions:
            record.taking = False
            self.taking.pop(node_id, None)
            self._slots.book.set_backing_node(record, node_id)
            record.stored = stored
            machines = self._slots.machines(record)
            known = [machine for machine in machines if stored.get(machine.slot or 0) == machine.node_id]
            self._slots.grant(record, known, actions)
            if len(known) < len(machines):
                self._slots.store(record, actions)
        self.forget(request_id, delete=False)

    def _take_over(self, record: BackingNodeRecord, request_id: str, node_id: str) -> None:
        """Adopt the node; wait while its lock is held for a moment, or the mirror is behind."""
        slots = self._slots
        deadline = time.monotonic() + TAKE_OVER_TIMEOUT
        reason = "no time"
        tries = 0
        lock_exists = node_id in slots.zk.node_tree.lock_dirs
        while not slots.stop_event.is_set() and time.monotonic() < deadline:
            tries += 1
            try:
                node = slots.zk.getNode(node_id)
                if node is None or node.allocated_to != request_id:
                    reason = "it no longer exists or is not ours"
                    break
                data = parse_user_data(node.user_data, slots.my_id)
                if node.state == IN_USE and data is not None:
                    # The connection broke after the write.
                    if not slots.zk.getNodeLockContenders(node):
                        reason = "its lock no longer exists"
                        break
                    if slots.live(node_id) is not None:
                        self._taken(record, request_id, node_id, data.allocations)
                        return
                    # The mirror is being reloaded; while it shows the node as free, the node would count as lost.
                    reason = "it is not assigned to us yet"
                elif node.state != READY:
                    reason = f"it is {node.state}"
                    break
                else:
                    with slots.lock:
                        stored = record.allocations()
                        txn = transactions.take_over(slots.zk, node, request_id, record, slots.my_id, lock_exists)
                    slots.zk.writer.run(txn)
                    self._taken(record, request_id, node_id, stored)
                    return
            except Exception as error:
                cause = error.cause if isinstance(error, TransactionFailed) else error
                reason = repr(cause)
                if isinstance(error, TransactionFailed) and error.path == paths.request(request_id):
                    reason = "the request no longer exists"
                    break
                # Whether the directory of the lock exists: the server knows better than the mirror.
                lock_exists = not isinstance(cause, NoNodeError)
            slots.stop_event.wait(TAKE_OVER_BACKOFF.pause(tries))
        with slots.changing() as actions:
            record.taking = False
            self.taking.pop(node_id, None)
            self.fail(record, f"Backing node failed: cannot adopt node {node_id}: {reason}", actions)

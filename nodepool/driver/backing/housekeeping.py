"""Periodic work for backing nodes: finding them again, releasing them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import NoNodeError

from nodepool.base.workqueue import Reconciler
from nodepool.driver.backing import transactions
from nodepool.driver.backing.records import BackingNodeRecord, parse_user_data
from nodepool.driver.backing.requests import BackingRequests
from nodepool.zk import locks, paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.writer import TransactionFailed

#: Minimum seconds for which an empty backing node is kept: the next request has often been
#: submitted already.
MIN_IDLE = 1.0
#: Seconds that a launcher of 11.0.0 has for signing a node after locking it.
SIGNING_TIME = 30.0


class Housekeeping(Reconciler[str | BackingNodeRecord]):
    """Maintains the book of slots; runs on threads that may wait for ZooKeeper."""

    def __init__(self, slots: BackingRequests) -> None:
        # Its keys: nodes to adopt, by id, and backing nodes whose grace time may be over.
        super().__init__(
            f"ThreadPoolExecutor-metastatic-timer-{slots.provider.name}", self._check_one, slots.log
        )
        self._slots = slots
        self.log = slots.log
        #: First sighting of locked nodes without signature (monotonic seconds), by id and version.
        self._unsigned: dict[tuple[str, int], float] = {}

    def stop(self) -> None:
        super().stop()
        self.join(5)

    # Finding

    def recover(self) -> None:
        """Build the book from ZooKeeper. May be repeated."""
        slots = self._slots
        for node in list(slots.zk.nodeIterator()):
            self._safely(self._recover_node, node)
        self._note_slots()
        records = list(slots.book)
        self.log.info(
            "Recovered %s backing nodes with %s nodes for provider %s",
            len(records),
            sum(len(record.allocations()) for record in records),
            slots.provider.name,
        )

    def _recover_node(self, node: zk.Node) -> None:
        slots = self._slots
        if node.id is None or node.id in slots.book.by_backing_node:
            return
        if parse_user_data(node.user_data, slots.my_id) is not None:
            self.adopt(node.id)
        elif node.requestor == slots.my_id and node.state == zk.READY and node.lock_contenders:
            # The mirror may show a lock before the record that was written with it.
            present = slots.zk.getNode(node.id)
            if present is None:
                return
            if parse_user_data(present.user_data, slots.my_id) is not None:
                self.adopt(node.id)
            elif present.requestor == slots.my_id and present.state == zk.READY:
                # Release 11.0.0 is between locking and signing, or died in between: then the node
                # has no owner.
                since = self._unsigned.setdefault((node.id, present.version), time.monotonic())
                if time.monotonic() - since >= SIGNING_TIME:
                    self._unlock(present)

    def _note_slots(self) -> None:
        for node in self._slots.zk.getProviderNodes(self._slots.provider.name):
            if node.driver_data is not None:
                self._slots.note_slot(node)

    def adopt(self, node_id: str) -> None:
        """Put a backing node into the book if it is really ours: signed and locked."""
        slots = self._slots
        node = slots.zk.getNode(node_id)
        data = parse_user_data(node.user_data, slots.my_id) if node is not None else None
        if node is None or data is None:
            return
        if not self._is_locked(node):
            again = slots.zk.getNode(node_id)
            if again is None or again.state != zk.IN_USE or again.version != node.version:
                return  # it was released, perhaps by another launcher
            self.log.warning("Node %s claims to be ours, but is not locked by us", node_id)
            return
        if node.state != zk.IN_USE:
            # Its owner died between its release and the unlocking.
            self._unlock(node)
            return
        # A node that waits for a slot here would be in two places.
        present = {
            user
            for user in data.allocations.values()
            if not slots.waits(user) and slots.zk.getNode(user, cached=True) is not None
        }
        with slots.lock:
            if node_id in slots.book.by_backing_node:
                return
            record = BackingNodeRecord(data.label, data.slots)
            record.node_id = node_id
            record.failed, record.reason = data.failed, data.reason
            record.launched = data.launched
            slots.book.add(record)
            slots.book.merge(record, data.allocations, present.__contains__)
        self.log.info("Found %s with nodes %s", record, sorted(record.allocations().values()))
        if slots.performed_init:
            self._note_slots()

    def _is_locked(self, node: zk.Node) -> bool:
        """Return whether our provider holds the lock of the node."""
        return self._slots.zk.getNodeLockContenders(node)[:1] == [self._slots.my_id]

    def _unlock(self, node: zk.Node) -> None:
        """Remove our persistent lock, unless the record has changed since it was read."""
        if not self._is_locked(node):
            return
        try:
            self._slots.zk.forceUnlockNode(node, node.version)
        except TransactionFailed as error:
            self.log.info("Node %s was changed meanwhile, its lock is kept: %s", node.id, error)
        else:
            self.log.info("Unlocked node %s, which is %s", node.id, node.state)

    # Letting go

    def run(self) -> None:
        slots = self._slots
        nodes = list(slots.zk.nodeIterator())
        present = {(node.id, node.version) for node in nodes}
        self._unsigned = {key: since for key, since in self._unsigned.items() if key in present}
        for node in nodes:
            if node.user_data is not None or node.requestor == slots.my_id:
                self._safely(self._recover_node, node)
        with slots.lock:
            records = list(slots.book)
        for record in records:
            self._safely(self._check, record)
        self._drop_doubtful_requests()

    def became_idle(self, record: BackingNodeRecord) -> None:
        """Check the backing node after its grace time, as its last node was deleted."""
        self.queue.add_later(record, max(self._left(record), MIN_IDLE))

    def check_all(self) -> None:
        """Check all backing nodes soon, because drains have changed; never blocks."""
        with self._slots.lock:
            for record in self._slots.book:
                self.queue.add(record)

    def _left(self, record: BackingNodeRecord) -> float:
        """Return the seconds for which an idle backing node is still kept."""
        label = self._slots.provider._getLabel(record.label_name)
        drain = self._slots.drain_of(record)
        if label is None or record.failed or (drain is not None and not drain.keep_idle):
            return 0.0
        idle = time.monotonic() - record.last_used
        # Since its launch, the clock may have been set back.
        age = max(time.time() - record.launched, idle)
        return float(max(label.grace_time - idle, label.min_retention_time - age))

    def _check_one(self, what: str | BackingNodeRecord) -> float | None:
        if isinstance(what, str):
            self.adopt(what)
            return None
        if not what.isEmpty():
            return None
        self._check(what)
        with self._slots.lock:
            kept = what.isEmpty() and any(other is what for other in self._slots.book)
        return max(self._left(what), MIN_IDLE) if kept else None

    def _safely(self, function: Callable[..., Any], argument: object) -> None:
        try:
            function(argument)
        except Exception:
            self.log.exception("Error looking after %s:", argument)

    def _check(self, record: BackingNodeRecord) -> None:
        slots = self._slots
        for node_id in record.allocations().values():
            if slots.zk.getNode(node_id, cached=True) is None:
                slots.free(node_id)  # it has ended unnoticed
        if record.node_id is not None and not record.lost:
            with slots.changing() as actions:
                if slots.live(record.node_id) is None:
                    slots.backing_node_lost(record, actions)
        label = slots.provider._getLabel(record.label_name)
        if (
            label is not None
            and label.max_age is not None
            and time.time() - record.launched > label.max_age
        ):
            record.failed = True
        if self._left(record) > 0:
            return
        with slots.lock:
            if not record.isEmpty() or record.busy or record.taking or record.releasing:
                return
            if record.lost or record.node_id is None:
                slots.book.drop(record)
            else:
                record.releasing = True
            request_id = record.request_id
        if record.releasing:
            slots.release(record)
        elif request_id is not None:
            self.log.info("Canceling backing request %s, no node needs it any more", request_id)
            slots.forget(request_id, delete=True)

    def release(self, record: BackingNodeRecord) -> None:
        try:
            self._release(record)
        finally:
            record.releasing = False

    def _release(self, record: BackingNodeRecord) -> None:
        slots = self._slots
        assert record.node_id is not None
        node = slots.zk.getNode(record.node_id)
        data = parse_user_data(node.user_data, slots.my_id) if node is not None else None
        if node is None or data is None or node.state != zk.IN_USE:
            self.log.info("%s no longer exists", record)
            self._drop(record)
            return
        slots.merge_stored(record, data)
        if not record.isEmpty():
            return
        names = locks.names_in_order(slots.zk.kazoo_client, paths.node_lock(record.node_id))
        ours = names[0] if names and self._is_locked(node) else None
        try:
            slots.zk.writer.run(transactions.release(slots.zk, node, ours))
        except TransactionFailed as error:
            if isinstance(error.cause, NoNodeError) and error.index == 0:
                self._drop(record)
            else:
                # Another launcher put a node there, or released it: the next pass shows which.
                self.log.info("%s was changed meanwhile, it is kept for now: %s", record, error)
            return
        self.log.info("Released idle %s", record)
        self._drop(record)

    def _drop(self, record: BackingNodeRecord) -> None:
        with self._slots.lock:
            self._slots.book.drop(record)

    def _drop_doubtful_requests(self) -> None:
        """Cancel requests that nobody needs: their nodes would not be used."""
        slots = self._slots
        missing = set(slots.doubtful)
        if not missing:
            return
        for request in list(slots.zk.nodeRequestIterator()):
            if slots.is_doubtful(request):
                self.log.info("Canceling backing request %s, which nobody needs", request.id)
                slots.cancel(request.id or "", request.created_time)
                missing.discard(request.created_time or 0.0)
        slots.doubtful.difference_update(missing)

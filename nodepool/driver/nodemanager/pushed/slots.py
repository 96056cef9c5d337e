"""Connects to backing nodes, and assigns slivers to them by their actual capacity.

Bookkeeping, records, locks and writes are those of the metastatic driver (MST-3). ``label`` in
``user_data`` is the backing label, as all labels of the provider share a backing node, and
``slots`` is the number of slivers that its node manager admits; a slot is reserved before the
sliver is created, so that no launcher releases what another one is about to use.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kazoo.exceptions import KazooException

from nodepool import exceptions
from nodepool.driver.backing import transactions
from nodepool.driver.backing.records import BackingNodeRecord, parse_user_data
from nodepool.driver.backing.requests import Action
from nodepool.driver.backing.slots import BackingSlots
from nodepool.driver.nodemanager.config import NodeManagerHost
from nodepool.driver.nodemanager.hosts import Hosts
from nodepool.driver.nodemanager.pushed.private_directory import PrivateDirectory
from nodepool.driver.nodemanager.pushed.ssh_link import Link, LinkBusy, LinkError
from nodepool.driver.nodemanager.pushed.target import target_of
from nodepool.driver.nodemanager.sizes import amounts_of, needed_by, too_large
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.zk import zookeeper as zk
from nodepool.zk.writer import TransactionFailed


class BackingNodes(BackingSlots):
    """Requests, connects, shares and releases the backing nodes of one provider.

    :param hosts: the node managers that can be reached; a backing node's id is the name of its
        host.
    """

    def __init__(
        self, provider_config: Any, zk_conn: Callable[[], Any], hosts: Hosts, log: logging.Logger
    ) -> None:
        super().__init__(provider_config, zk_conn, log)
        self.hosts = hosts
        self.options = provider_config.backing
        #: By node: machines that have a slot and have not sent their record yet.
        self.unsent: dict[str, Any] = {}
        #: By backing label: the largest known capacity, which further backing nodes are expected to
        #: have.
        self._seen: dict[str, dict[str, Any]] = {}
        self._links: dict[str, Link] = {}
        self._directory: PrivateDirectory | None = None

    def start(self) -> None:
        self._directory = PrivateDirectory()
        self.in_background(self._begin)

    def _begin(self) -> None:
        self.initialize()
        self.follow_book()
        with self.lock:
            empty = [record for record in self.book if record.isEmpty()]
        for record in empty:
            self.housekeeping.became_idle(record)

    def stop(self) -> None:
        super().stop()
        self.hosts.stop()
        with self.lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.stop()
        for link in links:
            link.join()
        if self._directory is not None:
            self._directory.remove()

    # -- connections

    def connect(self, record: BackingNodeRecord) -> None:
        """Have a connection to this backing node."""
        node_id = record.node_id
        if node_id is None or node_id in self._links or record.lost or record.releasing:
            return
        node = self.zk.getNode(node_id, cached=True)
        if node is None:
            return
        with self.lock:
            if node_id in self._links or self.stopped:
                return
            link = self._links[node_id] = self._link(
                node, lambda up: self._link_changed(record, up)
            )
        link.start()

    def _link(self, node: zk.Node, changed: Callable[[bool], None]) -> Link:
        assert self._directory is not None
        return Link(target_of(node, self.provider), self._directory.path, self.log, changed)

    def _link_changed(self, record: BackingNodeRecord, up: bool) -> None:
        """Handle a change of a link, on its thread."""
        node_id = str(record.node_id)
        link = self._links.get(node_id)
        if link is None:
            return
        if up:
            options = NodeManagerHost(
                {"name": node_id, "url": link.url, "ssh-address": link.target.address}
            )
            options.expected_name = node_id
            self.hosts.announced(options)
            return
        host = self.hosts.get(node_id)
        if host is not None:
            host.failed(LinkError(link.problem))
        if self._is_silent(node_id):
            self._give_up(record)
        self.hosts.wake_waiting()

    def _disconnect(self, node_id: str) -> None:
        with self.lock:
            link = self._links.pop(node_id, None)
        self.hosts.remove(node_id)
        if link is not None:
            link.stop()
            link.join()

    def _is_silent(self, node_id: str) -> bool:
        """Return whether the backing node cannot be used, for longer than it needs to boot."""
        link = self._links.get(node_id)
        return link is not None and (
            bool(link.target.unfit) or link.down_for() > self.provider.boot_timeout
        )

    def problem(self, node_id: str) -> str:
        link = self._links.get(node_id)
        return link.problem if link is not None and link.problem else "it does not answer"

    def follow_book(self) -> None:
        """Connect to all our backing nodes, and to no others."""
        with self.lock:
            records = {
                record.node_id: record
                for record in self.book
                if record.node_id is not None and not record.lost
            }
        for record in records.values():
            self.connect(record)
        for node_id in [node_id for node_id in list(self._links) if node_id not in records]:
            self._disconnect(node_id)

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
        return (
            f"label {label.name} is too large for backing nodes of label {label.backing_label}: "
            f"{reason}"
        )

    def move_to_room(self, machine: Any) -> None:
        """Move a machine that waits for a new backing node to capacity that became free
        elsewhere.
        """
        with self.changing() as actions:
            record = machine.record
            if (
                record is None
                or record.node_id is not None
                or record.taking
                or machine.problem is not None
            ):
                return
            found = self.find_free(machine)
            host = self.hosts.get(found.node_id or "") if found is not None else None
            if host is None or not host.usable:
                return
            self.place(machine, actions)
            idle = record.isEmpty()
        if idle:
            self.housekeeping.became_idle(record)

    def slot_freed(
        self, record: BackingNodeRecord, actions: list[Action]
    ) -> BackingNodeRecord | None:
        return None  # a slot does not imply enough capacity: see move_to_room

    def find_free(self, machine: Any) -> BackingNodeRecord | None:
        oldest = time.time() - self.options.max_age if self.options.max_age is not None else 0.0
        found = []
        for number, record in enumerate(self.book.records.get(machine.label.backing_label, ())):
            if (
                not record.hasAvailableSlot()
                or record.lost
                or record.launched <= oldest
                or record in machine.refused
            ):
                continue
            room = self._room(record, machine)
            if room is not None:
                host = self.hosts.get(record.node_id or "")
                # Available, requested, not answering.
                order = 1 if host is None else 0 if host.usable else 2
                found.append(
                    (order, room if self.provider.placement == "pack" else -room, number, record)
                )
        return min(found, key=lambda entry: entry[:-1])[-1] if found else None

    def _room(self, record: BackingNodeRecord, machine: Any) -> float | None:
        """Return the free CPU (per mille) there, if known; None: the sliver does not fit."""
        host = self.hosts.get(record.node_id or "")
        capacity = host.capacity if host is not None else None
        if host is not None and capacity is not None:
            self._note(record.label_name, capacity)
            free = host.free()
        else:
            capacity = self._seen.get(record.label_name)
            if capacity is None:
                return math.inf  # the first one shows their size: until then all wait for it
            free = amounts_of(capacity)
        for other in list(self.unsent.values()):
            if other.record is record and other is not machine:
                free = free.minus(needed_by(other.label, capacity))
        return free.cpu if needed_by(machine.label, capacity).fits_in(free) else None

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
            actions.append(lambda: self.in_background(self._lost, record))

    def _lost(self, record: BackingNodeRecord) -> None:
        """Disconnect from a backing node that is not ours any more."""
        if record.node_id is not None:
            self._disconnect(record.node_id)
            self.hosts.wake_waiting()

    def _give_up(self, record: BackingNodeRecord) -> None:
        """Abandon a backing node that does not answer: it is released when it is empty.

        Its ready nodes count as missing, see :meth:`may_have`; those in use are left to their
        users.
        """
        with self.changing() as actions:
            if record.failed:
                return
            self.log.warning(
                "Backing node %s cannot be used any more; its ready nodes are deleted",
                record.node_id,
            )
            record.failed = True
            if record.node_id is not None and not record.lost:
                self.store(record, actions)

    # -- release

    def release(self, record: BackingNodeRecord) -> None:
        self.in_background(self._vacate_and_release, record)

    def _vacate_and_release(self, record: BackingNodeRecord) -> None:
        try:
            if self._vacate(record):
                self.housekeeping.release(record)
        finally:
            record.releasing = False

    def _vacate(self, record: BackingNodeRecord) -> bool:
        """Remove our node manager from an idle backing node; return False to keep the node.

        An unreachable one is released as it is: the remains there end automatically, or with the
        next push.
        """
        node_id = str(record.node_id)
        try:
            if self._has_slivers(node_id) or not self._close(record) or self._has_slivers(node_id):
                return False
        except KazooException as error:
            self.log.warning("Backing node %s is kept for now: %r", node_id, error)
            return False
        self._disconnect(node_id)
        node = self.zk.getNode(node_id)
        if node is None:
            return True
        link = self._link(node, lambda up: None)
        if link.target.unfit:
            return True
        try:
            link.remove()
        except LinkBusy as busy:
            self.log.info("Backing node %s is kept: it has slivers %s", node_id, busy)
            return False
        except LinkError as error:
            self.log.warning(
                "The node manager on backing node %s cannot be removed: %s", node_id, error
            )
        return True

    def _has_slivers(self, node_id: str) -> bool:
        host = self.hosts.get(node_id)
        if host is None or not host.usable:
            return False
        try:
            return bool(host.call("ListSlivers"))
        except (RpcError, RpcFault) as error:
            self.log.info("Listing the slivers of backing node %s failed: %s", node_id, error)
            return False

    def _close(self, record: BackingNodeRecord) -> bool:
        """Have no launcher put anything there any more; False when one just has.

        :raises KazooException: ZooKeeper cannot be reached.
        """
        node = self.zk.getNode(str(record.node_id))
        if node is None or node.state != zk.IN_USE:
            return True
        data = parse_user_data(node.user_data, self.my_id)
        if data is not None:
            self.merge_stored(record, data)
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

    # -- slivers

    def delete(self, host_name: str, sliver: str) -> Future[bool]:
        """Delete a sliver; if the backing node is not ours any more, it is deleted already.

        :raises NotFound: it is not.
        :raises RpcError: it cannot be reached at present.
        """
        record = self.book.by_backing_node.get(host_name)
        if record is None or record.lost:
            if record is None and self.may_have(host_name):
                self.housekeeping.queue.add(host_name)
                raise RpcError(f"backing node {host_name} is not known yet")
            self.log.info(
                "Backing node %s no longer exists, and neither does its sliver %s",
                host_name,
                sliver,
            )
            raise exceptions.NotFound
        self.connect(record)
        if self.hosts.get(host_name) is None:
            raise RpcError(f"backing node {host_name}: {self.problem(host_name)}")
        return self.hosts.delete(host_name, sliver)

    def may_have(self, node_id: str) -> bool:
        """Return whether usable slivers may be on this backing node."""
        record = self.book.by_backing_node.get(node_id)
        if record is not None:
            return not record.lost and not (record.failed and self._is_silent(node_id))
        node = self.zk.getNode(node_id)
        return (
            node is not None
            and node.state == zk.IN_USE
            and parse_user_data(node.user_data, self.my_id) is not None
        )


def _size(capacity: dict[str, Any]) -> tuple[float, float]:
    return capacity["cpu"] * capacity["cores"], capacity["memory"]

"""Transactions of a request: acceptance, new nodes, end."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodepool.driver.quota.support import QuotaSupport
from nodepool.driver.request.base import NodeRequestHandlerNotifications, RequestHandler, Trial
from nodepool.driver.request.state import LabelRecorder
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.drains import Drain, covering, names_of
from nodepool.zk.locks import LockHandle, add_lock, add_unlocked_check
from nodepool.zk.writer import Txn


@dataclass(slots=True)
class Step:
    """The nodes of one pass over the missing labels, and the positions of their results."""

    handler: RequestHandler
    labels: LabelRecorder
    reused: list[tuple[str, zk.Node]] = field(default_factory=list)
    created: list[tuple[str, zk.Node]] = field(default_factory=list)
    #: The label without quota.
    short: str | None = None
    #: Of labels whose launches keep failing.
    trials: list[Trial] = field(default_factory=list)
    #: Further nodes are to be chosen when this has been written.
    more: bool = False
    #: Accepted and fulfilled in one transaction.
    fused: bool = False
    #: The request as written, if it is not accepted yet.
    record: zk.NodeRequest | None = None
    #: Record, or ("lock", record) -> index of the result.
    indexes: dict[object, int] = field(default_factory=dict)

    # -- choosing nodes

    def reuse(self, label: str, held: Container[str | None]) -> bool:
        """Choose a ready node for the label, and claim it; return False if there is none.

        :param held: ids of nodes that are locked, although the mirror shows them as free.
        """
        handler = self.handler
        tree, claims, claim = handler.zk.node_tree, handler.pw.nodepool.claims, object()
        drains = handler.zk.note_tree.of(Drain)
        for node_id in tree.iter_free(handler.provider.name, handler.pool.name, label):
            if node_id in held or claims.setdefault(node_id, claim) is not claim:
                continue
            with contextlib.ExitStack() as unless_chosen:
                unless_chosen.callback(claims.pop, node_id, None)
                node = tree.get(node_id)
                if (
                    node is None
                    or (node.state, node.allocated_to) != (zk.READY, None)
                    or (drains and covering(drains, names_of(node)) is not None)
                    or not handler.checkReusableNode(node)
                ):
                    continue
                handler.noteReuse(node)
                unless_chosen.pop_all()
            self.reused.append((label, node.copy()))
            return True
        return False

    def create(self, label: str) -> bool:
        """Plan a new node for the label, and promise its quota; return False if there is none."""
        handler, manager = self.handler, self.handler.manager
        with manager.quota_lock if isinstance(manager, QuotaSupport) else contextlib.nullcontext():
            if not handler.hasRemainingQuota(label):
                return False
            node = zk.Node()
            node.state = zk.INIT
            node.created_time = node.state_time
            node.type = [label]
            node.provider = handler.provider.name
            node.pool = handler.pool.name
            node.launcher = handler.launcher_id
            node.allocated_to = handler.request.id
            node.tenant_name = handler.request.tenant_name
            node.requestor = handler.request.requestor
            node.attributes = handler.pool.node_attributes
            handler.setNodeMetadata(node)
            needs = node.resources
            if not needs and isinstance(manager, QuotaSupport):
                needs = manager.quotaNeededByLabel(label, handler.pool).get_resources()
            handler.zk.reservations.reserve(
                id(node), node.provider, node.pool, None, needs or {"instances": 1}
            )
        self.created.append((label, node))
        return True

    def forget(self) -> None:
        """Release claims and quota of nodes that were written, or will not be."""
        for _label, node in self.reused:
            self.handler.pw.nodepool.claims.pop(node.id, None)
        for _label, node in self.created:
            self.handler.zk.reservations.release(id(node))

    # -- writing them

    def accepting(self, known: Mapping[str, bool]) -> Txn:
        """Return the transaction that accepts the request, with its nodes.

        :param known: lock directories of which ZooKeeper has reported whether they exist.
        """
        handler = self.handler
        request, tree = handler.request, handler.zk.node_tree
        txn = Txn(handler.zk.kazoo_client)
        self.fused = (
            not handler.accepted
            and self.short is None
            and not self.created
            and type(handler).nodeReusedNotification
            is NodeRequestHandlerNotifications.nodeReusedNotification
        )
        self._add_request(txn, known)
        for _label, node in self.reused:
            node.allocated_to = request.id
            node.tenant_name = request.tenant_name
            node.requestor = request.requestor
            directory = paths.node_lock(node.id or "")
            exists = known.get(directory, node.id in tree.lock_dirs)
            if self.fused:
                add_unlocked_check(txn, directory, exists)
            else:
                self.indexes["lock", node.id] = add_lock(txn, directory, exists)
            self.indexes[node.id] = set_node(txn, handler.zk, node, node.version)
        for _label, node in self.created:
            record = node.copy()
            record.promise = id(node)
            self.indexes[id(node)] = txn.create(
                f"{paths.NODES}/", node.serialize(), sequence=True, tree=tree, record=record
            )
        for trial in self.trials:
            txn.set(*trial)
        return txn

    def _add_request(self, txn: Txn, known: Mapping[str, bool]) -> None:
        handler = self.handler
        request = handler.request
        if handler.accepted:
            txn.check(request.lock.path)
            return
        directory = paths.request_lock(request.id or "")
        exists = known.get(directory, False)
        self.record = changed = request.copy()
        if self.fused:
            # The lock has to be free now; it cannot be acquired in between.
            add_unlocked_check(txn, directory, exists)
            changed.nodes = [
                str(node.id) for _label, node in self.reused
            ]  # one for each label, in their order
            changed.state = zk.FULFILLED
        else:
            self.indexes["lock", "request"] = add_lock(txn, directory, exists)
            changed.state = zk.PENDING
        self.indexes["request"] = set_request(txn, handler.zk, changed, request.version)

    def accepted(self, results: list[Any]) -> None:
        """Apply ids, versions and locks from the answer to :meth:`accepting`."""
        request, record = self.handler.request, self.record
        if record is not None:
            request.nodes = record.nodes
            request.state = zk.FULFILLED if self.fused else zk.PENDING
            request.state_time = record.state_time
            request.stat = results[self.indexes["request"]]
            request.lock = self._lock("request", results)
        for _label, node in self.created:
            node.id = str(results[self.indexes[id(node)]]).rsplit("/", 1)[1]
        for label, node in self.reused:
            node.stat = results[self.indexes[node.id]]
            self._obtained(label, node, results)
            self.handler.log.debug("Reusing ready node %s for %s", node.id, label)

    def launching(self) -> Txn:
        """Return the transaction that locks the new nodes and sets them to BUILDING."""
        handler = self.handler
        txn = Txn(handler.zk.kazoo_client)
        # A launcher that was suspended for long may have lost the request, and others their nodes,
        # to another one.
        txn.check(handler.request.lock.path)
        for _label, node in self.created:
            node.state = zk.BUILDING
            handler.prepareNode(node)
            self.indexes["lock", node.id] = add_lock(txn, paths.node_lock(node.id or ""), False)
            self.indexes[node.id] = set_node(txn, handler.zk, node, 0)
        return txn

    def locked(self, results: list[Any]) -> None:
        """Apply versions and locks from the answer to :meth:`launching`."""
        for label, node in self.created:
            node.stat = results[self.indexes[node.id]]
            self._obtained(label, node, results)

    def _obtained(self, label: str, node: zk.Node, results: list[Any]) -> None:
        node.lock = self._lock(node.id, results)
        self.handler.nodeset.append(node)
        self.labels.add(label, node.id)

    def _lock(self, key: object, results: list[Any]) -> LockHandle | None:
        index = self.indexes.get(("lock", key))
        if index is None:
            return None
        path = str(results[index])
        return LockHandle(path.rsplit("/", 1)[0], path, None)


def set_node(txn: Txn, facade: zk.ZooKeeper, node: zk.Node, version: int = -1) -> int:
    return txn.set(
        paths.node(node.id or ""),
        node.serialize(),
        version,
        tree=facade.node_tree,
        record=node.copy(),
    )


def set_request(txn: Txn, facade: zk.ZooKeeper, request: zk.NodeRequest, version: int) -> int:
    path = paths.request(request.id or "")
    return txn.set(
        path, request.serialize(), version, tree=facade.request_tree, record=request.copy()
    )


def add_unlock(txn: Txn, facade: zk.ZooKeeper, node: zk.Node, write: bool) -> None:
    if write:
        set_node(txn, facade, node)
    if isinstance(node.lock, LockHandle):
        txn.delete(node.lock.path)


def add_request_end(txn: Txn, facade: zk.ZooKeeper, request: zk.NodeRequest) -> None:
    """Write the request, then give up its lock."""
    set_request(txn, facade, request, request.version)
    if isinstance(request.lock, LockHandle):
        txn.delete(request.lock.path)

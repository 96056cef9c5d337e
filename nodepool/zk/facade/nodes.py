"""Facade methods about nodes (DRV-8, PY-3)."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kazoo.exceptions import NoNodeError

from nodepool.exceptions import ZKException
from nodepool.zk import locks, paths
from nodepool.zk.facade.base import FacadeBase
from nodepool.zk.locks import LockHandle
from nodepool.zk.mirror.nodes import NodeCounts, NodeTree
from nodepool.zk.reading import remove
from nodepool.zk.records import DELETED, DELETING, READY, Node
from nodepool.zk.writer import TransactionFailed, Txn

#: Seconds during which the deletion of a node of the pool prevents the deletion of another idle
#: node.
DELETION_GUARD = 300
#: Records created in one transaction; servers accept 1 MiB at a time.
CREATED_TOGETHER = 50
#: Seconds that :meth:`NodeMethods.deleteOldestUnusedNode` waits for an answer.
ANSWER_TIMEOUT = 30.0


class NodeMethods(FacadeBase):
    # -- reading

    def getNodes(self) -> list[str]:
        """Return the sorted ids of all node znodes, including empty ones."""
        return self._children(paths.NODES)

    def getNode(self, node: str, cached: bool = False, only_cached: bool = False) -> Node | None:
        """Return the record, or None if it is missing, empty or invalid."""
        if self.node_tree is not None and (
            only_cached or (cached and self.node_tree.synced.is_set())
        ):
            found = self.node_tree.get(node)
            if found is not None or only_cached:
                return found
        return self._record(Node, paths.node(node), node)

    def getCachedNode(self, node_id: str) -> Node | None:
        """Return the mirrored node in O(1); None without a mirror."""
        return self.node_tree.get(node_id) if self.node_tree is not None else None

    def nodeIterator(self, cached: bool = True, cached_ids: bool = False) -> Iterator[Node]:
        """Yield all nodes; from a complete mirror, else read (pipelined)."""
        return self._records(Node, paths.NODES, self.node_tree, cached, cached_ids)

    def readNodes(self) -> list[Node]:
        """Return all nodes with their lock contenders; from a complete mirror, else read."""
        return self._complete(self.node_tree, NodeTree).snapshot()

    def readUnreleasedNodes(self) -> list[Node]:
        """Return the nodes that somebody has to accept, release or delete; as :meth:`readNodes`."""
        return self._complete(self.node_tree, NodeTree).to_release()

    def readChangingNodes(self) -> list[Node]:
        """Read the nodes whose last change the mirror does not show yet; none without a mirror."""
        ids = (
            []
            if self.node_tree is None
            else [path.rpartition("/")[2] for path in self.node_tree.changing()]
        )
        return [node for node in map(self.getNode, ids) if node is not None]

    def countNodes(self) -> NodeCounts:
        """Return the numbers of nodes; from the mirror, else by reading all; write nothing."""
        return self._complete(self.node_tree, NodeTree).counts()

    def getReadyNodesOfTypes(self, labels: list[str], cached: bool = True) -> dict[str, list[Node]]:
        """Return ready, unallocated nodes by label; nodes with several labels under each."""
        result: dict[str, list[Node]] = {}
        for node in self.nodeIterator(cached=cached):
            if node.state != READY or node.allocated_to:
                continue
            for label in node.type:
                if label in labels:
                    result.setdefault(label, []).append(node)
        return result

    def countPoolNodes(self, provider_name: str, pool_name: str) -> int:
        return sum(
            1
            for node in self.nodeIterator()
            if node.provider == provider_name and node.pool == pool_name
        )

    def getProviderNodes(self, provider_name: str) -> list[Node]:
        return [node for node in self.nodeIterator() if node.provider == provider_name]

    def countFreeReadyNodes(self, provider_name: str) -> dict[str, int]:
        """Return label -> number of ready, unallocated, unlocked nodes of the provider."""
        found: Counter[str] = Counter()
        with self.node_tree.lock:
            for (provider, _pool), labels in self.node_tree.free.items():
                if provider == provider_name:
                    found.update({label: len(ids) for label, ids in labels.items()})
        return found

    def watchNode(self, node: Node, callback: Callable[[Node, bool], Any]) -> None:
        """Call ``callback(node, deleted)`` on each change until it returns False."""
        tree = self.node_tree
        if tree is None:
            raise ZKException("watching nodes requires the cache")

        def changed(node_id: str, _old: Node | None, new: Node | None) -> None:
            if node_id != node.id:
                return
            if new is not None and new is not node:
                node.updateFromDict({**new.extra, **new.toDict()})
                node.stat = new.stat
            if callback(node, new is None) is False or new is None:
                tree.listeners.remove(changed)

        tree.listeners.append(changed)

    # -- writing

    def storeNode(self, node: Node) -> None:
        """Create the record (sets ``id``), or write it.

        A node that we have locked is written only while the lock still exists.

        :raises ZKException: the record, or our lock on it, no longer exists.
        """
        if node.id is None:
            self.createNodes([node])
            return
        txn = Txn(self.kazoo_client)
        if isinstance(node.lock, LockHandle):
            txn.check(node.lock.path)
        index = txn.set(
            paths.node(node.id), node.serialize(), tree=self.node_tree, record=node.copy()
        )
        try:
            node.stat = self.writer.run(txn)[index]
        except TransactionFailed as error:
            if isinstance(error.cause, NoNodeError):
                what = "lock on it" if error.index == 0 and node.lock else "record"
                raise ZKException(
                    f"Node {node.id} cannot be written: the {what} no longer exists"
                ) from error
            raise

    def createNodes(self, nodes: list[Node]) -> None:
        """Create the records (sets their ``id``), many per transaction, which is faster.

        :raises kazoo.exceptions.KazooException: connection trouble; some may have been created.
        """
        for start in range(0, len(nodes), CREATED_TOGETHER):
            txn, part = Txn(self.kazoo_client), nodes[start : start + CREATED_TOGETHER]
            for node in part:
                node.created_time = node.state_time
                txn.create(
                    f"{paths.NODES}/",
                    node.serialize(),
                    sequence=True,
                    tree=self.node_tree,
                    record=node.copy(),
                )
            for node, path in zip(part, self.writer.run(txn), strict=True):
                node.id = str(path).rsplit("/", 1)[1]

    def updateNode(self, node: Node) -> None:
        """Read the record again.

        :raises NoNodeError: it no longer exists (or is empty).
        """
        self._refresh(node, paths.node(node.id or ""))

    def deleteNode(self, node: Node) -> None:
        """Mark the record deleted, then delete it with its lock directory."""
        if node.id is None:
            return
        node.state = DELETED
        try:
            self.kazoo_client.set(paths.node(node.id), node.serialize())
        except NoNodeError:
            return
        self.deleteRawNode(node.id)
        node.lock = None

    def deleteRawNode(self, node_id: str) -> None:
        """Delete the znode and everything below it."""
        self._delete(paths.node(node_id))

    def deleteOldestUnusedNode(self, provider_name: str, pool_name: str) -> bool:
        """Run :meth:`make_room` and wait for the result; return False if no node is deleted."""
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.make_room(provider_name, pool_name, answer.put)
        try:
            return answer.get(timeout=ANSWER_TIMEOUT)
        except queue.Empty:
            return False

    def make_room(
        self, provider_name: str, pool_name: str, answered: Callable[[bool], object] = bool
    ) -> None:
        """Mark the longest ready free node of the pool for deletion, without waiting.

        Nothing is done while a node of the pool is being deleted.

        :param answered: called with whether a node is deleted, here or on the thread of the
            connection.
        """
        tree = self.node_tree
        now = time.time()
        with tree.lock:
            deleting = tree.deleting.get((provider_name, pool_name), {})
            guarded = any(now - since < DELETION_GUARD for since in deleting.values())
        oldest = (
            None if guarded else tree.oldest_free(provider_name, pool_name)
        )  # iterates over them
        if oldest is None:
            answered(False)
            return

        def written(error: BaseException | None) -> None:
            if error is None:
                self.log.info(
                    "Deleting idle node %s of %s %s to free capacity",
                    oldest.id,
                    provider_name,
                    pool_name,
                )
            elif not isinstance(
                error, TransactionFailed
            ):  # locked or changed in the meantime: it is not idle any more
                self.log.warning(
                    "Cannot free capacity of %s %s now: %r", provider_name, pool_name, error
                )
            answered(error is None)

        node = oldest.copy()
        node.state = DELETING
        self.change_unlocked(oldest, node, written)

    # -- locks

    def lockNode(
        self,
        node: Node,
        blocking: bool = True,
        timeout: float | None = None,
        ephemeral: bool = True,
        identifier: str | None = None,
    ) -> None:
        """Lock the node and read it again.

        :raises TimeoutException: not obtained within ``timeout`` seconds.
        :raises ZKLockException: held by another client (not blocking), by this very object, or the
            node was deleted.
        """
        path, directory = paths.node(node.id or ""), paths.node_lock(node.id or "")
        self._lock(node, "node", path, directory, blocking, timeout, ephemeral, identifier)

    def unlockNode(self, node: Node) -> None:
        """Release the lock of the node.

        :raises ZKLockException: we do not hold the lock.
        """
        self._unlock(node, "node")

    def unlock_soon(self, node: Node) -> None:
        """Release our lock on the node without waiting, if we have it."""
        handle, node.lock = node.lock, None
        if isinstance(handle, LockHandle):
            txn = Txn(self.kazoo_client)
            txn.delete(handle.path)
            self.writer.submit(txn)

    def forceUnlockNode(self, node: Node, version: int | None = None) -> None:
        """Delete the holder of the lock, even if another client holds it.

        :param version: delete it only while the record has this version.
        :raises TransactionFailed: the record has another version, or the holder has just left.
        """
        directory = paths.node_lock(node.id or "")
        names = locks.names_in_order(self.kazoo_client, directory)
        if names and version is not None:
            txn = Txn(self.kazoo_client)
            txn.check(paths.node(node.id or ""), version)
            txn.delete(f"{directory}/{names[0]}")
            self.writer.run(txn)
        elif names:
            remove(self.kazoo_client, f"{directory}/{names[0]}")

    def getNodeLockContenders(self, node: Node) -> list[str]:
        """Return the identifiers of the lock's contenders, holder first."""
        directory = paths.node_lock(node.id or "")
        names = locks.names_in_order(self.kazoo_client, directory)
        read = self._get_many(f"{directory}/{name}" for name in names)
        return [data.decode("utf8", "replace") for _path, (data, _stat) in read]

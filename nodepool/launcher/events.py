"""LauncherEvents: which part of the launcher a change in ZooKeeper wakes (launcher.md section 1).

All runs on the connection's thread: it only adds keys and sets events, and never waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kazoo.protocol.states import KazooState

from nodepool.launcher.nodes import DELETABLE
from nodepool.zk.records import ABORTED, FAILED, HOLD, INIT, PENDING, READY, Node, NodeRequest
from nodepool.zk.requests import MIN_READY

if TYPE_CHECKING:
    from nodepool.launcher.pool import NodePool
    from nodepool.zk.zookeeper import ZooKeeper


class LauncherEvents:
    """Listens to the mirror and the connection.  Before :attr:`NodePool.zk` is set only what needs no mirror is done."""

    def __init__(self, nodepool: NodePool) -> None:
        self._nodepool = nodepool
        self._session_was_lost = False

    def attach(self, zk: ZooKeeper) -> None:
        """Listen from now on; to be called before the connection is made."""
        assert zk.node_tree and zk.request_tree and zk.component_tree and zk.image_tree
        zk.node_tree.listeners.append(self._node_changed)
        zk.node_tree.lock_listeners.append(self._node_lock_changed)
        zk.request_tree.listeners.append(self._request_changed)
        zk.request_tree.listeners.append(self._nodepool.declines.request_changed)
        zk.component_tree.listeners.append(self._component_changed)
        zk.image_tree.listeners.append(self._image_changed)
        for tree in zk.trees:
            tree.sync_listeners.append(self._tree_synced)
        zk.client.state_listeners.append(self._state_changed)

    # -- everything

    def all_synced(self) -> None:
        """The mirror is complete, again: everything is looked at."""
        self._nodepool.assignment.rebuild()
        self.look_at_all_nodes()
        self._nodepool.cleanup.wake()
        self._nodepool.min_ready.wake()

    def look_at_all_nodes(self) -> None:
        """Safety net: every node once, at low priority."""
        tree = self._nodepool.zk.node_tree
        with tree.lock:
            ids = [*tree.nodes, *tree.empty]
        for node_id in ids:
            self._nodepool.node_reconciler.look_at(node_id, urgent=False)

    def _tree_synced(self) -> None:
        zk = self._nodepool.zk
        if zk is not None and zk.synced:
            self.all_synced()

    def _state_changed(self, state: str) -> None:
        nodepool = self._nodepool
        if state == KazooState.LOST:
            self._session_was_lost = True
            for worker in nodepool.pool_workers():
                worker.session_lost()
            nodepool.min_ready.session_lost()
            nodepool.statistics.session_lost()
        elif state == KazooState.CONNECTED:
            if self._session_was_lost:
                self._session_was_lost = False
                nodepool.assignment.session_lost()
            nodepool.cleanup.wake()

    # -- nodes

    def _node_changed(self, node_id: str, old: Node | None, new: Node | None) -> None:
        nodepool = self._nodepool
        nodepool.statistics.wake()
        if new is None:
            if old is not None:
                self._capacity(old)
                self._min_ready_label(old)
            return
        tree = nodepool.zk.node_tree if nodepool.zk is not None else None
        if tree is None:
            return
        state = new._state
        locked = node_id in tree.contenders
        if not locked and (state in DELETABLE or state in (READY, HOLD, INIT)):
            nodepool.node_reconciler.look_at(node_id)
        freed = state == READY and new.allocated_to is None and not locked
        if freed or (old is not None and old.resources != new.resources):
            self._capacity(new)
        if old is None or old._state != state or old.allocated_to != new.allocated_to:
            self._min_ready_label(new)
            if new.allocated_to and state in (READY, FAILED, ABORTED):
                handler = nodepool.handler_of(new.allocated_to)
                if handler is not None and handler.BLOCKING:
                    handler.pw.progress(handler)

    def _node_lock_changed(self, node_id: str, locked: bool) -> None:
        nodepool = self._nodepool
        if locked or nodepool.zk is None:
            return
        node = nodepool.zk.node_tree.get(node_id)
        if node is None:
            return
        nodepool.node_reconciler.look_at(node_id)
        if node._state == READY and node.allocated_to is None:
            self._capacity(node)

    def _capacity(self, node: Node) -> None:
        """A node became free, or went: waiting requests may go on."""
        workers = self._nodepool.getPoolWorkers(node.provider or "")
        if any(worker.pool_name == node.pool for worker in workers):
            for worker in workers:
                worker.capacity_changed()
        self._nodepool.assignment.wake()

    def _min_ready_label(self, node: Node) -> None:
        config = self._nodepool.config
        if config is not None:
            for label in node._type:
                entry = config.labels.get(label)
                if entry is not None and entry.min_ready > 0:
                    self._nodepool.min_ready.wake()

    # -- requests and the rest

    def _request_changed(self, request_id: str, old: NodeRequest | None, new: NodeRequest | None) -> None:
        nodepool = self._nodepool
        nodepool.assignment.request_changed(request_id, new)
        nodepool.statistics.wake()
        if (new is not None and new._state == PENDING and nodepool.zk is not None and not nodepool.is_handled(request_id)
                and (old is None or old._state != PENDING)):
            nodepool.cleanup.lost.taken(request_id)
        if nodepool.min_ready.owns(request_id) or (new is None and old is not None and old.requestor == MIN_READY):
            nodepool.min_ready.wake()  # also when one of another launcher, that has died, is gone
        if new is None and nodepool.zk is not None:
            handler = nodepool.handler_of(request_id)
            if handler is not None:
                handler.pw.progress(handler)
            for node_id in list(nodepool.zk.node_tree.by_request.get(request_id, ())):
                nodepool.node_reconciler.look_at(node_id)

    def _component_changed(self, _path: str, gone: bool) -> None:
        self._nodepool.assignment.wake(recheck=True)
        if gone:
            self._nodepool.cleanup.wake()  # a launcher may have died: its requests are ours to go on with

    def _image_changed(self, _image: str) -> None:
        self._nodepool.assignment.wake(recheck=True)
        self._nodepool.min_ready.wake()

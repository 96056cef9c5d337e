"""LauncherEvents: which part of the launcher a change in ZooKeeper wakes (LAU-1).

Everything here runs on the connection's thread: it only adds keys and sets events, and never
blocks.
"""

from __future__ import annotations

from collections import deque

from kazoo.protocol.states import KazooState

from nodepool import metrics
from nodepool.driver.backing.records import backing_data, decode_driver_data
from nodepool.launcher.cleanup import CleanupWorker
from nodepool.launcher.nodes.probes import NodeProbes
from nodepool.launcher.nodes.reconciler import DELETABLE, NodeReconciler
from nodepool.launcher.requests.assignment import Assignment
from nodepool.launcher.requests.minready import MinReady
from nodepool.launcher.state import LauncherState
from nodepool.launcher.statistics import StatsWorker
from nodepool.launcher.verification import Verification
from nodepool.reasons import Code
from nodepool.status.usage import measured_of
from nodepool.zk.drains import Drain
from nodepool.zk.mirror.feed import KILLED, Event, Feed
from nodepool.zk.mirror.requests import MIN_READY, VERIFIER
from nodepool.zk.records import ABORTED, FAILED, HOLD, INIT, PENDING, READY, Node, NodeRequest
from nodepool.zk.zookeeper import ZooKeeper

#: Classes of the highest use of memory.
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)
#: Ended nodes that are remembered until their use is known.
RECENT = 200


class LauncherEvents:
    """Listens to the mirror and the connection.

    Before :attr:`LauncherState.zk` is set, only work that needs no mirror is done.
    """

    def __init__(
        self,
        state: LauncherState,
        assignment: Assignment,
        nodes: NodeReconciler,
        probes: NodeProbes,
        min_ready: MinReady,
        cleanup: CleanupWorker,
        statistics: StatsWorker,
        feed: Feed,
        verification: Verification,
    ) -> None:
        self._state = state
        self._assignment = assignment
        self._nodes = nodes
        self._probes = probes
        self._min_ready = min_ready
        self._cleanup = cleanup
        self._statistics = statistics
        self._feed = feed
        self._verification = verification
        self._session_was_lost = False
        #: Version of the component tree when declines were last checked again.
        self._offers_version = -1
        #: Nodes whose use was counted, and the last nodes that were removed.
        self._counted: deque[str] = deque(maxlen=RECENT)
        self._removed: deque[Node] = deque(maxlen=RECENT)
        #: The drains in force.
        self._drains: list[Drain] = []

    def attach(self, zk: ZooKeeper) -> None:
        """Start to listen; must be called before the connection is established."""
        zk.node_tree.listeners.append(self._node_changed)
        self._feed.attach(zk)
        self._feed.subscribe(self._event_noted)
        zk.feed = self._feed
        zk.node_tree.lock_listeners.append(self._node_lock_changed)
        zk.request_tree.listeners.append(self._request_changed)
        zk.request_tree.listeners.append(self._state.declines.request_changed)
        zk.component_tree.listeners.append(self._component_changed)
        zk.image_tree.listeners.append(self._image_changed)
        zk.note_tree.listeners.append(lambda: self._notes_changed(zk))
        for tree in zk.trees:
            tree.sync_listeners.append(self._tree_synced)
        zk.client.state_listeners.append(self._state_changed)

    def _event_noted(self, event: Event) -> None:
        if event["type"] == KILLED:
            self._statistics.wake(at_once=True)
        elif event["type"] == "node-usage":
            self._count_usage(event)

    def _count_usage(self, event: Event) -> None:
        """Count what an ended node has used, once: after an error it may be reported again.

        Each launcher with its provider does, so that queries take the largest of their values.
        """
        name, zk, statsd = str(event.get("node")), self._state.zk, self._state.statsd
        if name in self._counted:
            return
        self._counted.append(name)
        node = zk.node_tree.get(name) if zk is not None else None
        node = node or next((each for each in tuple(self._removed) if each.id == name), None)
        provider = event.get("provider")
        known = node is not None and node.provider == provider
        label = node.type[0] if known and node is not None and node.type else "unknown"
        where, measured = (label, provider), measured_of(event)
        statsd.incr(metrics.NODE_CPU(*where), measured.get("cpu_usec", 0.0) / 1e6)
        statsd.incr(metrics.NODE_KILLS(*where), measured.get("oom_kills", 0))
        if (peak := measured.get("memory_peak")) and (limit := measured.get("memory_limit")):
            share = next((each for each in SHARES if peak <= each * limit), SHARES[-1])
            statsd.incr(metrics.NODE_MEMORY(*where, f"{share:g}"))

    # -- everything

    def all_synced(self) -> None:
        """Check everything, because the mirror is complete (again)."""
        self._feed.begin()
        self._state.launch_failures.flush()
        self._assignment.rebuild()
        self._assignment.wake()
        for worker in self._state.workers.values():
            worker.capacity_changed()
        self._nodes.check_all()
        self._probes.check_all()
        self._cleanup.wake()
        self._min_ready.wake()
        self._verification.wake()

    def _tree_synced(self) -> None:
        zk = self._state.zk
        if zk is not None and zk.synced:
            self.all_synced()

    def _state_changed(self, state: str) -> None:
        if state == KazooState.LOST:
            self._session_was_lost = True
            for worker in self._state.workers.values():
                worker.session_lost()
            self._statistics.session_lost()
        elif state == KazooState.CONNECTED:
            if self._session_was_lost:
                self._session_was_lost = False
                self._assignment.session_lost()
            self._cleanup.wake()

    # -- nodes

    def _node_changed(self, node_id: str, old: Node | None, new: Node | None) -> None:
        self._statistics.wake()
        if new is None:
            self._probes.node_changed(node_id, False)
            if old is not None:
                self._removed.appendleft(old)
                if (place := decode_driver_data(old.driver_data)) is not None:
                    self._probes.node_changed(place[0], True)
                self._capacity(old)
                self._min_ready_label(old)
            return
        handler = self._state.handlers.get(new.allocated_to) if new.allocated_to else None
        changed = old is None or old._state != new._state or old.allocated_to != new.allocated_to
        ended = changed and new._state in (READY, FAILED, ABORTED)
        if ended and handler is not None and handler.BLOCKING:
            handler.pw.progress(handler)
        tree = self._state.zk.node_tree if self._state.zk is not None else None
        if tree is None or not tree.synced.is_set():
            return  # all_synced follows: tens of thousands of nodes are read at a start
        state, locked = new._state, node_id in tree.contenders
        if not locked and (state in DELETABLE or state in (READY, HOLD, INIT)):
            self._nodes.check_soon(node_id)
        freed = state == READY and new.allocated_to is None and not locked
        self._probes.node_changed(node_id, freed or backing_data(new) is not None)
        if freed or (old is not None and old.resources != new.resources):
            self._capacity(new)
        elif old is not None and old.tenant and old.tenant != new.tenant:
            self._assignment.recheck(Code.TENANT_LIMIT, tenant=old.tenant)
        if changed:
            self._min_ready_label(new)

    def _node_lock_changed(self, node_id: str, locked: bool) -> None:
        if locked or self._state.zk is None:
            return
        node = self._state.zk.node_tree.get(node_id)
        if node is None:
            return
        self._nodes.check_soon(node_id)
        if node._state == READY and node.allocated_to is None:
            self._probes.check_soon(node_id)
            self._capacity(node)

    def _capacity(self, node: Node) -> None:
        """Let waiting requests continue, because a node became free or was deleted."""
        workers = self._state.getPoolWorkers(node.provider or "")
        if any(worker.pool_name == node.pool for worker in workers):
            for worker in workers:
                worker.capacity_changed()
        self._assignment.wake()

    def _min_ready_label(self, node: Node) -> None:
        config = self._state.config
        if config is not None:
            for label in node._type:
                entry = config.labels.get(label)
                if entry is not None and entry.min_ready > 0:
                    self._min_ready.wake()

    # -- requests and the rest

    def _request_changed(
        self, request_id: str, old: NodeRequest | None, new: NodeRequest | None
    ) -> None:
        self._assignment.request_changed(request_id, new)
        self._statistics.wake()
        if (
            new is not None
            and new._state == PENDING
            and self._state.zk is not None
            and (old is None or old._state != PENDING)
        ):
            self._cleanup.lost.watch_lock(request_id)
        request = new or old
        if request is not None and request.requestor == MIN_READY:
            self._min_ready.wake()  # also when an entry of a dead launcher is deleted
        if request is not None and request.requestor == VERIFIER:
            self._verification.wake()
        if new is None and self._state.zk is not None:
            handler = self._state.handlers.get(request_id)
            if handler is not None:
                handler.pw.progress(handler)
            for node_id in list(self._state.zk.node_tree.by_request.get(request_id, ())):
                self._nodes.check_soon(node_id)

    def _notes_changed(self, zk: ZooKeeper) -> None:
        self._state.launch_failures.changed(zk.note_tree)
        self._assignment.recheck(Code.LAUNCHES_FAIL)
        drains = zk.note_tree.of(Drain)
        if drains != self._drains and self._state.zk is not None:
            self._drains = drains
            self._feed.note("drain-changed", drains=[drain.name for drain in drains])
            for worker in self._state.workers.values():
                worker.refresh()
            self._assignment.wake()
            self._min_ready.wake()
            self._cleanup.drains_changed()
            self._nodes.check_all()

    def _component_changed(self, _path: str, gone: bool) -> None:
        tree = self._state.zk.component_tree if self._state.zk is not None else None
        version = tree.offers_version if tree is not None else -1
        # A pool that became full, or has capacity again, changes no reason to decline.
        self._assignment.wake(recheck=version != self._offers_version)
        self._offers_version = version
        if gone:
            self._cleanup.wake()  # a launcher may have died: its requests have to be recovered

    def _image_changed(self, _image: str) -> None:
        self._assignment.wake(recheck=True)
        self._min_ready.wake()
        self._verification.wake()

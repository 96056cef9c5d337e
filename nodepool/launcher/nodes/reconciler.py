"""Manages one node at a time: deletion, deallocation, ages (LAU-11, LAU-12.4 to LAU-12.6).

Level-triggered: a key only names the node; the reconciler reads the current record and does the one
next step.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from nodepool.base import threads
from nodepool.base.backoff import Backoff
from nodepool.base.problems import Problem
from nodepool.base.workqueue import Reconciler
from nodepool.driver.backing.records import METASTATIC
from nodepool.driver.quota.support import counts_labels
from nodepool.driver.statemachine import StateMachineProvider
from nodepool.exceptions import FOREIGN
from nodepool.launcher.state import LauncherState
from nodepool.status.results import format_duration
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.drains import shown
from nodepool.zk.locks import LockHandle, add_lock
from nodepool.zk.mirror.requests import VERIFIER
from nodepool.zk.writer import TransactionFailed, Txn

DELETABLE = frozenset(
    {zk.USED, zk.IN_USE, zk.BUILDING, zk.FAILED, zk.DELETING, zk.DELETED, zk.ABORTED}
)
#: A ready backing node whose requesting launcher has died before it could accept the node waits
#: this many seconds for another request.
BACKING_AGE = 60.0
#: An init node without a request may belong to a launch that is being written. While its launcher
#: serves the request, or lives if it is another one, the node is kept for this many seconds, and
#: checked at this interval (seconds).
INIT_AGE, INIT_LOOK = 300.0, 5.0
#: Why a ready node is deleted that nobody has requested.
UNUSED = "it has exceeded its max-ready-age"
#: Expired nodes for each one of min-ready that are a problem; in which time: a multiple of
#: max-ready-age, and least seconds; and the number of expired nodes of a label that are remembered.
ROUNDS, AGES, LEAST, MOST_EXPIRED = 3, 4, 3600.0, 10_000
#: The longest pause between two attempts to delete a node (seconds).
DELETE_PAUSE_MAX = 60.0


class NodeReconciler(Reconciler[str]):
    """The threads ``DeletedNodeWorker``."""

    log = logging.getLogger("nodepool.DeletedNodeWorker")

    def __init__(self, state: LauncherState, delete_interval: Callable[[], float]) -> None:
        super().__init__("DeletedNodeWorker", self.reconcile, self.log)
        self.state = state
        #: Label -> when (monotonic seconds) its nodes expired unused.
        self._expired: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=MOST_EXPIRED)
        )
        self._delete_interval = delete_interval
        #: When our deletion started, and its attempt number; the next attempt has to wait.
        self._attempts: dict[str, tuple[float, int]] = {}
        #: Nodes whose first deletion step is being written.
        self._marking: set[str] = set()
        #: For providers whose deletions start with a slow call.
        self._deletions = threads.shared().lane("DeletedNodeWorker", 1)

    def stop(self) -> None:
        super().stop()
        self._last_deletion = self._deletions.submit(bool)  # it starts when the others have

    def join(self, timeout: float | None = None) -> None:
        began = time.monotonic()
        super().join(timeout)
        wait([self._last_deletion], timeout and max(0.1, began + timeout - time.monotonic()))

    def check_soon(self, node_id: str) -> None:
        self.queue.add(node_id)

    def check_all(self) -> None:
        """Check every node once, with low priority, as a safety net.

        Locked nodes, and idle ones whose age is not limited, are omitted: :meth:`reconcile` has no
        step for them. There may be tens of thousands.
        """
        if self.state.config is None:
            return  # all are checked when it is loaded
        tree, drained = self.state.zk.node_tree, bool(self.state.drains.all())
        limited = {name for name, label in self.state.config.labels.items() if label.max_ready_age}
        with tree.lock:
            known = tree.idle, tree.contenders
            ids = [*tree.empty, *(i for i in tree.nodes if not any(i in each for each in known))]
            idle = list(tree.idle.items())
        ids += [
            node_id
            for node_id, node in idle
            if drained
            or not limited.isdisjoint(node.type)
            or (node.requestor or "").startswith(METASTATIC)
        ]
        self.queue.add_all(ids)

    # -- one node

    def reconcile(self, node_id: str) -> float | None:
        """Do the next step for this node; return the seconds until the next check, or None."""
        facade = self.state.zk
        if not (facade.connected and facade.synced):
            return None  # everything is checked again after the synchronization
        tree = facade.node_tree
        node = tree.get(node_id)
        if node is None:
            self._attempts.pop(node_id, None)
            if node_id in tree.empty:
                self._remove_empty(node_id)
            return None
        if tree.is_locked(node_id) or tree.is_changing(node_id):
            return None  # the unlock, or the new record, triggers the next check
        if node.provider not in self.state.config.providers:
            return None
        if node.state in DELETABLE:
            return self._delete(node)
        step = {zk.READY: self._ready, zk.HOLD: self._hold, zk.INIT: self._init}.get(
            node.state or ""
        )
        return step(node) if step is not None else None

    def _ready(self, node: zk.Node) -> float | None:
        missing = node.allocated_to is None or self._request_missing(node.allocated_to)
        if node.requestor == VERIFIER and missing:
            self.discard(node, "the verification of its image has ended")
            return None
        if node.allocated_to is not None:
            if missing:
                changed = node.copy()
                changed.allocated_to = None
                self._change(node, changed, "Unallocated ready", "its request no longer exists")
            return None
        drain = self.state.drains.of_node(node)
        if drain is not None:
            # A static machine would only be registered again; it is not assigned.
            manager = self.state.config.provider_managers.get(node.provider or "")
            if not (drain.keep_idle or manager is None or counts_labels(manager)):
                self.discard(node, shown(drain))
            return None
        limits: list[float] = [
            label.max_ready_age
            for label in map(self.state.config.labels.get, node.type)
            if label is not None and (label.max_ready_age or 0) > 0
        ]
        if (node.requestor or "").startswith(METASTATIC):
            limits.append(BACKING_AGE)
        return self._expire(node, limits, UNUSED)

    def _hold(self, node: zk.Node) -> float | None:
        limits = [
            limit
            for limit in (node.hold_expiration, self.state.config.max_hold_age)
            if limit is not None and limit > 0
        ]
        # A clock that is ahead must not end what its holder renews.
        ahead = max(0.0, self.state.server_time.ahead())
        return self._expire(
            node, [limit + ahead for limit in limits], "it has exceeded its hold time"
        )

    def _expire(self, node: zk.Node, limits: list[float], reason: str) -> float | None:
        """Delete the node if it is older than one of the limits; return the seconds until then."""
        limit = min(limits, default=math.inf)
        if limit == math.inf:
            return None
        age = self.state.clock.time() - (node.state_time or 0)
        if age < limit:
            return float(limit - age) + 0.01
        self.discard(node, reason)
        return None

    def problems(self) -> list[Problem]:
        """Return labels whose min-ready nodes expire unused and are launched again and again."""
        found, now = [], self.state.clock.monotonic()
        for name, expired in sorted(self._expired.copy().items()):
            label = self.state.config.labels.get(name)
            if label is not None and label.max_ready_age and label.min_ready:
                window = max(AGES * label.max_ready_age, LEAST)
                if (
                    count := sum(now - moment < window for moment in expired.copy())
                ) >= ROUNDS * label.min_ready:
                    # Without provider and label: requests do not wait because of it.
                    text = (
                        f"{count} ready nodes of label {name} expired unused within "
                        f"{format_duration(window)}"
                        f" (max-ready-age {format_duration(label.max_ready_age)}) and were replaced"
                    )
                    found.append(
                        Problem(
                            text,
                            help="raise `max-ready-age` of the label, or lower its `min-ready`",
                        )
                    )
        return found

    def discard(self, node: zk.Node, reason: str) -> None:
        """Mark an unlocked node for deletion, unless its record has changed since it was read."""
        changed = node.copy()
        changed.state = zk.DELETING
        self._change(node, changed, "Deleting", reason)

    def _init(self, node: zk.Node) -> float | None:
        if node.allocated_to is not None and not self._request_missing(node.allocated_to):
            return None
        age = self.state.clock.time() - (node.state_time or 0)
        if age < INIT_AGE and self._may_be_launched(node):
            # No event announces when that ends.
            return float(min(INIT_LOOK, INIT_AGE - age + 0.01))
        self.discard(node, "it was never launched and its request no longer exists")
        return None

    def _may_be_launched(self, node: zk.Node) -> bool:
        """Return whether its creator serves its request, or is another launcher that is alive."""
        if node.allocated_to is not None and node.launcher in self.state.workers:
            return node.allocated_to in self.state.handlers
        return any(pool.id == node.launcher for pool in self.state.zk.getRegisteredPools())

    def _request_missing(self, request_id: str) -> bool:
        facade = self.state.zk
        if facade.request_tree.get(request_id) is not None:
            return False
        return facade.kazoo_client.exists(paths.request(request_id)) is None

    def _change(self, seen: zk.Node, changed: zk.Node, what: str, reason: str) -> None:
        """Write a record and its reason, if the node is neither locked nor changed."""

        def written(error: BaseException | None) -> None:
            if error is None:
                self.announce(what, seen, reason)
                for label in seen.type if reason == UNUSED else ():
                    self._expired[label].append(self.state.clock.monotonic())
            elif not isinstance(
                error, TransactionFailed
            ):  # it has changed, and that change triggers the next check
                self.log.warning("Cannot write node %s: %r", seen.id, error)

        self.state.zk.change_unlocked(seen, changed, written)

    def announce(self, what: str, node: zk.Node, reason: str) -> None:
        """Log what was done with a node, and add it to the history."""
        self.log.info("%s node %s: %s", what, node.id, reason)
        if (feed := self.state.zk.feed) is not None:
            feed.note(
                "node-reconciled",
                node=node.id,
                provider=node.provider,
                pool=node.pool,
                what=what,
                reason=reason,
            )

    def _remove_empty(self, node_id: str) -> None:
        """Delete a znode without data, left by a client that locked a deleted node."""
        facade = self.state.zk
        txn = Txn(facade.kazoo_client)
        if node_id in facade.node_tree.lock_dirs:
            txn.delete(paths.node_lock(node_id))
        txn.delete(paths.node(node_id), 0)

        def removed(_results: list[Any] | None, error: BaseException | None) -> None:
            if error is None:
                self.log.info("Removed empty node %s", node_id)

        facade.writer.submit(txn, removed)

    # -- deletion

    def _delete(self, node: zk.Node) -> float | None:
        node_id = node.id or ""
        began, tries = self._attempts.get(node_id, (0.0, 0))
        interval = self._delete_interval()
        # The pause doubles with each attempt, so that repeated failures cost little.
        left = (
            began
            + Backoff(interval, max(interval, DELETE_PAUSE_MAX)).pause(tries)
            - self.state.clock.monotonic()
        )
        if tries and left > 0:
            return float(left) + 0.01
        manager = self.state.config.provider_managers.get(node.provider or "")
        if node.state != zk.DELETED and manager is None:
            return 5.0
        if node_id in self._marking:
            return None
        self._marking.add(node_id)
        facade = self.state.zk
        changed = node.copy()
        if node.state not in (zk.DELETED, zk.DELETING):  # state_time contains the start
            changed.state = zk.DELETING
        txn = Txn(facade.kazoo_client)
        lock = add_lock(txn, paths.node_lock(node_id), node_id in facade.node_tree.lock_dirs)
        index = txn.set(
            paths.node(node_id),
            changed.serialize(),
            node.version,
            tree=facade.node_tree,
            record=changed.copy(),
        )

        def locked(results: list[Any] | None, error: BaseException | None) -> None:
            self._marking.discard(node_id)
            if error is not None or results is None:
                if isinstance(error, TransactionFailed):
                    self.check_soon(
                        node_id
                    )  # the record has changed, or another launcher was faster
                return
            self._attempts[node_id] = self.state.clock.monotonic(), tries + 1
            path = str(results[lock])
            changed.lock = LockHandle(path.rsplit("/", 1)[0], path, None)
            changed.stat = results[index]
            present = self.state.config.provider_managers.get(changed.provider or "")
            if isinstance(present, StateMachineProvider) and changed.state == zk.DELETING:
                self._begin(changed)  # only queues it
            else:
                self._deletions.submit(self._begin, changed)

        facade.writer.submit(txn, locked)
        return None

    def _begin(self, node: zk.Node) -> None:
        """Let the provider delete a node that is locked and marked."""
        manager = self.state.config.provider_managers.get(node.provider or "")
        try:
            if node.state == zk.DELETED:
                self.state.zk.deleteNode(node)
                return
            if manager is None:
                raise RuntimeError(f"provider {node.provider} is not running")
            self.log.info(
                "Deleting node %s (%s) of provider %s", node.id, node.external_id, node.provider
            )
            manager.startNodeCleanup(node)
        except FOREIGN:
            self.log.exception("Cannot delete node %s:", node.id)
            self.state.zk.unlock_soon(node)

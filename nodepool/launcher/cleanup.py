"""Periodic clean-up, also after crashes (LAU-12); tasks are isolated from each other."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError, NotEmptyError
from kazoo.protocol.states import WatchedEvent

from nodepool.base import threads
from nodepool.exceptions import FOREIGN
from nodepool.launcher.nodes import ready_check
from nodepool.launcher.nodes.reconciler import NodeReconciler
from nodepool.launcher.state import LauncherState
from nodepool.version import get_version_string
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import add_unlocked_check
from nodepool.zk.mirror import notes
from nodepool.zk.sold_out import SoldOutOffers
from nodepool.zk.writer import TransactionFailed, Txn

#: Seconds after which the lock directory of a deleted request is removed (or after
#: ``LOCK_CLEANUP``, if that is less).
GONE_FOR = 600.0


class LostRequests:
    """Resets pending requests that are not locked to ``requested``, and frees their nodes.

    This is how work of a dead launcher is continued. A request that is still locked is checked
    again when its lock is released, and only this request: other launchers have thousands, and end
    many each second.
    """

    log = logging.getLogger("nodepool.CleanupWorker")

    def __init__(self, state: LauncherState, recheck_now: Callable[[], Any]) -> None:
        self.state = state
        self._recheck = recheck_now
        self._lock = threading.Lock()
        #: Requests whose lock has changed.
        self._changed: set[str] = set()

    def run(self, everything: bool) -> None:
        """Recycle pending requests without a lock.

        :param everything: check all, not only those whose lock has changed.
        """
        facade = self.state.zk
        with self._lock:
            changed, self._changed = self._changed, set()
        with facade.request_tree.lock:
            pending = facade.request_tree.pending
            candidates = [
                i
                for i in (pending if everything else pending & changed)
                if i not in self.state.handlers
            ]
        if not candidates:
            return
        kazoo = facade.kazoo_client
        answers = [
            (i, kazoo.get_children_async(paths.request_lock(i), watch=self._lock_changed))
            for i in sorted(candidates)
        ]
        for request_id, answer in answers:
            exists = True
            try:
                contenders = [
                    n for n in answer.get(timeout=30) if paths.contender_number(n) is not None
                ]
            except NoNodeError:
                contenders, exists = [], False
            if not contenders:
                self._recycle(request_id, exists)

    def watch_lock(self, request_id: str) -> None:
        """Watch the lock of a request that another launcher processes now, if necessary.

        A launcher of 11.0.0 may release it unchanged.
        """
        ours = get_version_string()
        if any(
            pool.content.get("version") != ours
            for pool in self.state.zk.component_tree.registered_pools()
        ):
            self.check_soon(request_id)

    def check_soon(self, request_id: str) -> None:
        """Check soon whether this request is pending without a lock, then watch its lock."""
        with self._lock:
            self._changed.add(request_id)
        self._recheck()

    def _lock_changed(self, event: WatchedEvent) -> None:
        if event.path is None:  # the session has ended: all are checked in the next session
            return
        self.check_soon(event.path.rpartition("/")[2])

    def _recycle(
        self,
        request_id: str,
        directory_exists: bool,
        corrected: dict[str, BaseException] | None = None,
    ) -> None:
        """Reset a lost request and free its nodes.

        :param corrected: lock directories of nodes that differ from our mirror, with the error that
            showed it.
        """
        facade, corrected = self.state.zk, corrected or {}
        seen = facade.request_tree.get(request_id)
        if seen is None or seen.state != zk.PENDING:
            return
        request = seen.copy()
        request.state = zk.REQUESTED
        request.nodes = []
        txn = Txn(facade.kazoo_client)
        add_unlocked_check(txn, paths.request_lock(request_id), directory_exists)
        txn.set(
            paths.request(request_id),
            request.serialize(),
            seen.version,
            tree=facade.request_tree,
            record=request.copy(),
        )
        directories: set[str] = set()
        for node_id in sorted(facade.node_tree.by_request.get(request_id, ())):
            node = facade.node_tree.get(node_id)
            directory = paths.node_lock(node_id)
            told = corrected.get(directory)
            if (
                node is None
                or facade.node_tree.is_locked(node_id)
                or isinstance(told, NotEmptyError)
            ):
                continue  # it is locked; its holder will release it
            changed = node.copy()
            if changed.state == zk.INIT:
                changed.state = zk.DELETING
            elif changed.state == zk.READY:
                changed.allocated_to = None
            else:
                continue
            add_unlocked_check(
                txn,
                directory,
                isinstance(told, NodeExistsError)
                if told
                else node_id in facade.node_tree.lock_dirs,
            )
            directories.add(directory)
            txn.set(
                paths.node(node_id),
                changed.serialize(),
                node.version,
                tree=facade.node_tree,
                record=changed.copy(),
            )

        def written(_results: list[Any] | None, error: BaseException | None) -> None:
            if error is None:
                self.log.info("Resetting lost request %s", request_id)
            elif not isinstance(error, TransactionFailed):
                self.log.warning("Cannot reset lost request %s: %r", request_id, error)
            elif error.path in directories and (
                error.path not in corrected or isinstance(error.cause, NotEmptyError)
            ):
                self._recycle(request_id, directory_exists, {**corrected, error.path: error.cause})

        facade.writer.submit(txn, written)


class CleanupWorker(threading.Thread):
    """Runs all tasks every ``interval()`` seconds, and lost requests after each unlock."""

    log = logging.getLogger("nodepool.CleanupWorker")

    def __init__(
        self,
        state: LauncherState,
        nodes: NodeReconciler,
        interval: Callable[[], float],
        lock_cleanup: Callable[[], float],
    ) -> None:
        super().__init__(name="CleanupWorker", daemon=True)
        self.state = state
        self.nodes = nodes
        self._interval = interval
        self._lock_cleanup = lock_cleanup
        self._event = threading.Event()
        self._stopping = False
        #: Check all pending requests, not only those whose lock has changed.
        self._everything = True
        self.lost = LostRequests(state, self._event.set)
        #: Deleted requests that still have a lock directory: when we noticed.
        self._gone_requests: dict[str, float] = {}
        self._last_full = 0.0
        #: The last tasks of each provider; a slow cloud delays no other.
        self._of_providers: dict[str, Future[None]] = {}

    def wake(self) -> None:
        """Search for lost requests soon, among all."""
        self._everything = True
        self._event.set()

    def drains_changed(self) -> None:
        """Recompute when the next drain ends."""
        self._event.set()

    def stop(self) -> None:
        self._stopping = True
        self._event.set()

    def run(self) -> None:
        self._last_full = self.state.clock.monotonic()
        while not self._stopping:
            left = self._last_full + self._interval() - self.state.clock.monotonic()
            drains = self.state.drains
            woken = self._event.wait(max(0.0, min(left, drains.left())))
            self._event.clear()
            if self._stopping:
                break
            facade = self.state.zk
            if not (facade.connected and facade.synced and self.state.config is not None):
                self._event.wait(0.2)
                continue
            if facade.cluster.due:  # preferably before any node is created on this connection
                self._task("the history of the tree", self.state.note_cluster)
            ended = drains.left() <= 0.0
            if ended:
                self._task("drains", drains.end)
            due = (
                not (woken or ended)
                or self.state.clock.monotonic() - self._last_full >= self._interval()
            )
            everything = due
            if self._everything:  # setting it again wakes this thread again
                self._everything, everything = False, True
            self._task("lost requests", functools.partial(self.lost.run, everything))
            if not due:
                continue
            self._last_full = self.state.clock.monotonic()
            self._task("request locks", self._sweep_request_locks)
            self._task("records of failed launches", self.state.launch_failures.expire)
            self._task("records of sold-out offers", self._expire_sold_out)
            self._task("ready nodes", self._check_ready_nodes)
            self._task("leaked resources", self._leaks)
            self._task("all nodes", self.nodes.check_all)

    def _task(self, what: str, function: Callable[[], Any]) -> None:
        try:
            function()
        except KazooException as error:
            self.log.warning("Cleaning up %s: %r", what, error)
        except FOREIGN:
            self.log.exception("Error cleaning up %s:", what)

    def _expire_sold_out(self) -> None:
        """Delete records without an offer that is sold out, also those of removed providers."""
        facade, now = self.state.zk, self.state.clock.time()
        for record, version in list(facade.note_tree.notes.values()):
            if isinstance(record, SoldOutOffers) and not record.left(now):
                txn = Txn(facade.kazoo_client)
                txn.delete(notes.path(record), version)
                facade.writer.submit(txn)

    def _sweep_request_locks(self) -> None:
        """Remove lock directories of requests deleted a while ago, unless clients contend."""
        facade, requests, now = (
            self.state.zk,
            self.state.zk.request_tree,
            self.state.clock.monotonic(),
        )
        known = self._gone_requests
        self._gone_requests = {
            i: known.get(i, now) for i in facade.getNodeRequestLockIDs() if requests.get(i) is None
        }
        patience = min(GONE_FOR, self._lock_cleanup())
        # Never when first seen: our mirror may still be reading a request that another launcher has
        # just locked.
        due = [
            i for i, since in self._gone_requests.items() if i in known and now - since >= patience
        ]
        for request_id, answer in [
            (i, facade.kazoo_client.delete_async(paths.request_lock(i))) for i in due
        ]:
            try:
                answer.get(timeout=30)
            except NoNodeError:
                pass
            except NotEmptyError:
                names = facade.kazoo_client.get_children(paths.request_lock(request_id))
                if not any(paths.contender_number(name) is not None for name in names):
                    facade.deleteNodeRequestLock(request_id)

    def _check_ready_nodes(self) -> None:
        for name, check in ready_check.checks(self.state, self.nodes):
            self._start("ready", name, check)

    def _leaks(self) -> None:
        for name, manager in list(self.state.config.provider_managers.items()):
            if not self._start("leaks", name, manager.cleanupLeakedResources):
                self.log.warning("The search for leaks of provider %s is still running", name)

    def _start(self, what: str, provider: str, function: Callable[[], Any]) -> bool:
        """Start a task of a provider; return False if its last one still runs."""
        name = f"Thread-{what}-{provider}"
        last = self._of_providers.get(name)
        if last is not None and not last.done():
            return False
        self._of_providers[name] = (
            threads.shared().lane(name, 1).submit(self._task, f"provider {provider}", function)
        )
        return True

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        wait(list(self._of_providers.values()), timeout)

"""Keeping min-ready nodes of each label (LAU-14).

Several launchers together keep exactly the number: before one of them adds requests it creates a
short-lived mark under the elections path, so that each sees the latest requests of the others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from concurrent.futures import Executor, Future, wait

from kazoo.exceptions import KazooException

from nodepool.base import threads
from nodepool.base.backoff import Backoff, KeyedBackoff
from nodepool.config.model import ConfigPool, Label, ProviderConfig, disk_image
from nodepool.exceptions import FOREIGN
from nodepool.launcher.state import LauncherState
from nodepool.zk import paths
from nodepool.zk.locks import add_unlocked_check
from nodepool.zk.locks.turn import TurnLock
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import FAILED, FULFILLED, READY, REQUESTED, NodeRequest
from nodepool.zk.writer import TransactionFailed, Txn

PRIORITY = "900"
#: Of a label whose requests failed.
RETRY = Backoff(1.0, 30.0)
#: Seconds between two checks without any event.
RESYNC = 30.0
#: Seconds until a label that no pool can serve, or whose check failed, is checked again.
LOOK_AGAIN = 5.0
#: Requests at a time, of all labels: a server records the end of a session, with all it owns, in
#: one message.
MOST = 2000


class MinReady(threading.Thread):
    """Creates the requests and follows them; woken by events."""

    log = logging.getLogger("nodepool.MinReady")

    def __init__(self, state: LauncherState) -> None:
        super().__init__(name="PoolWorker-min-ready", daemon=True)
        self.state = state
        self._event = threading.Event()
        self._stopping = False
        self._failed = KeyedBackoff(RETRY)
        #: Clouds are asked whether they can create a label on separate threads, one for each
        #: provider.
        self._lanes: dict[str, Executor] = {}
        #: The questions by label, provider and pool, until the answer has been used.
        self._asked: dict[tuple[str, str, ConfigPool], Future[bool]] = {}
        #: The last log message per label or pool.
        self._logged: dict[str, str] = {}

    def wake(self) -> None:
        self._event.set()

    def stop(self) -> None:
        self._stopping = True
        self._event.set()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        for question in self._asked.values():
            question.cancel()
        wait(self._asked.values(), timeout)

    def owns(self, request: NodeRequest) -> bool:
        """Return whether our session has created this request for min-ready."""
        return request.requestor == MIN_READY and self.state.zk.request_tree.is_own(request)

    def run(self) -> None:
        while not self._stopping:
            seconds = RESYNC
            try:
                seconds = self._pass()
            except (KazooException, TimeoutError) as error:
                self.log.warning("Cannot keep min-ready nodes now: %r", error)
                seconds = 1.0
            except Exception:
                self.log.exception("Error keeping min-ready nodes:")
                seconds = 5.0
            self._event.wait(seconds)
            self._event.clear()

    def _pass(self) -> float:
        zk = self.state.zk
        if not (zk.connected and zk.synced and self.state.config is not None):
            return RESYNC
        self._follow()
        seconds = RESYNC
        for label in list(self.state.config.labels.values()):
            try:
                seconds = min(seconds, self._keep(label))
                self._logged.pop(label.name, None)
            except (KazooException, TimeoutError):
                raise  # the connection: it affects all
            except Exception as error:
                self._log_once(
                    label.name, f"Cannot keep min-ready nodes of label {label.name}:", error
                )
                seconds = min(seconds, LOOK_AGAIN)
        self._asked = {
            key: question for key, question in self._asked.items() if not question.done()
        }  # others are outdated
        return seconds

    def _keep(self, label: Label) -> float:
        """Request the missing nodes of one label; return the seconds until the next check."""
        if label.min_ready <= 0:
            return RESYNC
        if self._need(label) <= 0:
            return 0.1 if self._arriving(label) else RESYNC
        if left := self._failed.wait(label.name):
            return left
        if not self._servable(label):
            return LOOK_AGAIN
        return RESYNC if self._create(label) else 0.2

    def _log_once(self, key: str, message: str, error: BaseException) -> None:
        if self._logged.get(key) != repr(error):
            self._logged[key] = repr(error)
            self.log.error("%s", message, exc_info=error)

    def _need(self, label: Label) -> int:
        zk = self.state.zk
        with zk.request_tree.lock:
            # The node of a fulfilled one is still allocated and therefore does not count as ready.
            wanted = (
                zk.request_tree.min_ready_open[label.name]
                + zk.request_tree.min_ready_done[label.name]
            )
        missing = (
            int(label.min_ready)
            - int(zk.node_tree.counted.free[label.name])
            - int(wanted)
            - self._arriving(label)
            + self.state.drains.idle(label)
        )
        return min(missing, max(1, MOST // len(self.state.config.labels)) - int(wanted))

    def _arriving(self, label: Label) -> int:
        """Return the number of nodes of min-ready requests that are about to become free.

        A launcher frees the node and deletes its request in one transaction: we see the deletion
        immediately, the free node only once it has been read. After the death of a launcher, its
        requests are deleted before their nodes are freed.
        """
        zk = self.state.zk
        tree = zk.node_tree
        if not tree.min_ready:
            return 0
        providers = {
            pool.provider_name for pool in zk.getRegisteredPools()
        }  # nobody frees nodes of others
        with tree.lock:
            found = [tree.nodes[i] for i in tree.min_ready if i in tree.nodes]
            return sum(
                1
                for node in found
                if label.name in node.type
                and zk.request_tree.get(node.allocated_to) is None
                and (
                    (node.state == READY and node.provider in providers) or tree.is_locked(node.id)
                )
            )

    def _servable(self, label: Label) -> bool:
        """Return whether some pool of ours could serve it, regardless of quota."""
        for pool in label.pools:
            name = pool.provider.name if pool.provider is not None else None
            key = f"{label.name} of {name}"
            try:
                if self._pool_can_serve(label, pool, pool.provider):
                    self._logged.pop(key, None)
                    return True
            except KazooException:
                raise
            except FOREIGN as error:  # another pool may serve it
                self._log_once(
                    key,
                    f"Cannot check whether provider {name} can serve label {label.name}:",
                    error,
                )
        return False

    def _pool_can_serve(
        self, label: Label, pool: ConfigPool, provider: ProviderConfig | None
    ) -> bool:
        manager = (
            self.state.config.provider_managers.get(provider.name) if provider is not None else None
        )
        if provider is None or manager is None:
            return False
        if self.state.drains.of_pool(pool, [label.name]) is not None:
            return False
        if self.state.launch_failures.blocked(provider, [label.name]) is not None:
            return False
        if not provider.manage_images:
            return True
        pool_label = pool.labels[label.name] if isinstance(pool.labels, dict) else None
        image = disk_image(pool_label)
        if image is not None:
            return (
                self.state.zk.getMostRecentImageUpload(image.name or "", provider.name, cached=True)
                is not None
            )
        key = label.name, provider.name, pool
        question = self._asked.get(key)
        if question is None:
            lane = self._lanes.setdefault(
                provider.name, threads.shared().lane(f"PoolWorker-min-ready-{provider.name}", 1)
            )
            question = self._asked[key] = lane.submit(manager.labelReady, pool_label or label.name)
            question.add_done_callback(lambda _question: self._event.set())
        if not question.done():
            return False
        del self._asked[key]
        return bool(question.result())

    def _create(self, label: Label) -> bool:
        """Request the missing nodes; return False if another launcher is doing so."""
        zk = self.state.zk
        kazoo = zk.kazoo_client
        mark = TurnLock(kazoo, self.state.identifier, "min-ready", label.name)
        if not mark.take():
            return False
        with contextlib.ExitStack() as unless_deleted:
            unless_deleted.callback(mark.drop)
            mark.catch_up(zk.request_tree)
            need = self._need(label)
            if need <= 0:
                return True
            txn = Txn(kazoo)
            for _ in range(need):
                request = NodeRequest()
                request.state = REQUESTED
                request.requestor = MIN_READY
                request.node_types = [label.name]
                request.reuse = False
                request.event_id = uuid.uuid4().hex
                txn.create(
                    f"{paths.REQUESTS}/{PRIORITY}-",
                    request.serialize(),
                    ephemeral=True,
                    sequence=True,
                    tree=zk.request_tree,
                    record=request,
                )
            txn.delete(mark.path)
            zk.writer.run(txn)
            self.log.info("Creating %s min-ready requests for label %s", need, label.name)
            unless_deleted.pop_all()
            return True

    def _follow(self) -> None:
        """Process our requests: free nodes of fulfilled ones, retry failed ones later."""
        zk = self.state.zk
        with zk.request_tree.lock:
            requests = [zk.request_tree.requests[i] for i in sorted(zk.request_tree.min_ready)]
        for request in filter(self.owns, requests):
            label = request.node_types[0] if request.node_types else ""
            if request.state == FULFILLED:
                self._failed.succeeded(label)
                self._finish(request)
            elif request.state == FAILED:
                self._failed.failed(label)
                self.log.info(
                    "Min-ready request %s for %s failed; next attempt in %.0f s",
                    request.id,
                    label,
                    self._failed.wait(label),
                )
                zk.deleteNodeRequest(request)

    def _finish(self, request: NodeRequest) -> None:
        zk = self.state.zk
        txn = Txn(zk.kazoo_client)
        for node_id in request.nodes:
            seen = zk.node_tree.get(node_id)
            if seen is None or seen.allocated_to != request.id:
                continue
            node = seen.copy()
            node.allocated_to = None
            add_unlocked_check(txn, paths.node_lock(node_id), node_id in zk.node_tree.lock_dirs)
            txn.set(
                paths.node(node_id),
                node.serialize(),
                seen.version,
                tree=zk.node_tree,
                record=node.copy(),
            )
        txn.delete(paths.request(request.id or ""))
        try:
            zk.writer.run(txn)
        except TransactionFailed:
            zk.deleteNodeRequest(request)  # the node is freed when its request is deleted

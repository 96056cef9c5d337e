"""NodeRequestHandler: takes one request from acceptance to its end (driver-api.md section 5, launcher.md 5 - 7).

All steps of one handler run one after the other (``pw.post``), never two at once; ZooKeeper is written
asynchronously, and the answer comes back as the next step.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import (
    ConnectionClosedError,
    ConnectionLoss,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    SessionExpiredError,
)

from nodepool.driver.provider import NodeRequestHandlerNotifications
from nodepool.driver.steps import LabelRecorder, Step, read_results
from nodepool.logconfig import get_annotated_logger
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import LockHandle, add_lock
from nodepool.zk.requests import MIN_READY
from nodepool.zk.writer import TransactionFailed, Txn

#: What says nothing about the request.
CONNECTION_ERRORS = (ConnectionLoss, ConnectionClosedError, OperationTimeoutError, SessionExpiredError)
#: How often a refused first transaction is tried again at once before the request goes back to the queue.
CONFLICT_RETRIES = 3


class NodeRequestHandler(NodeRequestHandlerNotifications, abc.ABC):
    """Base of the request handlers of all drivers."""

    #: Whether the driver's checks may block; they then run on helper threads, not on the pool's own.
    BLOCKING = True

    def __init__(self, pw: Any, request: zk.NodeRequest) -> None:
        self.pw = pw
        self.request = request
        self.nodeset: list[zk.Node] = []
        self.done = False
        self.paused = False
        self.launcher_id: str = pw.launcher_id
        self._satisfied_types = LabelRecorder()
        self._failed_nodes: list[zk.Node] = []
        self._ready_nodes: list[zk.Node] = []
        self.log: Any = get_annotated_logger(
            logging.getLogger(f"nodepool.driver.NodeRequestHandler[{self.launcher_id}]"),
            event_id=request.event_id, node_request_id=request.id)
        self.provider: Any = None
        self.pool: Any = None
        self.zk: Any = None
        self.manager: Any = None
        #: Which quota is short by how much, in words; while paused.
        self.shortage: str | None = None
        # Our own books.
        self._busy = False  # a transaction is under way
        self._finishing = False
        self._declined = False  # to be handed back
        self._request_free = False  # handed back; only waits for launches that are under way
        self._conflicts = 0
        self._lock_directory_exists = False
        self._poll_later = False

    # -- for drivers

    @property
    @abc.abstractmethod
    def alive_thread_count(self) -> int:
        """How many launches are under way."""

    @abc.abstractmethod
    def imagesAvailable(self) -> bool:
        """Whether the images of the request's labels are there."""

    @abc.abstractmethod
    def launch(self, node: zk.Node) -> None:
        """Start producing the (stored, locked, BUILDING) node; must not block."""

    @abc.abstractmethod
    def launchesComplete(self) -> bool:
        """Whether every node of ``nodeset`` has reached an end."""

    def hasProviderQuota(self, node_types: list[str]) -> bool:
        """Whether the empty provider could ever hold these nodes."""
        return True

    def hasRemainingQuota(self, ntype: str) -> bool:
        """Whether there is room for one more node of this label now."""
        return True

    def checkReusableNode(self, node: zk.Node) -> bool:
        """Whether the ready node may be used for this request; it is not locked yet."""
        return True

    def setNodeMetadata(self, node: zk.Node) -> None:
        """Fill driver data before the node is first stored."""
        return

    def prepareNode(self, node: zk.Node) -> None:
        """Fill more before the node is stored as BUILDING (a hook of ours, not of 11.0.0)."""
        return

    def launchesDropped(self) -> None:
        """The locks of all nodes are gone: launches under way must end without a result (a hook of ours)."""
        return

    # -- facts

    @property
    def failed_nodes(self) -> list[zk.Node]:
        return self._failed_nodes

    @property
    def ready_nodes(self) -> list[zk.Node]:
        return self._ready_nodes

    @property
    def accepted(self) -> bool:
        """Whether we hold the lock of the request."""
        return isinstance(self.request.lock, LockHandle)

    def _refresh(self) -> None:
        self.provider = self.pw.getProviderConfig()
        self.pool = self.pw.getPoolConfig()
        self.zk = self.pw.getZK()
        self.manager = self.pw.getProviderManager()
        if self.provider is None or self.pool is None or self.manager is None:
            raise RuntimeError(f"provider {self.pw.provider_name} or its pool {self.pw.pool_name} is gone")

    def getDeclinedReasons(self) -> list[str]:
        """Why this pool can never serve the request; the first reason found, or nothing."""
        if self.provider is None:
            self._refresh()
        if self.pool.max_servers <= 0:
            return ["pool is disabled by max_servers"]
        offered = set(self.pool.labels) - set(self.manager.errorLabels())
        missing = sorted(set(self.request.node_types) - offered)
        if missing:
            return [f"node type(s) [{','.join(missing)}] not available"]
        if not self.imagesAvailable():
            return ["images are not available"]
        if not self.hasProviderQuota(self.request.node_types):
            return ["it would exceed quota"]
        # What the labels need has been asked now; the driver may have found one that can never work.
        broken = sorted(set(self.request.node_types) & set(self.manager.errorLabels()))
        return [f"node type(s) [{','.join(broken)}] cannot work"] if broken else []

    # -- filling the node set

    def run(self) -> None:
        """Accept the request, or go on with a paused one."""
        if self.done or self._busy or self._finishing or self._declined:
            return
        try:
            self._refresh()
            reasons = self.getDeclinedReasons()
            if reasons:
                self.log.info("Declining node request because: %s", ", ".join(reasons))
                self.declineRequest()
            else:
                self._fill()
        except Exception as error:
            self.trouble(error)

    def trouble(self, error: Exception) -> None:
        """A step has failed: decline, unless only ZooKeeper was out of reach."""
        if isinstance(error, CONNECTION_ERRORS):
            self.log.warning("ZooKeeper failed while working on the request: %r", error)
            self._drop()
            return
        self.log.error("Declining node request due to exception in NodeRequestHandler:", exc_info=error)
        self.declineRequest()

    def _missing_labels(self) -> list[str]:
        missing = list(self.request.node_types)
        for label in self._satisfied_types.labels():
            if label in missing:
                missing.remove(label)
        return missing

    def _fill(self) -> None:
        step = Step()
        try:
            for label in self._missing_labels():
                node = self._find_reusable(label) if self.request.reuse else None
                if node is not None:
                    step.reused.append((label, node))
                    continue
                node = self._new_node(label)
                if node is None:
                    step.short = label
                    break
                step.created.append((label, node))
        except Exception:
            self._forget(step)
            raise
        if step.short is not None and not self._may_wait():
            self._forget(step)
            if self.request.requestor == MIN_READY:
                self.log.info("Declining min-ready request: no quota for %s", step.short)
                self.declineRequest()
            else:
                self._give_back()
            return
        if step.short is not None:
            # At once: the pool takes nothing more from now on, not only when this has been written.
            if not self.paused:
                self.log.info("Pausing request handling: not enough quota for %s%s", step.short,
                              f" ({self.shortage})" if self.shortage else "")
            self._set_paused(True)
        if step.empty and self.accepted:
            self._after_step(step)
        else:
            self._commit(step)

    def _may_wait(self) -> bool:
        return self.request.requestor != MIN_READY and bool(self.manager.PAUSE_AT_QUOTA)

    def _find_reusable(self, label: str) -> zk.Node | None:
        tree = self.zk.node_tree
        for node_id in tree.iter_free(self.provider.name, self.pool.name, label):
            if not self.pw.claim(node_id):
                continue
            taken = False
            try:
                candidate = tree.get(node_id)
                if (candidate is not None and candidate.state == zk.READY and candidate.allocated_to is None
                        and not tree.is_locked(node_id) and self.checkReusableNode(candidate)):
                    taken = True
                    self._noteReuse(candidate)
                    return candidate.copy()  # type: ignore[no-any-return]
            finally:
                if not taken:
                    self.pw.unclaim(node_id)
        return None

    def _noteReuse(self, node: zk.Node) -> None:
        """A node was chosen; further choices may depend on it."""

    def _new_node(self, label: str) -> zk.Node | None:
        with getattr(self.manager, "quota_lock", None) or contextlib.nullcontext():
            if not self.hasRemainingQuota(label):
                return None
            node = zk.Node()
            node.state = zk.INIT
            node.created_time = node.state_time
            node.type = [label]
            node.provider = self.provider.name
            node.pool = self.pool.name
            node.launcher = self.launcher_id
            node.allocated_to = self.request.id
            node.tenant_name = self.request.tenant_name
            node.requestor = self.request.requestor
            node.attributes = self.pool.node_attributes
            self.setNodeMetadata(node)
            self.zk.reservations.reserve(
                id(node), node.provider, node.pool, None, self._needs(label, node))
            return node

    def _needs(self, label: str, node: zk.Node) -> dict[str, Any]:
        if node.resources:
            return node.resources
        needed = getattr(self.manager, "quotaNeededByLabel", None)
        return needed(label, self.pool).get_resources() if needed is not None else {"instances": 1}

    def _forget(self, step: Step) -> None:
        """Nothing of this step was or will be written."""
        for _label, node in step.reused:
            self.pw.unclaim(node.id)
        for _label, node in step.created:
            self.zk.reservations.release(id(node))

    # -- writing a step

    def _commit(self, step: Step) -> None:
        txn = Txn(self.zk.kazoo_client)
        step.fused = (not self.accepted and step.short is None and not step.created
                      and type(self).nodeReusedNotification is NodeRequestHandlerNotifications.nodeReusedNotification)
        self._add_request(txn, step)
        for _label, node in step.reused:
            node.allocated_to = self.request.id
            node.tenant_name = self.request.tenant_name
            node.requestor = self.request.requestor
            version = node.stat.version if node.stat else -1
            directory = paths.node_lock(node.id or "")
            known = node.id in self.zk.node_tree.lock_dirs
            if not step.fused:
                step.lock_index[id(node)] = add_lock(txn, directory, known)
            elif known:
                txn.delete(directory)  # refused when anybody contends
            step.set_index[id(node)] = txn.set(
                paths.node(node.id or ""), node.serialize(), version, tree=self.zk.node_tree, record=node.copy())
        for _label, node in step.created:
            step.set_index[id(node)] = txn.create(
                f"{paths.NODES}/", node.serialize(), sequence=True, tree=self.zk.node_tree, record=node.copy())
        self._submit(txn, self._committed, step)

    def _add_request(self, txn: Txn, step: Step) -> None:
        request = self.request
        if self.accepted:
            txn.check(request.lock.path)
            return
        directory = paths.request_lock(request.id or "")
        version = request.stat.version if request.stat else -1
        changed = request.copy()
        if step.fused:
            # Nobody may hold the lock at this moment; nobody can take it in between.
            if not self._lock_directory_exists:
                txn.create(directory)
            txn.delete(directory)
            changed.nodes = self._ordered_ids([(label, node.id or "") for label, node in step.reused])
            changed.state = zk.FULFILLED
        else:
            step.request_lock_index = add_lock(txn, directory, self._lock_directory_exists)
            changed.state = zk.PENDING
        step.request_record = changed
        step.request_index = txn.set(
            paths.request(request.id or ""), changed.serialize(), version, tree=self.zk.request_tree,
            record=changed.copy())

    def _submit(self, txn: Txn, then: Callable[..., None], *args: Any) -> None:
        """Send a transaction; ``then(*args, results, error)`` is the next step of this handler."""
        self._busy = True

        def answered(results: list[Any] | None, error: BaseException | None) -> None:
            self.pw.post(self, self._answered, then, args, results, error)

        self.zk.writer.submit(txn, answered)

    def _answered(self, then: Callable[..., None], args: tuple[Any, ...], results: list[Any] | None,
                  error: BaseException | None) -> None:
        self._busy = False
        if self.done and results is not None:
            # Dropped meanwhile: what was obtained is given back, the rest is found again from ZooKeeper.
            for result in results:
                if isinstance(result, str) and "__lock__" in result:
                    self.zk.kazoo_client.abandoned.add(result)
            results, error = None, SessionExpiredError()
        try:
            then(*args, results, error)
        except Exception as error:
            self.trouble(error)
        if self._poll_later and not self._busy:
            self._poll_later = False
            self.poll()

    def _committed(self, step: Step, results: list[Any] | None, error: BaseException | None) -> None:
        self._forget(step)
        if error is not None or results is None:
            self._refused(step, error)
            return
        self._conflicts = 0
        read_results(step, results, self.request)
        for label, node in step.reused:
            node.lock = step.handle(node, results, paths.node_lock(node.id or ""))
            self.nodeset.append(node)
            self._satisfied_types.add(label, node.id)
            self.log.debug("Reusing ready node %s for %s", node.id, label)
        missing = self._missing_labels()
        for label, _node in step.created:
            missing.remove(label)
        self.pw.recorded(self, missing)
        if step.fused:
            self._ready_nodes = list(self.nodeset)
            self.log.info("Fulfilled node request with ready nodes %s", ",".join(self.request.nodes))
            self._finish()
            return
        for _label, node in step.reused:
            self.nodeReusedNotification(node)
        if step.created:
            self._lock_created(step)
        else:
            self._after_step(step)

    def _refused(self, step: Step, error: BaseException | None) -> None:
        """A step was not written: look at the present state again."""
        if not isinstance(error, TransactionFailed):
            self.log.warning("ZooKeeper failed while working on the request: %r", error)
            self._drop()
            return
        gone = paths.request(self.request.id or "")
        lock_directory = paths.request_lock(self.request.id or "")
        if self.accepted:
            if error.path == self.request.lock.path:
                self._drop()  # our lock is gone, and so is our right to write
                return
        else:
            if isinstance(error.cause, NoNodeError) and error.path == gone:
                self._finish()
                return
            if error.path == lock_directory:
                if isinstance(error.cause, NotEmptyError):
                    self._give_back(retry_after=0.05)  # Zuul has its short turn
                    return
                self._lock_directory_exists = isinstance(error.cause, NodeExistsError)
            present = self.zk.request_tree.get(self.request.id)
            if present is None or present.state != zk.REQUESTED or self.launcher_id in present.declined_by:
                self._give_back()
                return
            self.request = present.copy()
        self._conflicts += 1
        self.log.debug("Conflict at %s (%r), trying again", error.path, error.cause)
        if self._conflicts > CONFLICT_RETRIES and not self.accepted:
            self._give_back(retry_after=0.05)
        else:
            self.pw.post(self, self.run)

    def _lock_created(self, step: Step) -> None:
        txn = Txn(self.zk.kazoo_client)
        # A launcher that stood still for long may have lost the request, and others its nodes, to another one.
        txn.check(self.request.lock.path)
        for _label, node in step.created:
            node.state = zk.BUILDING
            self.prepareNode(node)
            step.lock_index[id(node)] = add_lock(txn, paths.node_lock(node.id or ""), False)
            step.set_index[id(node)] = txn.set(
                paths.node(node.id or ""), node.serialize(), 0, tree=self.zk.node_tree, record=node.copy())
        self._submit(txn, self._created, step)

    def _created(self, step: Step, results: list[Any] | None, error: BaseException | None) -> None:
        if error is not None or results is None:
            self.log.warning("Cannot lock new nodes %s: %r", [n.id for _, n in step.created], error)
            self._drop()
            return
        for label, node in step.created:
            node.lock = step.handle(node, results, paths.node_lock(node.id or ""))
            node.stat = results[step.set_index[id(node)]]
            self.nodeset.append(node)
            self._satisfied_types.add(label, node.id)
        for _label, node in step.created:
            self.launch(node)
        self._after_step(step)

    def _after_step(self, step: Step) -> None:
        if step.short is not None:
            self.pw.make_room(self)
        else:
            self._set_paused(False)
        self.poll()

    def _set_paused(self, paused: bool) -> None:
        if self.paused != paused:
            self.paused = paused
            self.pw.pause_changed(self)

    # -- ends

    def poll(self) -> bool:
        """Look whether the nodes are complete and finish the request; True when it is done."""
        if self.done:
            return True
        if self._busy or self._finishing:
            self._poll_later = True
            return False
        if self._declined:
            return self._poll_declined()
        requests = self.zk.request_tree
        gone = self.accepted and requests.get(self.request.id) is None and requests.synced.is_set()
        if self.paused and not gone:
            self._save_ready()
            return False
        if not self.launchesComplete():
            if gone and self.paused:
                self._set_paused(False)
            return False
        if not self.accepted:
            return False
        self._sort_nodes()
        if gone:
            self.log.info("Node request was removed by its owner; releasing its nodes")
            self._release(None)
        elif self._failed_nodes:
            self.log.info("Declining node request because nodes failed: %s", [n.id for n in self._failed_nodes])
            self.declineRequest()
        elif len(self._ready_nodes) < len(self.request.node_types):
            # Aborted for quota: go on when there is some.
            self._set_paused(True)
            self.pw.post(self, self.pw.retry_later, self)
        else:
            self._fulfil()
        return self.done

    def _save_ready(self) -> None:
        """The end of the request is not near: show (and keep over a crash) the nodes that are ready."""
        for node in self.nodeset:
            if node.state != zk.READY or not node.unsaved or not isinstance(node.lock, LockHandle):
                continue
            node.unsaved = False
            txn = Txn(self.zk.kazoo_client)
            txn.check(node.lock.path)
            txn.set(paths.node(node.id or ""), node.serialize(), tree=self.zk.node_tree, record=node.copy())

            def written(_results: list[Any] | None, error: BaseException | None, node: zk.Node = node) -> None:
                if error is not None:
                    node.unsaved = True  # written together with the request

            self.zk.writer.submit(txn, written)

    def _sort_nodes(self) -> None:
        self._failed_nodes, self._ready_nodes = [], []
        aborted = []
        for node in self.nodeset:
            if node.state == zk.READY:
                self._ready_nodes.append(node)
            elif node.state == zk.ABORTED:
                aborted.append(node)
            else:
                self._failed_nodes.append(node)
        for node in aborted:
            self.nodeset.remove(node)
            self._satisfied_types.removeNode(node.id)
            self._unlock_one(node)

    def _unlock_one(self, node: zk.Node) -> None:
        handle, node.lock = node.lock, None
        if isinstance(handle, LockHandle):
            txn = Txn(self.zk.kazoo_client)
            txn.delete(handle.path)
            self.zk.writer.submit(txn)

    def _ordered_ids(self, have: list[tuple[str, str]]) -> list[str]:
        """Node ids in the order of the requested labels."""
        have = list(have)
        result = []
        for label in self.request.node_types:
            index = next(i for i, (other, _) in enumerate(have) if other == label)
            result.append(have.pop(index)[1])
        return result

    def _fulfil(self) -> None:
        self._finishing = True
        self.request.nodes = self._ordered_ids(
            [(entry["label"], entry["node_id"]) for entry in self._satisfied_types.data])
        self.request.state = zk.FULFILLED
        txn = Txn(self.zk.kazoo_client)
        for node in self.nodeset:
            self._add_unlock(txn, node, write=node.unsaved)
        index = self._add_request_end(txn)
        self._submit(txn, self._fulfilled, index)

    def _add_unlock(self, txn: Txn, node: zk.Node, write: bool) -> None:
        if write:
            txn.set(paths.node(node.id or ""), node.serialize(), tree=self.zk.node_tree, record=node.copy())
        if isinstance(node.lock, LockHandle):
            txn.delete(node.lock.path)

    def _add_request_end(self, txn: Txn) -> int:
        """Write the request, then give up its lock."""
        request = self.request
        index = txn.set(paths.request(request.id or ""), request.serialize(),
                        request.stat.version if request.stat else -1, tree=self.zk.request_tree, record=request.copy())
        if self.accepted:
            txn.delete(request.lock.path)
        return index

    def _fulfilled(self, _index: int, _results: list[Any] | None, error: BaseException | None) -> None:
        self._finishing = False
        if error is None:
            self.log.info("Fulfilled node request with nodes %s", ",".join(self.request.nodes))
            self._finish()
            return
        self.request.nodes = []
        if isinstance(error, TransactionFailed) and error.path == paths.request(self.request.id or ""):
            if isinstance(error.cause, NoNodeError):
                self.log.info("Node request was removed by its owner; releasing its nodes")
                self._release(None)
                return
            self._reread_request()
            self.poll()
            return
        self.log.warning("Cannot write the result of the request: %r", error)
        self._drop()

    def _reread_request(self) -> None:
        """Somebody wrote the request although we hold its lock: keep what is theirs."""
        present = self.zk.getNodeRequest(self.request.id)
        if present is not None:
            present.lock = self.request.lock
            self.request = present
            self.request.state = zk.PENDING

    def declineRequest(self) -> None:
        """Say that this pool cannot serve it; FAILED when every registered pool has said so."""
        if self.done or self._declined:
            return
        if self.zk is None:
            self.zk = self.pw.getZK()
        self._declined = True
        if self._busy:
            self._poll_later = True
        else:
            self._write_decline()

    def _write_decline(self) -> None:
        self._set_paused(False)
        request = self.request
        if self.launcher_id not in request.declined_by:
            request.declined_by = [*request.declined_by, self.launcher_id]
        # Those of ours that are only being registered count, too.
        pools = {pool.id for pool in self.zk.getRegisteredPools()} | self.pw.nodepool.workers_by_id().keys()
        if pools <= set(request.declined_by):
            self.log.info("Failing declined node request: every pool has declined it")
            request.state = zk.FAILED
        else:
            request.state = zk.REQUESTED
        self._release(request)

    def _poll_declined(self) -> bool:
        if not self._request_free:
            self._write_decline()
        elif self.nodeset and self.launchesComplete():
            self._sort_nodes()
            self._release(None)
        return self.done

    def _give_back(self, retry_after: float | None = None) -> None:
        """Leave the request to the queue, as if we had never looked at it."""
        self._set_paused(False)
        if self.accepted:
            self._declined = True
            self.request.state = zk.REQUESTED
            self.request.nodes = []
            self._release(self.request)
            return
        self.done = True
        self.pw.finished(self, retry_after=retry_after if retry_after is not None else 0.0)

    def _release(self, request: zk.NodeRequest | None) -> None:
        """Free the nodes that have reached an end; write and unlock the request when one is given."""
        txn = Txn(self.zk.kazoo_client)
        free = [n for n in self.nodeset if n.state not in (zk.BUILDING, zk.INIT)]
        for node in free:
            write = node.state == zk.READY
            if write:
                node.allocated_to = None
            self._add_unlock(txn, node, write)
        if request is not None:
            if not self.accepted:
                directory = paths.request_lock(request.id or "")
                if not self._lock_directory_exists:
                    txn.create(directory)
                txn.delete(directory)
            self._add_request_end(txn)
        elif self.accepted:
            txn.delete(self.request.lock.path)
        if not txn.operations:
            self._released(free, None, None)
            return
        self._submit(txn, self._released, free)

    def _released(self, free: list[zk.Node], _results: list[Any] | None, error: BaseException | None) -> None:
        if error is not None:
            self._release_refused(error)
            return
        for node in free:
            node.lock = None
            if node in self.nodeset:
                self.nodeset.remove(node)
        self.request.lock = None
        if self.nodeset:
            # Launches under way: their nodes are freed when they end.
            self._declined = self._request_free = True
            self.pw.request_released(self)
            self.poll()
        else:
            self._finish()

    def _release_refused(self, error: BaseException) -> None:
        self._conflicts += 1
        request_path = paths.request(self.request.id or "")
        if not isinstance(error, TransactionFailed) or self._conflicts > 10:
            self.log.warning("Cannot release the request: %r", error)
            self._drop()
        elif error.path == paths.request_lock(self.request.id or ""):
            if isinstance(error.cause, NotEmptyError):
                self._declined = False
                self._give_back(retry_after=0.05)
            else:
                self._lock_directory_exists = isinstance(error.cause, NodeExistsError)
                self._write_decline()
        elif error.path == request_path and isinstance(error.cause, NoNodeError):
            self._release(None)  # the owner removed it
        elif error.path == request_path:
            if self.accepted:
                self._reread_request()
                self._write_decline()
            else:
                self._declined = False
                self._give_back()
        else:
            self.log.warning("Cannot release the nodes of the request: %r", error)
            self._drop()

    def unlockNodeSet(self, clear_allocation: bool = False) -> None:
        """Unlock every node we hold; errors are logged."""
        for node in self.nodeset:
            if not isinstance(node.lock, LockHandle):
                continue
            try:
                if clear_allocation:
                    node.allocated_to = None
                    self.zk.storeNode(node)
                self.zk.unlockNode(node)
            except Exception:
                self.log.exception("Error unlocking node %s:", node.id)
        self.nodeset = []

    def hand_back(self) -> None:
        """The pool goes away: return the request to the queue and free its nodes."""
        if self.done or self._declined or self._finishing:
            return
        if self._busy:
            self.pw.post(self, self.hand_back)
            return
        self._give_back()

    def _drop(self) -> None:
        """We may not write any more (lost session, lost lock): leave everything to the clean-up."""
        if self.done:
            return
        self.log.warning("Dropping the request; it is picked up again from ZooKeeper")
        self._set_paused(False)
        abandoned = self.zk.kazoo_client.abandoned if self.zk is not None else None
        records: list[Any] = [*self.nodeset, self.request]
        for record in records:
            handle, record.lock = record.lock, None
            if abandoned is not None and isinstance(handle, LockHandle):
                abandoned.add(handle.path)  # the session may live on
        self.launchesDropped()
        self._finish()

    drop = _drop

    def _finish(self) -> None:
        self._set_paused(False)
        self.done = True
        self.pw.finished(self)

"""Handler of one request from acceptance to its end (DRV-5, LAU-5 to LAU-7).

The steps of one handler run sequentially (``pw.post``); ZooKeeper is written
asynchronously, and the answer arrives as the next step.  This module fills the node set; how a request ends is
in ``ends``, what drivers see and implement in ``base``, the allowed events in ``state``.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError, NotEmptyError

from nodepool.driver.provider import NodeRequestHandlerNotifications
from nodepool.driver.quota.support import QuotaSupport
from nodepool.driver.request.ends import RequestEnds
from nodepool.driver.request.state import Event, How, Outcome, State
from nodepool.driver.request.step import Step, read_results
from nodepool.exceptions import FOREIGN
from nodepool.reasons import Code, because
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import add_lock, add_unlocked_check
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.writer import TransactionFailed, Txn

#: How often a refused first transaction is retried immediately before the request returns to the queue.
CONFLICT_RETRIES = 3


class NodeRequestHandler(RequestEnds):
    """Base of the request handlers of all drivers."""

    # -- filling the node set

    def run(self) -> None:
        """Accept the request, or continue with a paused one."""
        if not self._admits(Event.RUN):
            return
        try:
            self._refresh()
            if reasons := self.decline_reasons():
                self.decline_for(reasons)
            else:
                self._fill()
        except FOREIGN as error:
            self.trouble(error)

    def _fill(self) -> None:
        step = Step()
        # It counts recorded nodes: the next one is checked when this one has been recorded, and in one request at a time.
        serial = not self.RESERVES and type(self).hasRemainingQuota is not NodeRequestHandler.hasRemainingQuota
        try:
            for label in self._missing_labels():
                node = self._find_reusable(label) if self.request.reuse else None
                if node is not None:
                    step.reused.append((label, node))
                    continue
                if serial and step.created:
                    step.more = True
                    break
                if serial and not self.pw.begin_creation(self):
                    self._forget(step)
                    return  # run() is called when it is our turn
                if serial and not self.accepted and self.pw.paused:
                    # Another handler of the pool has paused while this one waited for its turn.
                    self._forget(step)
                    self.end(Outcome(How.WITHDRAWN, wait_for=self.pw.paused_reason(), checked=True))
                    return
                node = self._new_node(label)
                if node is None:
                    step.short = label
                    break
                step.created.append((label, node))
            if not step.created:
                self.pw.end_creation(self)
            self._write(step)
        except Exception:  # also of a record that JSON does not know: nothing was sent
            self._forget(step)
            self.pw.end_creation(self)
            raise

    def _write(self, step: Step) -> None:
        if step.short is not None and not self._may_wait():
            self._forget(step)
            if self.request.requestor == MIN_READY:
                self.log.info("Declining min-ready request: no quota for %s", step.short)
                self.declined_because = [self.shortage or because(Code.NO_ROOM, labels=step.short)]
                self.declineRequest()
            else:
                self._give_back()
            return
        if step.short is not None and self.gives_way and not self.accepted:
            self._forget(step)
            reason = self.shortage or because(Code.NO_ROOM, labels=step.short)
            self.pw.note_full([step.short], reason)
            self._give_back(reason=reason)
            return
        if step.short is not None:
            # Immediately: the pool accepts nothing more from now on, not only when this has been written.
            if not self.paused:
                self.log.info(
                    "Pausing request handling: not enough quota for %s%s",
                    step.short,
                    f" ({self.shortage})" if self.shortage else "",
                )
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
            if node_id in self._held or not self.pw.claim(node_id):
                continue
            taken = False
            try:
                candidate = tree.get(node_id)
                if (
                    candidate is not None
                    and candidate.state == zk.READY
                    and candidate.allocated_to is None
                    and self.checkReusableNode(candidate)
                ):
                    self._noteReuse(candidate)
                    taken = True
                    return candidate.copy()
            finally:
                if not taken:
                    self.pw.unclaim(node_id)
        return None

    def _noteReuse(self, node: zk.Node) -> None:
        """Record the choice of a node; further choices may depend on it."""

    def _new_node(self, label: str) -> zk.Node | None:
        with self.manager.quota_lock if isinstance(self.manager, QuotaSupport) else contextlib.nullcontext():
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
            self.zk.reservations.reserve(id(node), node.provider, node.pool, None, self._needs(label, node))
            return node

    def _needs(self, label: str, node: zk.Node) -> dict[str, Any]:
        if node.resources:
            return node.resources
        return (
            self.manager.quotaNeededByLabel(label, self.pool).get_resources()
            if isinstance(self.manager, QuotaSupport)
            else {"instances": 1}
        )

    def could_serve(self) -> bool:
        """Return whether there is capacity for all nodes of the request now; nothing is reserved.

        A driver that only counts recorded nodes cannot check several nodes.
        """
        self._refresh()
        if self.decline_reasons():
            return False
        wanted = Counter(self.request.node_types)
        if self.request.reuse:
            for label in wanted:
                free = itertools.islice(self.zk.node_tree.iter_free(self.provider.name, self.pool.name, label), wanted[label])
                wanted[label] -= sum(1 for _ in free)
        missing = list(wanted.elements())
        return not missing or self._hasRoomFor(missing)

    def _hasRoomFor(self, labels: list[str]) -> bool:
        """Return whether new nodes of these labels fit, all together."""
        return len(labels) == 1 and self.hasRemainingQuota(labels[0])

    def _forget(self, step: Step) -> None:
        """Drop a step of which nothing was or will be written."""
        for _label, node in step.reused:
            self.pw.unclaim(node.id)
        for _label, node in step.created:
            self.zk.reservations.release(id(node))

    # -- writing a step

    def _commit(self, step: Step) -> None:
        txn = Txn(self.zk.kazoo_client)
        step.fused = (
            not self.accepted
            and step.short is None
            and not step.created
            and type(self).nodeReusedNotification is NodeRequestHandlerNotifications.nodeReusedNotification
        )
        self._add_request(txn, step)
        for _label, node in step.reused:
            node.allocated_to = self.request.id
            node.tenant_name = self.request.tenant_name
            node.requestor = self.request.requestor
            version = node.version
            directory = paths.node_lock(node.id or "")
            exists = self._lock_directories.get(directory, node.id in self.zk.node_tree.lock_dirs)
            if step.fused:
                add_unlocked_check(txn, directory, exists)
            else:
                step.lock_index[id(node)] = add_lock(txn, directory, exists)
            step.set_index[id(node)] = txn.set(
                paths.node(node.id or ""), node.serialize(), version, tree=self.zk.node_tree, record=node.copy()
            )
        for _label, node in step.created:
            record = node.copy()
            record.promise = id(node)
            step.set_index[id(node)] = txn.create(
                f"{paths.NODES}/", node.serialize(), sequence=True, tree=self.zk.node_tree, record=record
            )
        self._submit(State.WRITING, txn, self._committed, step)

    def _add_request(self, txn: Txn, step: Step) -> None:
        request = self.request
        if self.accepted:
            txn.check(request.lock.path)
            return
        directory = paths.request_lock(request.id or "")
        version = request.version
        changed = request.copy()
        if step.fused:
            # The lock has to be free now; it cannot be acquired in between.
            add_unlocked_check(txn, directory, self._lock_directory_exists)
            changed.nodes = self._ordered_ids([(label, node.id or "") for label, node in step.reused])
            changed.state = zk.FULFILLED
        else:
            step.request_lock_index = add_lock(txn, directory, self._lock_directory_exists)
            changed.state = zk.PENDING
        step.request_record = changed
        step.request_index = txn.set(
            paths.request(request.id or ""), changed.serialize(), version, tree=self.zk.request_tree, record=changed.copy()
        )

    def _committed(self, step: Step, results: list[Any] | None, error: BaseException | None) -> None:
        self._forget(step)
        if error is not None or not step.more:
            self.pw.end_creation(self)
        if error is not None or results is None:
            if step.created:
                self.pw.promise_released()  # others may have been turned away because of it
            self._refused(step, error)
            return
        self._conflicts = 0
        if self.accepted_time is None:
            self.accepted_time = time.time()
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
            self.pw.driver_works(self.request)
            self.end(Outcome(How.FULFILLED))
            return
        for _label, node in step.reused:
            self.nodeReusedNotification(node)
        if step.created:
            self._lock_created(step)
        else:
            self._after_step(step)

    def _refused(self, step: Step, error: BaseException | None) -> None:
        """Handle a step that was not written: check the current state again."""
        if not isinstance(error, TransactionFailed):
            self.log.warning("ZooKeeper failed while working on the request: %r", error)
            self.drop()
            return
        gone = paths.request(self.request.id or "")
        lock_directory = paths.request_lock(self.request.id or "")
        if self.accepted:
            if error.path == self.request.lock.path:
                self.drop()  # without our lock we may not write
                return
        else:
            if isinstance(error.cause, NoNodeError) and error.path == gone:
                self.end(Outcome(How.REMOVED))
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
        for _label, node in step.reused:
            if error.path == paths.node_lock(node.id or ""):
                # The mirror may know of it only later; a node that is locked is skipped.
                self._lock_directories[error.path] = not isinstance(error.cause, NoNodeError)
                if isinstance(error.cause, NotEmptyError):
                    self._held.add(node.id)
        self._conflicts += 1
        self.log.debug("Conflict at %s (%r), trying again", error.path, error.cause)
        if self._conflicts > CONFLICT_RETRIES and not self.accepted:
            self._give_back(retry_after=0.05)
        else:
            self.pw.post(self, self.run)

    def _lock_created(self, step: Step) -> None:
        txn = Txn(self.zk.kazoo_client)
        # A launcher that was suspended for long may have lost the request, and others their nodes, to another one.
        txn.check(self.request.lock.path)
        for _label, node in step.created:
            node.state = zk.BUILDING
            self.prepareNode(node)
            step.lock_index[id(node)] = add_lock(txn, paths.node_lock(node.id or ""), False)
            step.set_index[id(node)] = txn.set(
                paths.node(node.id or ""), node.serialize(), 0, tree=self.zk.node_tree, record=node.copy()
            )
        self._submit(State.WRITING, txn, self._created, step)

    def _created(self, step: Step, results: list[Any] | None, error: BaseException | None) -> None:
        if error is not None or results is None:
            self.log.warning("Cannot lock new nodes %s: %r", [n.id for _, n in step.created], error)
            self.drop()
            return
        for label, node in step.created:
            node.lock = step.handle(node, results, paths.node_lock(node.id or ""))
            node.stat = results[step.set_index[id(node)]]
            self.nodeset.append(node)
            self._satisfied_types.add(label, node.id)
        self._launch_all([node for _label, node in step.created])
        self._after_step(step)

    def _launch_all(self, nodes: list[zk.Node]) -> None:
        """Launch all nodes; if the driver cannot launch one, decline without trying the rest."""
        for index, node in enumerate(nodes):
            try:
                self.launch(node)
            except Exception:
                self.log.exception("Cannot launch node %s:", node.id)
                for failed in nodes[index:]:
                    failed.state = zk.FAILED
                return

    def _after_step(self, step: Step) -> None:
        if step.short is not None:
            self.pw.make_room(self)
        else:
            self._set_paused(False)
        if step.more:
            self.pw.post(self, self.run)
        else:
            self._to(State.WAITING if self.paused else State.LAUNCHING)
            self.poll()

"""Life of one request: fill, accept, launch, fulfill, leave (DRV-5, LAU-5 to LAU-7).

It begins in :meth:`Life.serve`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError

from nodepool.base.problems import REMEDIES, may_be_bug
from nodepool.driver.quota.support import LimitsPending, QuotaSupport
from nodepool.driver.request.base import RequestHandler
from nodepool.driver.request.engine import CONNECTION_ERRORS, DROPPED, Engine, Steps
from nodepool.driver.request.state import End, Event, How, LabelRecorder, Outcome, State
from nodepool.driver.request.writes import Step, add_request_end, add_unlock, set_node
from nodepool.exceptions import FOREIGN
from nodepool.reasons import Code, Declined, because
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import LockHandle, add_unlocked_check
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import RecordError
from nodepool.zk.writer import TransactionFailed, Txn

#: How often a refused first transaction is retried immediately before the request returns to the
#: queue.
CONFLICT_RETRIES = 3
#: How often the end of a request is written again after a refusal.
END_RETRIES = 10
#: Seconds after which a request is tried again that another client has locked for a moment.
SHORT_TURN = 0.05
#: Seconds after which a request is tried again that ZooKeeper does not let us write, for example
#: because of an ACL.
NOT_ALLOWED = 5.0
#: Other clients have written or locked something at the same time.
CONFLICTS = (BadVersionError, NodeExistsError, NoNodeError, NotEmptyError)


class Life(Engine):
    """Serves one request; the answer of ZooKeeper to a transaction is its next step."""

    def __init__(self, handler: RequestHandler, labels: LabelRecorder) -> None:
        self.labels = labels
        self.gives_way = self.promised = self.released = False
        self._conflicts = 0
        #: Lock directories of which ZooKeeper has reported whether they exist.
        self._known: dict[str, bool] = {}
        #: Ready nodes that are locked, according to ZooKeeper.
        self._held: set[str | None] = set()
        super().__init__(handler)

    def begin(self, check_only: bool, gives_way: bool) -> None:
        """Handle the first event; see :class:`~nodepool.driver.request.base.Events`."""
        self.gives_way = gives_way
        if check_only:
            self.happen(Event.CHECK)
        else:
            self.handler.run()  # drivers may override it

    def serve(self) -> Steps[None]:
        """Serve the request: get its nodes, until it is fulfilled or left to others."""
        problem: BaseException | None = None
        try:
            while True:
                problem = yield from self._handle_event(problem)
        except End as end:
            outcome = yield from self._finish(end)
        self.end(outcome)
        if outcome.wait_for is not None and outcome.wait_for.code is Code.LIMITS_UNKNOWN:
            self._wait_for_limits()

    def _handle_event(self, problem: BaseException | None) -> Steps[BaseException | None]:
        """Wait for an event and handle it.

        Return the error of a check that is repeated, for the caller of that event.
        """
        event = None
        try:
            try:
                event = yield problem
                filled = event is Event.POLL or (yield from self._accept_and_launch(event))
            except LimitsPending as pending:
                filled = self._limits_pending(pending)
            if filled:
                yield from self._fulfill()
        except End:
            raise
        except FOREIGN as error:
            if event is Event.POLL:
                return error
            raise self._trouble(error) from error
        return None

    def _accept_and_launch(self, event: Event) -> Steps[bool]:
        """Accept the request, choose nodes for its missing labels, and launch the new ones.

        Return False if this continues with the next RUN.
        """
        handler, host = self.handler, self.handler.pw
        handler.refresh()
        self.promised = self.promised or (not handler.accepted and host.capacity.promise(handler))
        if reasons := handler.decline_reasons():
            raise handler.declined(reasons)
        # In its first step only: later the pool may be paused for this request itself.
        if event is Event.CHECK or (self.state is State.OFFERED and host.capacity.blocks(handler)):
            raise End(Outcome(How.WITHDRAWN, checked=True))
        step = Step(handler, self.labels)
        try:
            if not self._fill(step):
                return False
            if step.short is not None:
                self._wait_for_room(step.short)
            txn = (
                step.accepting(self._known)
                if step.reused or step.created or not handler.accepted
                else None
            )
        except FOREIGN:  # also of a record that JSON does not know: nothing was sent
            step.forget()
            host.capacity.end_creation(handler)
            raise
        if txn is not None and not (yield from self._accept(step, txn)):
            return False
        if step.created:
            yield from self._launch(step)
        if step.short is not None:
            if handler.manager.PAUSE_AT_QUOTA and not handler.homeless:
                handler.zk.make_room(host.provider_name, host.pool_name)  # by deleting an idle node
        else:
            self.pause(False)
        if step.more:
            host.post(handler, handler.run)
            return False
        self.to(State.WAITING if handler.paused else State.LAUNCHING)
        return True

    # -- fill

    def _fill(self, step: Step) -> bool:
        """Choose nodes for the missing labels; return False if the next RUN is to do it."""
        handler, host = self.handler, self.handler.pw
        # It counts recorded nodes: the next one is checked when this one has been recorded, and in
        # one request at a time.
        serial = handler.counts_records
        for label in self.labels.missing(handler.request.node_types):
            if handler.request.reuse and step.reuse(label, self._held):
                continue
            if serial and step.created:
                step.more = True
                break
            if serial and not host.capacity.begin_creation(handler):
                step.forget()
                return False  # run() is called when it is our turn
            if serial and not handler.accepted and host.capacity.blocks(handler):
                # Another handler of the pool has paused while this one waited for its turn.
                raise End(Outcome(How.WITHDRAWN, checked=True))
            if not step.create(label):
                step.short = label
                break
        if not step.created:
            host.capacity.end_creation(handler)
            return True
        labels, failures = [label for label, _ in step.created], host.nodepool.launch_failures
        step.trials = failures.trials(handler.provider, labels)
        failing = failures.blocked(handler.provider, labels, handler.request.id)
        if failing is not None:  # since the request was offered, or while it was paused
            step.forget()
            host.capacity.promise_released()
            raise End(Outcome(How.RETURNED, wait_for=failing[1]))
        return True

    def _wait_for_room(self, short: str) -> None:
        """Pause until there is capacity for the label, unless the request has to go back."""
        handler = self.handler
        reason = handler.shortage or because(Code.NO_ROOM, labels=short)
        if handler.request.requestor == MIN_READY:
            handler.log.info("Declining min-ready request: no quota for %s", short)
            raise End(Outcome(How.DECLINED), [reason])
        if not handler.manager.PAUSE_AT_QUOTA:
            raise End(Outcome(How.RETURNED))
        if self.gives_way and not handler.accepted:
            handler.pw.capacity.note_full([short], reason)
            raise End(Outcome(How.RETURNED, wait_for=reason))
        # Immediately: the pool accepts nothing more from now on, not only when this has been
        # written.
        if not handler.paused:
            handler.log.info(
                "Pausing request handling: not enough quota for %s%s",
                short,
                f" ({handler.shortage})" if handler.shortage else "",
            )
        self.pause(True)

    # -- accept

    def _accept(self, step: Step, txn: Txn) -> Steps[bool]:
        """Accept the request with the nodes of the step; return False to choose again."""
        handler, host = self.handler, self.handler.pw
        results, error = yield from self.write(State.WRITING, txn)
        step.forget()
        if results is None or not step.more:
            host.capacity.end_creation(handler)
        if results is None:
            if step.created:
                host.capacity.promise_released()  # others may have been turned away because of it
            self._refused(step, error)
            host.post(handler, handler.run)
            return False
        self._conflicts = 0
        handler.accepted_time = handler.accepted_time or time.time()
        step.accepted(results)
        missing = self.labels.missing(handler.request.node_types)
        for label, _node in step.created:
            missing.remove(label)
        host.capacity.recorded(handler, missing)
        if step.fused:
            handler.ready_nodes[:] = handler.nodeset
            handler.log.info(
                "Fulfilled node request with ready nodes %s", ",".join(handler.request.nodes)
            )
            raise End(Outcome(How.FULFILLED))
        for _label, node in step.reused:
            handler.nodeReusedNotification(node)
        return True

    def _refused(self, step: Step, error: BaseException | None) -> None:
        """Read the current state after a refusal; raise End unless the step is to be tried
        again.
        """
        handler, request = self.handler, self.handler.request
        if not isinstance(error, TransactionFailed):
            handler.log.warning("ZooKeeper failed while working on the request: %r", error)
            raise End(DROPPED)
        if not isinstance(error.cause, CONFLICTS):
            handler.log.warning(
                "Cannot write %s: %r; next attempt in %g s", error.path, error.cause, NOT_ALLOWED
            )
            raise End(Outcome(How.RETURNED, NOT_ALLOWED))
        if not handler.accepted:
            self._refused_request(error)
        elif error.path == request.lock.path:
            raise End(DROPPED)  # without our lock we may not write
        for _label, node in step.reused:
            if error.path == paths.node_lock(node.id or ""):
                # The mirror may know of it only later; a node that is locked is skipped.
                self._known[error.path] = not isinstance(error.cause, NoNodeError)
                if isinstance(error.cause, NotEmptyError):
                    self._held.add(node.id)
        self._conflicts += 1
        handler.log.debug("Conflict at %s (%r), trying again", error.path, error.cause)
        if self._conflicts > CONFLICT_RETRIES and not handler.accepted:
            raise End(Outcome(How.RETURNED, SHORT_TURN))

    def _refused_request(self, error: TransactionFailed) -> None:
        handler, request = self.handler, self.handler.request
        if isinstance(error.cause, NoNodeError) and error.path == paths.request(request.id or ""):
            raise End(Outcome(How.REMOVED))
        if error.path == paths.request_lock(request.id or ""):
            if isinstance(error.cause, NotEmptyError):
                raise End(Outcome(How.RETURNED, SHORT_TURN))  # Zuul has its short turn
            self._known[error.path] = isinstance(error.cause, NodeExistsError)
        present = handler.zk.request_tree.get(request.id)
        if (
            present is None
            or present.state != zk.REQUESTED
            or handler.launcher_id in present.declined_by
        ):
            raise End(Outcome(How.RETURNED))
        handler.request = present.copy()

    # -- launch

    def _launch(self, step: Step) -> Steps[None]:
        """Lock the new nodes and launch them, up to the first that the driver cannot launch."""
        handler = self.handler
        results, error = yield from self.write(State.WRITING, step.launching())
        nodes = [node for _label, node in step.created]
        if results is None:
            handler.log.warning("Cannot lock new nodes %s: %r", [node.id for node in nodes], error)
            raise End(DROPPED)
        step.locked(results)
        for index, node in enumerate(nodes):
            try:
                handler.launch(node)
            except Exception:
                handler.log.exception("Cannot launch node %s:", node.id)
                for failed in nodes[index:]:
                    failed.state = zk.FAILED
                return

    # -- fulfill

    def _fulfill(self) -> Steps[None]:
        """Write the request as fulfilled if its nodes are complete."""
        handler, requests = self.handler, self.handler.zk.request_tree
        while True:
            gone = requests.get(handler.request.id) is None and requests.synced.is_set()
            if handler.paused and not gone:
                self._save_launched()
                return
            if not handler.launchesComplete():
                if gone and handler.paused:
                    self.pause(False)
                return
            self._sort_nodes()
            if gone:
                raise self._removed()
            if handler.failed_nodes:
                raise self._launch_failed()
            if len(handler.ready_nodes) < len(handler.request.node_types):
                # Aborted for quota: the pool retries periodically until there is some.
                self.pause(True)
                return
            yield from self._write_nodes()

    def _write_nodes(self) -> Steps[None]:
        """Write the request as fulfilled; return if another client has written it meanwhile."""
        handler, request = self.handler, self.handler.request
        request.nodes = self.labels.ordered(request.node_types)
        request.state = zk.FULFILLED
        txn = Txn(handler.zk.kazoo_client)
        for node in handler.nodeset:
            add_unlock(txn, handler.zk, node, write=node.unsaved)
        add_request_end(txn, handler.zk, request)
        _results, error = yield from self.write(State.FULFILLING, txn)
        if error is None:
            handler.log.info("Fulfilled node request with nodes %s", ",".join(request.nodes))
            raise End(Outcome(How.FULFILLED))
        request.nodes = []
        if not isinstance(error, TransactionFailed) or error.path != paths.request(
            request.id or ""
        ):
            handler.log.warning("Cannot write the result of the request: %r", error)
            raise End(DROPPED)
        if isinstance(error.cause, NoNodeError):
            raise self._removed()
        self._reread_request()

    def _save_launched(self) -> None:
        """Store ready nodes early, and drop refused ones, if the request does not end soon."""
        handler = self.handler
        if handler.launchesComplete():
            self._drop_aborted()
        for node in handler.nodeset:
            if node.state != zk.READY or not node.unsaved or not isinstance(node.lock, LockHandle):
                continue
            node.unsaved = False
            txn = Txn(handler.zk.kazoo_client)
            txn.check(node.lock.path)
            set_node(txn, handler.zk, node)

            def written(
                _results: list[Any] | None, error: BaseException | None, node: zk.Node = node
            ) -> None:
                if error is not None:
                    node.unsaved = True  # written together with the request

            handler.zk.writer.submit(txn, written)

    def _sort_nodes(self) -> None:
        handler = self.handler
        self._drop_aborted()
        handler.ready_nodes[:] = [node for node in handler.nodeset if node.state == zk.READY]
        handler.failed_nodes[:] = [node for node in handler.nodeset if node.state != zk.READY]

    def _drop_aborted(self) -> None:
        """Drop nodes that the cloud had no capacity for: they are launched again later."""
        handler = self.handler
        for node in [node for node in handler.nodeset if node.state == zk.ABORTED]:
            handler.nodeset.remove(node)
            self.labels.removeNode(node.id)
            handler.zk.unlock_soon(node)

    def _reread_request(self) -> None:
        """Keep the changes of a client that wrote the request in spite of our lock."""
        handler = self.handler
        present = handler.zk.getNodeRequest(handler.request.id or "")
        if present is not None:
            present.lock = handler.request.lock
            handler.request = present
        handler.request.state = zk.PENDING

    # -- leave

    def _removed(self) -> End:
        self.handler.log.info("Node request was removed by its owner; releasing its nodes")
        return End(Outcome(How.REMOVED))

    def _launch_failed(self) -> End:
        handler = self.handler
        if handler.homeless:
            return End(Outcome(How.RETURNED))
        failed = [node.id or "" for node in handler.failed_nodes]
        handler.log.info("Declining node request because nodes failed: %s", failed)
        created = any(node.external_id for node in handler.failed_nodes)
        code = Declined.NODES_FAILED if created else Declined.NOT_CREATED
        reason = because(code, nodes=", ".join(failed))
        return End(Outcome(How.DECLINED), [reason, *handler.known_problems()])

    def _trouble(self, error: BaseException) -> End:
        """Return the end: declined, unless only ZooKeeper failed or the pool is removed."""
        handler, host = self.handler, self.handler.pw
        if isinstance(error, CONNECTION_ERRORS):
            handler.log.warning("ZooKeeper failed while working on the request: %r", error)
            return End(DROPPED)
        if handler.homeless:
            handler.log.info(
                "Returning the request: no provider %s or no pool %s in it",
                host.provider_name,
                host.pool_name,
            )
            return End(Outcome(How.RETURNED))
        handler.log.error(
            "Declining node request due to exception in NodeRequestHandler:", exc_info=error
        )
        handler.manager.label_problems.driver_failed(
            handler.request.node_types, host.pool_name, error
        )
        text = str(error) or repr(error)
        remedy = REMEDIES["record" if isinstance(error, RecordError) else "calls"]
        known = because(Declined.LABEL_PROBLEM, problem=f"error: {text}", help=remedy)
        return End(
            Outcome(How.DECLINED),
            [because(Declined.ERROR, error=text) if may_be_bug(error) else known],
        )

    def _limits_pending(self, error: LimitsPending) -> bool:
        """Wait, without declining or freeing capacity, until the limits are known."""
        handler = self.handler
        handler.log.debug("Waiting: %s", error)
        if not handler.accepted:
            raise End(Outcome(How.WITHDRAWN, wait_for=error.reason))
        handler.shortage = error.reason
        self.to(State.WAITING)
        self.pause(True)
        self._wait_for_limits()
        return True

    def _wait_for_limits(self) -> None:
        host = self.handler.pw
        manager = host.getProviderManager()
        if isinstance(manager, QuotaSupport):  # else it knows no limits
            manager.when_limits_known(host.capacity.limits_known)

    def _finish(self, end: End) -> Steps[Outcome]:
        """Write the end, unless nothing was written before, and return the outcome for the pool."""
        handler, outcome = self.handler, end.outcome
        if outcome.how in (How.DECLINED, How.RETURNED):
            self.pause(False)
            handler.pw.capacity.end_creation(handler)
        if outcome.how is How.DECLINED or (
            handler.accepted and outcome.how in (How.RETURNED, How.REMOVED)
        ):
            return (yield from self._write_end(end))
        return (
            replace(outcome, how=How.REFUSED)
            if outcome.how is How.RETURNED and not outcome.retry_after
            else outcome
        )

    def _write_end(self, end: End) -> Steps[Outcome]:
        """Write the end and free the nodes; those of running launches follow when these end."""
        handler, outcome, conflicts = self.handler, end.outcome, 0
        request_lock, path = (
            paths.request_lock(handler.request.id or ""),
            paths.request(handler.request.id or ""),
        )
        written = outcome.how is How.REMOVED
        while True:
            if not written:
                self._decide_end(end)
            error = yield from self._release(written, end.discard)
            if error is None:
                if not handler.nodeset:
                    return outcome
                written = True
                yield from self._wait_for_launches(outcome)
                continue
            conflicts += 1
            if (
                not isinstance(error, TransactionFailed)
                or conflicts > END_RETRIES
                or not isinstance(error.cause, CONFLICTS)
            ):
                handler.log.warning("Cannot release the request: %r", error)
                return Outcome(
                    How.DROPPED, NOT_ALLOWED if isinstance(error, TransactionFailed) else 0.0
                )
            if error.path == request_lock:
                if isinstance(error.cause, NotEmptyError):
                    return Outcome(How.RETURNED, SHORT_TURN)
                self._known[request_lock] = isinstance(error.cause, NodeExistsError)
            elif error.path != path:
                handler.log.warning("Cannot release the nodes of the request: %r", error)
                return DROPPED
            elif isinstance(error.cause, NoNodeError):
                written = True  # the owner removed it
            elif handler.accepted:
                self._reread_request()
            else:
                return Outcome(How.RETURNED, SHORT_TURN)

    def _wait_for_launches(self, outcome: Outcome) -> Steps[None]:
        """Let others have the request while running launches still hold nodes."""
        handler = self.handler
        self.to(State.FREEING)
        self.released = True
        handler.pw.ended(handler, outcome)  # others may serve it
        while handler.nodeset and not handler.launchesComplete():
            yield None
        self._sort_nodes()

    def _decide_end(self, end: End) -> None:
        """Decide what is written about the request, on top of what another client has written."""
        handler, request = self.handler, self.handler.request
        if end.outcome.how is How.RETURNED:
            request.state = zk.REQUESTED
            request.nodes = []
            return
        if handler.launcher_id not in request.declined_by:
            request.declined_by = [*request.declined_by, handler.launcher_id]
        reasons = end.reasons or [because(Declined.BY_DRIVER, text="the driver has declined it")]
        by_all = handler.pw.nodepool.decline(handler.pw, request, reasons)
        if by_all is not None:
            handler.log.info(
                "Failing declined node request: every pool has declined it (%s)", by_all
            )
        request.state = zk.REQUESTED if by_all is None else zk.FAILED

    def _release(self, written: bool, discard: bool) -> Steps[BaseException | None]:
        """Free the request and the nodes that have reached an end; return the error, if any.

        :param written: only release the lock of the request.
        """
        handler, request = self.handler, self.handler.request
        txn = Txn(handler.zk.kazoo_client)
        ended = handler.launchesComplete()
        free = [
            node for node in handler.nodeset if ended or node.state not in (zk.BUILDING, zk.INIT)
        ]
        for node in free:
            write = node.state in (zk.READY, zk.DELETING)  # the latter in a retry
            if write:
                node.allocated_to = None
                if discard:
                    node.state = zk.DELETING
            add_unlock(txn, handler.zk, node, write)
        if not written:
            if not handler.accepted:
                directory = paths.request_lock(request.id or "")
                add_unlocked_check(txn, directory, self._known.get(directory, False))
            add_request_end(txn, handler.zk, request)
        elif handler.accepted:
            txn.delete(request.lock.path)
        if txn.operations:
            _results, error = yield from self.write(State.LEAVING, txn)
            if error is not None:
                return error
        self.to(State.LEAVING)
        for node in free:
            node.lock = None
        handler.nodeset[:] = [node for node in handler.nodeset if node not in free]
        request.lock = None
        return None

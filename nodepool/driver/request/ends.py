"""How a request ends: fulfilled, declined, returned, dropped (DRV-5.6, LAU-7)."""

from __future__ import annotations

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

from nodepool.driver.quota.support import LimitsPending, QuotaSupport
from nodepool.driver.request.base import HandlerBase
from nodepool.driver.request.state import Event, How, Outcome, State
from nodepool.exceptions import FOREIGN
from nodepool.reasons import Code, Declined, Reason, because
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import LockHandle, add_unlocked_check
from nodepool.zk.writer import TransactionFailed, Txn

#: Reasons that are independent of the request.
CONNECTION_ERRORS = (ConnectionLoss, ConnectionClosedError, OperationTimeoutError, SessionExpiredError)


class RequestEnds(HandlerBase):
    """Writes the end of a request and releases what it held."""

    # -- transactions

    def _submit(self, state: State, txn: Txn, then: Callable[..., None], *args: object) -> None:
        """Send a transaction; ``then(*args, results, error)`` is the next step of this handler."""
        self._to(state)

        def answered(results: list[Any] | None, error: BaseException | None) -> None:
            self.pw.post(self, self._answered, then, args, results, error)

        self.zk.writer.submit(txn, answered)

    def _answered(
        self, then: Callable[..., None], args: tuple[object, ...], results: list[Any] | None, error: BaseException | None
    ) -> None:
        if self.done:
            # Dropped meanwhile: release what was obtained, the rest is found again from ZooKeeper. The request may
            # be in other hands by now.
            for result in results or ():
                if isinstance(result, str) and "__lock__" in result:
                    self.zk.kazoo_client.abandoned.add(result)
            results, error = None, SessionExpiredError()
        elif self.state is State.WRITING:
            self._to(State.FILLING)
        elif self.state is State.FULFILLING:
            self._to(State.LAUNCHING)
        try:
            then(*args, results, error)
        except FOREIGN as error:
            self.trouble(error)
        self._catch_up()

    def trouble(self, error: BaseException) -> None:
        """Handle a failed step: decline, unless only ZooKeeper failed or the pool is removed."""
        if isinstance(error, CONNECTION_ERRORS):
            self.log.warning("ZooKeeper failed while working on the request: %r", error)
            self.drop()
            return
        if self.state in (State.LEAVING, State.FREEING):
            self.log.error("Error while giving up the request:", exc_info=error)
            self.drop()
            return
        if isinstance(error, LimitsPending):
            self._wait_for_limits(error)
            return
        if self.homeless:
            self.log.info("Returning the request: no provider %s or no pool %s in it", self.pw.provider_name, self.pw.pool_name)
            self.hand_back()
            return
        self.log.error("Declining node request due to exception in NodeRequestHandler:", exc_info=error)
        self.declined_because = [because(Declined.ERROR, error=str(error) or repr(error))]
        self.pw.driver_failed(self.request, error)
        self.declineRequest()

    def _wait_for_limits(self, error: LimitsPending) -> None:
        """Wait, without declining or freeing capacity, until the limits are known."""
        self.log.debug("Waiting: %s", error)
        if self.accepted:
            self.shortage = error.reason
            self._to(State.WAITING)
            self._set_paused(True)
            self.poll()
        else:
            self.end(Outcome(How.WITHDRAWN, wait_for=error.reason))
        assert isinstance(self.manager, QuotaSupport)  # else it knows no limits
        self.manager.when_limits_known(self.pw.limits_known)

    # -- ends

    def poll(self) -> bool:
        """Finish the request if its nodes are complete; return True when it is done."""
        if not self._admits(Event.POLL):
            return self.done
        if self.state is State.FREEING:
            if self.nodeset and self.launchesComplete():
                self._sort_nodes()
                self._release(None)
            return self.done
        requests = self.zk.request_tree
        gone = requests.get(self.request.id) is None and requests.synced.is_set()
        if self.paused and not gone:
            self._save_launched()
            return False
        if not self.launchesComplete():
            if gone and self.paused:
                self._set_paused(False)
            return False
        self._sort_nodes()
        if gone:
            self._removed()
        elif self._failed_nodes and self.homeless:
            self._give_back()
        elif self._failed_nodes:
            self.log.info("Declining node request because nodes failed: %s", [n.id for n in self._failed_nodes])
            failed = because(Declined.NODES_FAILED, nodes=", ".join(n.id or "" for n in self._failed_nodes))
            self.declined_because = [failed, *self._label_problems()]
            self.declineRequest()
        elif len(self._ready_nodes) < len(self.request.node_types):
            # Aborted for quota: the pool retries periodically until there is some.
            self._set_paused(True)
        else:
            self._fulfil()
        return self.done

    def _save_launched(self) -> None:
        """Store ready nodes early, and drop refused ones, if the request does not end soon."""
        if self.launchesComplete():
            self._drop_aborted()
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
        self._drop_aborted()
        self._ready_nodes = [node for node in self.nodeset if node.state == zk.READY]
        self._failed_nodes = [node for node in self.nodeset if node.state != zk.READY]

    def _drop_aborted(self) -> None:
        """Drop nodes that the cloud had no capacity for: they are launched again later."""
        for node in [node for node in self.nodeset if node.state == zk.ABORTED]:
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
        """Return the node ids in the order of the requested labels."""
        have = list(have)
        result = []
        for label in self.request.node_types:
            index = next(i for i, (other, _) in enumerate(have) if other == label)
            result.append(have.pop(index)[1])
        return result

    def _fulfil(self) -> None:
        self.request.nodes = self._ordered_ids([(entry["label"], entry["node_id"]) for entry in self._satisfied_types.data])
        self.request.state = zk.FULFILLED
        txn = Txn(self.zk.kazoo_client)
        for node in self.nodeset:
            self._add_unlock(txn, node, write=node.unsaved)
        index = self._add_request_end(txn)
        self._submit(State.FULFILLING, txn, self._fulfilled, index)

    def _add_unlock(self, txn: Txn, node: zk.Node, write: bool) -> None:
        if write:
            txn.set(paths.node(node.id or ""), node.serialize(), tree=self.zk.node_tree, record=node.copy())
        if isinstance(node.lock, LockHandle):
            txn.delete(node.lock.path)

    def _add_request_end(self, txn: Txn) -> int:
        """Write the request, then give up its lock."""
        request = self.request
        index = txn.set(
            paths.request(request.id or ""),
            request.serialize(),
            request.version,
            tree=self.zk.request_tree,
            record=request.copy(),
        )
        if self.accepted:
            txn.delete(request.lock.path)
        return index

    def _fulfilled(self, _index: int, _results: list[Any] | None, error: BaseException | None) -> None:
        if error is None:
            self.log.info("Fulfilled node request with nodes %s", ",".join(self.request.nodes))
            self.pw.driver_works(self.request)
            self.end(Outcome(How.FULFILLED))
            return
        self.request.nodes = []
        if isinstance(error, TransactionFailed) and error.path == paths.request(self.request.id or ""):
            if isinstance(error.cause, NoNodeError):
                self._removed()
                return
            self._reread_request()
            self.poll()
            return
        self.log.warning("Cannot write the result of the request: %r", error)
        self.drop()

    def _reread_request(self) -> None:
        """Keep the changes of a client that wrote the request in spite of our lock."""
        present = self.zk.getNodeRequest(self.request.id or "")
        if present is not None:
            present.lock = self.request.lock
            self.request = present
            self.request.state = zk.PENDING

    def _label_problems(self) -> list[Reason]:
        """Return the known problems with the labels of the request here."""
        problems = self.manager.label_problems if self.manager is not None else None
        known = problems.of(self.request.node_types) if problems is not None else []
        return [because(Declined.LABEL_PROBLEM, problem=f"label {one.label}: {one.text}", help=one.help) for one in known]

    def decline_for(self, reasons: list[Reason]) -> None:
        """Decline: this pool can never serve the request."""
        self.log.info("Declining node request because: %s", ", ".join(map(str, reasons)))
        self.declined_because = [*reasons, *self._label_problems()]
        self.declineRequest()

    def declineRequest(self) -> None:
        """Decline the request; it becomes FAILED when every registered pool has declined it."""
        if not self._admits(Event.DECLINE):
            return
        if self.zk is None:
            self.zk = self.pw.getZK()
        self.pw.end_creation(self)
        self._outcome = Outcome(How.DECLINED)
        self._write_decline()

    def _write_decline(self) -> None:
        self._set_paused(False)
        request = self.request
        if self.launcher_id not in request.declined_by:
            request.declined_by = [*request.declined_by, self.launcher_id]
        reasons = self.declined_because or [because(Declined.BY_DRIVER, text="the driver has declined it")]
        by_all = self.pw.decline(request, reasons)
        if by_all is not None:
            self.log.info("Failing declined node request: every pool has declined it (%s)", by_all)
        request.state = zk.REQUESTED if by_all is None else zk.FAILED
        self._release(request)

    def _give_back(self, retry_after: float = 0.0, reason: Reason | None = None) -> None:
        """Return the request to the queue as if it had never been accepted.

        :param retry_after: seconds before it is tried again.
        :param reason: what one that was never accepted has to wait for; default: something that is free.
        """
        if self.zk is None:
            self.zk = self.pw.getZK()
        self._set_paused(False)
        self.pw.end_creation(self)
        if self.accepted:
            self._outcome = Outcome(How.RETURNED, retry_after)
            self.request.state = zk.REQUESTED
            self.request.nodes = []
            self._release(self.request)
        else:
            self.end(Outcome(How.RETURNED if retry_after else How.REFUSED, retry_after, reason))

    def move(self, retry_after: float = 0.0, discard: bool = False, to: str | None = None) -> None:
        """Let another pool have the request, or its nodes, as it waits for capacity here.

        :param retry_after: seconds before it is tried again.
        :param discard: delete its nodes: another pool needs what they occupy.
        :param to: launcher id of the pool that has asked for it; None: any with capacity.
        """
        if not self._admits(Event.MOVE):
            return  # it has made progress meanwhile
        self.pw.note_full(self._missing_labels(), self.shortage or because(Code.NO_ROOM, labels=",".join(self._missing_labels())))
        self._discard, self.destination = discard, to
        self._give_back(retry_after)

    @property
    def holds_nothing(self) -> bool:
        """Whether the request waits for its first node."""
        return self.accepted and self.paused and not self.nodeset

    def make_way(self) -> None:
        """Let a more urgent request overtake this one, unless it has nodes by now."""
        if self.holds_nothing:
            self.log.info("Returning the request: pool %s has a more urgent one", self.pw.label)
            self.move()

    def _release(self, request: zk.NodeRequest | None) -> None:
        """Free the nodes that have reached an end; write and unlock the request when one is given."""
        txn = Txn(self.zk.kazoo_client)
        ended = self.launchesComplete()
        free = [n for n in self.nodeset if ended or n.state not in (zk.BUILDING, zk.INIT)]
        for node in free:
            write = node.state in (zk.READY, zk.DELETING)  # the latter in a retry
            if write:
                node.allocated_to = None
                if self._discard:
                    node.state = zk.DELETING
            self._add_unlock(txn, node, write)
        if request is not None:
            if not self.accepted:
                add_unlocked_check(txn, paths.request_lock(request.id or ""), self._lock_directory_exists)
            self._add_request_end(txn)
        elif self.accepted:
            txn.delete(self.request.lock.path)
        if txn.operations:
            self._submit(State.LEAVING, txn, self._released, free)
        else:
            self._to(State.LEAVING)
            self._released(free, None, None)

    def _removed(self) -> None:
        self.log.info("Node request was removed by its owner; releasing its nodes")
        self._outcome = Outcome(How.REMOVED)
        self._release(None)

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
            # Running launches: their nodes are freed when they end.
            self._to(State.FREEING)
            self.pw.request_released(self)
            self.poll()
        else:
            self.end(self._outcome)

    def _write_again(self) -> None:
        """Write the end that was refused, whatever it is, on top of what another client wrote."""
        if self._outcome.how is How.DECLINED:
            self._write_decline()
            return
        self.request.state = zk.REQUESTED
        self.request.nodes = []
        self._release(self.request)

    def _release_refused(self, error: BaseException) -> None:
        self._conflicts += 1
        request_path = paths.request(self.request.id or "")
        if not isinstance(error, TransactionFailed) or self._conflicts > 10:
            self.log.warning("Cannot release the request: %r", error)
            self.drop()
        elif error.path == paths.request_lock(self.request.id or ""):
            if isinstance(error.cause, NotEmptyError):
                self._give_back(retry_after=0.05)
            else:
                self._lock_directory_exists = isinstance(error.cause, NodeExistsError)
                self._write_decline()
        elif error.path == request_path and isinstance(error.cause, NoNodeError):
            self._release(None)  # the owner removed it
        elif error.path == request_path:
            if self.accepted:
                self._reread_request()
                self._write_again()
            else:
                self._give_back()
        else:
            self.log.warning("Cannot release the nodes of the request: %r", error)
            self.drop()

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
        """Return the request to the queue and release its nodes: the pool is being removed."""
        if self._admits(Event.HAND_BACK):
            self._give_back()

    def drop(self) -> None:
        """Stop without writing (lost session, lost lock): leave everything to the cleanup."""
        if not self._admits(Event.DROP):
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
        self.end(Outcome(How.DROPPED))

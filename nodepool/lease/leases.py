"""Ask for leases, hand them over, renew and return them."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    KazooException,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    SessionExpiredError,
)

from nodepool.base import hostnames
from nodepool.exceptions import TimeoutException, ZKException, ZKLockException
from nodepool.lease.record import (
    LEAST,
    MAX_HOLD_AGE,
    MOST,
    REQUESTOR,
    Lease,
    LeaseError,
    LeaseState,
    Reason,
    Terms,
    end_of,
    hold,
    id_of,
    of_nodes,
    of_request,
    write_terms,
)
from nodepool.zk import paths
from nodepool.zk.locks import LockHandle, add_unlocked_check
from nodepool.zk.locks.turn import TurnLock
from nodepool.zk.records import FULFILLED, HOLD, READY, REQUESTED, USED, Node, NodeRequest
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import ZooKeeper

log = logging.getLogger("nodepool.lease")

#: Seconds to wait while another request of the same owner is created.
TURN = 2.0
#: Seconds to wait for the lock of a node: Zuul waits as long for its nodes.
HAND_OVER_LOCK, LOCK = 30.0, 5.0
#: Seconds for ZooKeeper to come back after a hand-over whose answer is lost, and between two
#: attempts to read it.
OUTCOME, RECONNECT = 30.0, 0.5
#: Seconds before its end in which a lease is not renewed: a launcher of 11.0.0 may be about to end
#: it.
TOO_LATE = 15.0


def turn_of(kazoo: KazooClient, owner: str) -> TurnLock:
    """Return the mark of who creates a request of this owner."""
    return TurnLock(
        kazoo, hostnames.short(), "lease", hashlib.sha256(owner.encode()).hexdigest()[:32]
    )


def _of(lease_id: str, nodes: Sequence[Node]) -> list[Node]:
    return [
        node
        for node in nodes
        if node.state == HOLD and _may_have(node, lease_id) and id_of(node) == lease_id
    ]


def _may_have(node: Node, lease_id: str) -> bool:
    """Return False if the id of the node's lease is another one, without reading its terms."""
    return node.allocated_to == lease_id or f"node-{node.id}" == lease_id


def _marks(request: NodeRequest | None) -> object:
    """Return what distinguishes a request from another one with its id."""
    return request and (request.requestor, request.created_time, request.requestor_data)


class Leases:
    """The leases of a cluster.

    :param zk: with or without a mirror; reading and writing waits for ZooKeeper.
    :param most: ``max-hold-age``: seconds after which launchers end any hold.
    """

    def __init__(
        self, zk: ZooKeeper, now: Callable[[], float] = time.time, most: float = math.inf
    ) -> None:
        self._zk = zk
        self._now = now
        self._most = most

    # -- ask

    def ask(
        self,
        labels: Sequence[str],
        terms: Terms,
        tenant: str | None = None,
        provider: str | None = None,
        priority: str = "200",
        most: int | None = None,
    ) -> Lease:
        """Request the nodes of a lease; it lives as long as this session, until it is handed over.

        A lease of the same owner with the same key is returned instead.

        :param most: leases of this owner, held and waiting; None: any number.
        :raises LeaseError: the key belongs to a request for other labels, or the owner has that
            many leases.
        """
        terms = replace(terms, created=self._now(), size=len(labels))
        request = NodeRequest()
        request.state = REQUESTED
        request.node_types, request.requestor, request.requestor_data = (
            list(labels),
            REQUESTOR,
            terms.stored(),
        )
        request.tenant_name, request.provider, request.created_time = (
            tenant,
            provider,
            terms.created,
        )
        request.event_id = uuid.uuid4().hex
        if terms.key is None and most is None:
            self._zk.storeNodeRequest(request, priority)
            return of_request(request, terms)
        return self._ask_in_turn(request, terms, priority, most)

    def _ask_in_turn(
        self, request: NodeRequest, terms: Terms, priority: str, most: int | None
    ) -> Lease:
        """Create the request unless the owner has too many leases, or one with this key.

        Of all servers, one at a time does this for an owner: each sees what the others have
        created.
        """
        kazoo, deadline = self._zk.kazoo_client, time.monotonic() + TURN
        turn = turn_of(kazoo, terms.owner)
        while True:
            self._wait_for(turn, deadline)
            session = kazoo.client_id
            with ExitStack() as unless_deleted:
                unless_deleted.callback(turn.drop)
                known = self._known(turn, request.node_types, terms, most)
                if known is not None:
                    return known
                txn = Txn(kazoo)
                index = txn.create(
                    f"{paths.REQUESTS}/{priority}-",
                    request.serialize(),
                    ephemeral=True,
                    sequence=True,
                )
                txn.delete(turn.path)
                try:
                    path = str(self._zk.writer.run(txn)[index])
                except TransactionFailed as error:
                    if not isinstance(error.cause, NoNodeError):
                        raise
                    if error.path != turn.path:
                        kazoo.ensure_path(paths.REQUESTS)
                    continue
                unless_deleted.pop_all()
            if (
                kazoo.client_id != session
            ):  # the mark that was deleted may have been that of another server
                kazoo.delete(path)
                raise SessionExpiredError
            request.id = path.rpartition("/")[2]
            return of_request(request, terms)

    @staticmethod
    def _wait_for(turn: TurnLock, deadline: float) -> None:
        """Take the turn.

        :raises LeaseError: others have had it until the deadline.
        """
        while not turn.take():
            gone = threading.Event()
            turn.when_free(gone.set)
            if not gone.wait(max(0.0, deadline - time.monotonic())):
                raise LeaseError(
                    Reason.BUSY, "Another request of the same owner is being created; try again"
                )

    def _known(
        self, turn: TurnLock, labels: Sequence[str], terms: Terms, most: int | None
    ) -> Lease | None:
        """Return the owner's lease with this key; None: there is none, and one more is allowed.

        A lease that no launcher has deleted since its end has no key.
        """
        for tree in (self._zk.request_tree, self._zk.node_tree):
            turn.catch_up(tree)
        leases = [lease for lease in self._all(changing=True) if lease.terms.owner == terms.owner]
        living = (lease for lease in leases if lease.ends is None or lease.ends > self._now())
        found = next(
            (lease for lease in living if terms.key is not None and lease.terms.key == terms.key),
            None,
        )
        if found is not None and not found.fits(labels):
            raise LeaseError(
                Reason.KEY_IN_USE,
                f"key {terms.key} belongs to lease {found.id} of {', '.join(found.labels)}",
            )
        if found is None and most is not None and len(leases) >= most:
            text = (
                f"{terms.owner} has {len(leases)} leases; at most {most} are allowed. Return "
                "one first"
            )
            raise LeaseError(Reason.TOO_MANY, text)
        return found

    # -- hand over

    def hand_over(
        self,
        lease_id: str,
        seconds: float,
        terms: Terms | None = None,
        request: NodeRequest | None = None,
    ) -> Lease:
        """Turn the fulfilled request into a lease that ends after this time.

        Either all nodes are handed over, or none; then the request is deleted, and launchers free
        its nodes.

        :param terms: of a request that was not made by :meth:`ask`.
        :param request: as it was just read.
        :raises LeaseError: there is no such request, it is not fulfilled, or its nodes cannot be
            had.
        """
        seconds, deadline = self._checked(seconds), time.monotonic() + OUTCOME
        known = request
        while True:
            try:
                if request is None and "/" not in lease_id:
                    request = self._zk.getNodeRequest(lease_id)
                known = known or request
                # After a loss of data, ZooKeeper assigns the id to another request.
                if request is not None and _marks(request) != _marks(known):
                    request = None
                return self._hand_over(lease_id, seconds, terms, request)
            except (KazooException, TimeoutError):
                if time.monotonic() > deadline:
                    raise
            request = None
            time.sleep(RECONNECT)

    def _hand_over(
        self, lease_id: str, seconds: float, terms: Terms | None, request: NodeRequest | None
    ) -> Lease:
        """Hand over once; a lease for which this was done before, without an answer, is
        returned.
        """
        if request is not None:
            given = (
                None
                if terms is None
                else replace(terms, created=self._now(), size=len(request.nodes))
            )
            terms = Terms.read(request.requestor_data) or given
        if request is None or terms is None:
            return self._handed_over(lease_id)
        if request.state != FULFILLED:
            raise LeaseError(
                Reason.NOT_READY, f"Lease {lease_id} is {of_request(request, terms).state.value}"
            )
        version = -1 if request.stat is None else request.stat.version

        def change(node: Node) -> None:
            if node.state != READY or node.allocated_to != lease_id:
                text = f"Node {node.id} is {node.state} and allocated to {node.allocated_to}"
                raise LeaseError(
                    Reason.UNAVAILABLE, f"Lease {lease_id} cannot be handed over: {text}"
                )
            hold(node, terms, seconds, self._now(), self._most)

        try:
            nodes = self._change_nodes(
                request.nodes,
                change,
                HAND_OVER_LOCK,
                lambda txn: txn.delete(paths.request(lease_id), version),
            )
            return of_nodes(lease_id, nodes)
        except LeaseError:
            try:
                self._zk.kazoo_client.delete(paths.request(lease_id))
            except NoNodeError:
                return self._handed_over(lease_id)
            raise

    def _handed_over(self, lease_id: str) -> Lease:
        lease = self.get(lease_id)
        if lease is None or lease.state is not LeaseState.HELD:
            raise LeaseError(
                Reason.NOT_FOUND,
                f"Lease {lease_id} does not exist: it has ended, or its request was canceled",
            )
        return lease

    def hold(self, node: Node, terms: Terms, seconds: float) -> Lease:
        """Lease a node that the caller has locked, without a request.

        :raises LeaseError: it is in use, is being deleted, or is leased already.
        """
        seconds = self._checked(seconds)
        if node.state not in (READY, HOLD):
            raise LeaseError(
                Reason.UNAVAILABLE,
                f"Node {node.id} is {node.state}; only ready and held nodes can be leased",
            )
        other = Terms.read(node.user_data) if node.state == HOLD else None
        if other is not None:
            raise LeaseError(
                Reason.UNAVAILABLE,
                f"Node {node.id} belongs to lease {id_of(node)} of {other.owner}",
            )
        hold(node, replace(terms, created=self._now(), size=1), seconds, self._now(), self._most)
        # Two nodes of one request that are held by two people are two leases.
        node.allocated_to = None
        self._write([node])
        return of_nodes(id_of(node), [node])

    # -- change

    def renew(self, lease_id: str, seconds: float) -> Lease:
        """Let a lease end that many seconds from now, or later; ``max-hold-age`` may allow less.

        :raises LeaseError: it does not exist, has ended or is about to end.
        """
        seconds = self._checked(seconds)

        def change(node: Node) -> None:
            end, now = end_of(node), self._now()
            if end is None:
                raise LeaseError(Reason.BAD_REQUEST, f"Lease {lease_id} has no end")
            if end - now < TOO_LATE:
                text = (
                    f"Lease {lease_id} ends in {max(0.0, end - now):.0f} s; it is too late to "
                    "renew it"
                )
                raise LeaseError(Reason.TOO_LATE, text)
            # ``state_time`` stays: launchers count from it.
            wanted = now + seconds - (node.state_time or now)
            node.hold_expiration = max(node.hold_expiration or 0, int(min(wanted, self._most)))
            terms = Terms.read(node.user_data)
            if terms is not None:
                limit = MAX_HOLD_AGE if wanted > self._most else None
                write_terms(node, replace(terms, renewed=terms.renewed + 1, limit=limit))

        return self._change(lease_id, change)

    def describe(
        self,
        lease_id: str,
        purpose: str | None = None,
        notes: Mapping[str, Any] | None = None,
        secret: str | None = None,
    ) -> Lease:
        """Change what is said about a lease, or the hash of its token; None: stays."""
        changes: dict[str, Any] = {
            name: value
            for name, value in (("purpose", purpose), ("notes", notes), ("secret", secret))
            if value is not None
        }

        def change(node: Node) -> None:
            terms = Terms.read(node.user_data)
            if terms is None:
                raise LeaseError(
                    Reason.BAD_REQUEST,
                    f"{lease_id} is a hold without an owner; it cannot be described",
                )
            write_terms(node, replace(terms, **changes))

        return self._change(lease_id, change)

    def _change(self, lease_id: str, change: Callable[[Node], None]) -> Lease:
        """Change all nodes of a lease in one transaction."""

        def checked(node: Node) -> None:
            if node.state != HOLD or id_of(node) != lease_id:
                raise LeaseError(Reason.ENDED, f"Lease {lease_id} has ended")
            change(node)

        lease = self._held(lease_id)
        return of_nodes(
            lease_id, self._change_nodes([node.id or "" for node in lease.nodes], checked, LOCK)
        )

    def give_back(self, lease_id: str, lease: Lease | None = None) -> bool:
        """Return the nodes of a lease, or cancel its request; return False if there is neither.

        Each node is returned on its own: one that cannot be locked ends at the end of the lease.

        :param lease: as it was just read.
        :raises LeaseError: a node is locked by somebody else.
        """
        lease = lease or self.get(lease_id)
        if lease is None:
            return False
        if lease.state is not LeaseState.HELD:
            try:
                self._zk.kazoo_client.delete(paths.request(lease_id))
                return True
            except NoNodeError:
                lease = self.get(
                    lease_id
                )  # it has been handed over meanwhile, unless it was canceled
                if lease is None:
                    return True
        failures: list[LeaseError] = []

        def change(node: Node) -> None:
            if node.state != HOLD or id_of(node) != lease_id:
                raise LeaseError(Reason.ENDED, f"Lease {lease_id} has ended")
            node.state = USED

        for node in lease.nodes:
            try:
                self._change_nodes([node.id or ""], change, LOCK)
            except LeaseError as error:
                if error.reason is not Reason.ENDED:
                    failures.append(error)
        if failures:
            raise failures[0]
        return True

    # -- read

    def get(self, lease_id: str) -> Lease | None:
        """Return a lease that waits or is held; None if there is none of this id."""
        if not paths.are_names(lease_id):
            return None
        found = self._held_nodes(lease_id)
        if not found:
            request = self._zk.getNodeRequest(lease_id)
            terms = None if request is None else Terms.read(request.requestor_data)
            if request is not None and terms is not None and request.requestor == REQUESTOR:
                return of_request(request, terms)
            # One transaction turns a request into nodes: it may have happened between the two
            # reads.
            changed = {node.id: node for node in _of(lease_id, self._zk.readChangingNodes())}
            found = list(
                {**{node.id: node for node in self._held_nodes(lease_id)}, **changed}.values()
            )
        return of_nodes(lease_id, found) if found else None

    def _held_nodes(self, lease_id: str) -> list[Node]:
        return _of(lease_id, self._zk.readUnreleasedNodes())

    def all(self) -> list[Lease]:
        """Return all leases, and all other held nodes, by id."""
        return sorted(self._all(), key=lambda lease: lease.id)

    def _all(self, changing: bool = False) -> Iterator[Lease]:
        """Yield all leases.

        One transaction turns a request into nodes: requests are read first.

        :param changing: also read the nodes whose last change the mirror does not show yet.
        """
        for request in self._zk.readRequests():
            if request.requestor == REQUESTOR:
                terms = Terms.read(request.requestor_data)
                if terms is not None:
                    yield of_request(request, terms)
        held: dict[str, list[Node]] = defaultdict(list)
        changed = self._zk.readChangingNodes() if changing else []
        read = (*self._zk.readUnreleasedNodes(), *changed)
        for node in {node.id: node for node in read}.values():
            if node.state == HOLD:
                held[id_of(node)].append(node)
        for lease_id, nodes in held.items():
            yield of_nodes(lease_id, nodes)

    def _held(self, lease_id: str) -> Lease:
        lease = self.get(lease_id)
        if lease is None:
            raise LeaseError(Reason.ENDED, f"Lease {lease_id} does not exist, or has ended")
        if lease.state is not LeaseState.HELD:
            raise LeaseError(Reason.NOT_READY, f"Lease {lease_id} is {lease.state.value}")
        return lease

    # -- nodes

    @staticmethod
    def _checked(seconds: float) -> float:
        if not LEAST <= seconds <= MOST:
            raise LeaseError(
                Reason.BAD_REQUEST,
                f"a lease of {seconds:g} s is not possible: it lasts from {LEAST} s to 10 years",
            )
        return seconds

    def _change_nodes(
        self,
        node_ids: Sequence[str],
        change: Callable[[Node], None],
        timeout: float,
        more: Callable[[Txn], object] = lambda _txn: None,
    ) -> list[Node]:
        """Change nodes that nobody else has locked, all or none.

        One transaction does it, if it finds all of them unlocked and as they were read; otherwise
        they are locked first.

        :param change: raises LeaseError if the node is not as expected.
        :param timeout: seconds to wait for each lock.
        """
        for cached in (True, False):
            nodes = [
                node.copy()
                for one in sorted(node_ids)
                if (node := self._zk.getNode(one, cached=cached)) is not None
            ]
            try:
                if len(nodes) == len(node_ids):
                    for node in nodes:
                        change(node)
                    self._write(nodes, more, unlocked=True)
                    return nodes
            except LeaseError:
                continue  # what was read may be old; under the locks it is not
        with self._locked(node_ids, timeout) as nodes:
            for node in nodes:
                change(node)
            self._write(nodes, more)
            return nodes

    @contextmanager
    def _locked(self, node_ids: Sequence[str], timeout: float) -> Iterator[list[Node]]:
        """Lock nodes, in the order of their ids, and read them again.

        :raises LeaseError: one does not exist, or is locked by somebody else.
        """
        nodes: list[Node] = []
        try:
            for node_id in sorted(node_ids):
                node = self._zk.getNode(node_id)
                if node is None:
                    raise LeaseError(Reason.ENDED, f"Node {node_id} no longer exists")
                try:
                    self._zk.lockNode(node, blocking=True, timeout=timeout)
                except (TimeoutException, ZKLockException) as error:
                    raise LeaseError(
                        Reason.UNAVAILABLE, f"Node {node_id} cannot be locked: {error}"
                    ) from error
                nodes.append(node)
            yield nodes
        finally:
            for node in nodes:
                if node.lock is not None:
                    with suppress(KazooException, ZKException):
                        self._zk.unlockNode(node)

    def _write(
        self,
        nodes: Sequence[Node],
        more: Callable[[Txn], object] = lambda _txn: None,
        unlocked: bool = False,
    ) -> None:
        """Write nodes that we have locked, or that nobody has locked, all or none.

        :raises LeaseError: one of them has changed, or our lock on it is lost.
        """
        txn = Txn(self._zk.kazoo_client)
        more(txn)
        for node in nodes:
            assert node.stat is not None
            if unlocked:
                add_unlocked_check(txn, paths.node_lock(node.id or ""), bool(node.stat.numChildren))
            else:
                assert isinstance(node.lock, LockHandle)
                txn.check(node.lock.path)
            txn.set(
                paths.node(node.id or ""),
                node.serialize(),
                node.stat.version,
                self._zk.node_tree,
                node.copy(),
            )
        try:
            self._zk.writer.run(txn)
        except TransactionFailed as error:
            if isinstance(
                error.cause, (BadVersionError, NoNodeError, NodeExistsError, NotEmptyError)
            ):
                raise LeaseError(
                    Reason.UNAVAILABLE, f"nodes were changed at the same time: {error}"
                ) from error
            raise

"""Hand-over of waiting leases, and long polls without a thread for each."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from kazoo.exceptions import KazooException, NoNodeError

from nodepool.base import threads
from nodepool.exceptions import ZKException
from nodepool.lease import LeaseError, Leases, Terms
from nodepool.status import causes
from nodepool.status.once import Once
from nodepool.web.actions.places import Places
from nodepool.web.actions.routes import Refused
from nodepool.zk import paths
from nodepool.zk.mirror.feed import Event, Feed
from nodepool.zk.records import FAILED, FULFILLED, NodeRequest
from nodepool.zk.zookeeper import ZooKeeper

#: Concurrent hand-overs: the lock of a node may take up to 30 s.
HAND_OVERS = 8
#: Seconds until a hand-over that failed because of ZooKeeper is repeated.
RETRY = 5.0
MOST_ENDED = 1000
#: Clients that wait: in all, and for one owner.
MOST_POLLS = (300, 150)
#: Leases, in all and of one owner: a server records the end of a session, with all requests of it,
#: in one message.
MOST_EXPECTED = (2000, 1000)

K = TypeVar("K")
V = TypeVar("V")

log = logging.getLogger("nodepool.lease")


class Ended(NamedTuple):
    """Why a lease was not handed over."""

    code: str
    text: str


class Waiting:
    """The waiting leases of this server, and the clients that wait for leases.

    Calls come from any thread; the state changes on the loop of the server only, unless stated
    otherwise.
    """

    def __init__(
        self, zk: Callable[[], ZooKeeper], feed: Feed | None, max_hold_age: Callable[[], float]
    ) -> None:
        self._zk = zk
        self._max_hold_age = max_hold_age
        self._feed = feed
        #: Lease id -> seconds for which it is held; 0: its request is to be withdrawn. Calls add to
        #: it.
        self._expected: dict[str, float] = {}
        self._owners: dict[str, str] = {}
        #: Lease id -> whether something has changed since its hand-over was started.
        self._running: dict[str, bool] = {}
        #: Secrets of requests that may have been created, and that nobody follows. Calls add to it.
        self._unknown: OrderedDict[str | None, bool] = OrderedDict()
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        #: Lease id -> what the clients that poll it wait for.
        self._polls: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        self._places = Places(*MOST_POLLS)
        self._lane = threads.shared().lane("Thread-WebApp-lease", HAND_OVERS)

    def start(self) -> None:
        """Start to hand leases over; on the loop of the server."""
        self._loop = asyncio.get_running_loop()
        if self._feed is not None:
            self._feed.subscribe(self._note_event)

    def stop(self) -> None:
        if self._feed is not None:
            self._feed.unsubscribe(self._note_event)
        self._lane.shutdown(wait=False, cancel_futures=True)

    def __len__(self) -> int:
        """Return how many clients wait."""
        return len(self._places)

    # -- for the calls

    def expect(self, lease_id: str, seconds: float, owner: str = "") -> None:
        """Hand the lease over when its nodes are ready."""
        self._owners[lease_id] = owner
        self._expected[lease_id] = seconds
        self._wake(lease_id)

    def withdraw(self, secret: str | None) -> None:
        """Delete the request with this secret, if it was created, as soon as it is seen."""
        _keep(self._unknown, secret, True)
        with suppress(Refused):
            for request in self._zk().readRequests():
                self._wake(request.id)

    def full(self, owner: str) -> bool:
        """Return whether as many leases wait here as one session, or this owner in it, may have."""
        most, part = MOST_EXPECTED
        return len(self._expected) >= most or list(self._owners.values()).count(owner) >= part

    def expects(self, lease_id: str) -> bool:
        """Return whether this server hands the lease over, or is about to note why it cannot."""
        return lease_id in self._expected

    def ended(self, lease_id: str) -> Ended | None:
        """Return why a lease of this server was not handed over; None: it was, or it is unknown."""
        return self._ended.get(lease_id)

    @property
    def number(self) -> int:
        """Return the number of the last event."""
        return 0 if self._feed is None else self._feed.number

    @property
    def places(self) -> Places | None:
        """Return the places of clients that wait; None: nothing would wake them."""
        return None if self._feed is None else self._places

    async def changed(self, lease_id: str, since: int, seconds: float) -> None:
        """Wait until an event names the lease, but at most for these seconds.

        :param since: number of the last event before the lease was read.
        """
        event = self._polls.setdefault(lease_id, asyncio.Event())
        missed = (
            self._feed.since(since)[0]
            if self._feed is not None and self._feed.number != since
            else []
        )
        if not any(each.get("request") == lease_id for each in missed):
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()

    # -- events

    def _note_event(self, event: Event) -> None:
        """Note an event; on the thread that brings it."""
        lease_id = event.get("request")
        if isinstance(lease_id, str) and (
            lease_id in self._expected or self._unknown or lease_id in self._polls
        ):
            self._wake(lease_id)

    def _wake(self, lease_id: str | None) -> None:
        if lease_id is not None:
            self._loop.call_soon_threadsafe(self._changed, lease_id)

    def _changed(self, lease_id: str) -> None:
        """Start the hand-over of an expected lease, or wake the clients that poll it."""
        try:
            request = self._zk().getCachedRequest(lease_id)
        except Refused:  # the mirror is not complete
            self._loop.call_later(RETRY, self._changed, lease_id)
            return
        terms = None if request is None else Terms.read(request.requestor_data)
        if terms is not None and self._unknown.pop(terms.secret, False):
            self._expected[lease_id], request = 0.0, None
        if lease_id not in self._expected:
            # Nothing can be reported of a lease before its hand-over.
            if (event := self._polls.pop(lease_id, None)) is not None:
                event.set()
        elif request is None or request.state in (FULFILLED, FAILED):
            if lease_id not in self._running:
                self._lane.submit(self._finish, lease_id, self._expected[lease_id])
            self._running[lease_id] = lease_id in self._running

    def _finish(self, lease_id: str, seconds: float) -> None:
        """Hand the lease over, or note why that is impossible; on a thread of the lane."""
        finished, retry = True, False
        try:
            finished = self._hand_over(lease_id, seconds)
        except (KazooException, ZKException, TimeoutError, Refused) as error:
            log.warning(
                "Lease %s: not handed over yet: %s: %s", lease_id, type(error).__name__, error
            )
            finished, retry = False, True
        except Exception:
            log.exception("Lease %s: error while it was handed over:", lease_id)
            self._end(lease_id, "failed", "internal error, see the log of the launcher")
        self._loop.call_soon_threadsafe(self._finished, lease_id, finished, retry)

    def _finished(self, lease_id: str, finished: bool, retry: bool) -> None:
        changed = self._running.pop(lease_id)
        if finished:
            del self._expected[lease_id]
            self._owners.pop(lease_id, None)
        elif retry:
            self._loop.call_later(RETRY, self._changed, lease_id)
        if finished or (changed and not retry):
            self._changed(lease_id)

    def _hand_over(self, lease_id: str, seconds: float) -> bool:
        """Return False while the request is not finished."""
        zk = self._zk()
        if not seconds:
            with suppress(NoNodeError):
                zk.kazoo_client.delete(paths.request(lease_id))
            return True
        request = zk.getCachedRequest(lease_id)
        if request is None or request.state not in (FULFILLED, FAILED):
            request = zk.getNodeRequest(lease_id)  # the mirror may not have it yet
        if request is None or not self._is_expected(lease_id, request):
            if Leases(zk).get(lease_id) is None:
                self._end(
                    lease_id,
                    "gone",
                    f"The request of lease {lease_id} was canceled, or lost with the session; ask "
                    "again",
                )
        elif request.state == FAILED:
            cause = causes.of_request(Once(zk), request)
            self._end(
                lease_id,
                "failed",
                f"{cause.text}. Suggestion: {cause.remedy}" if cause.remedy else cause.text,
            )
            with suppress(NoNodeError):
                zk.kazoo_client.delete(paths.request(lease_id))
        elif request.state == FULFILLED:
            try:
                Leases(zk, most=self._max_hold_age()).hand_over(lease_id, seconds, request=request)
            except LeaseError as error:
                self._end(lease_id, "try-again", f"{error}; ask again")
        else:
            return False
        return True

    def _is_expected(self, lease_id: str, request: NodeRequest) -> bool:
        """Return False for a request that got the id after a loss of data."""
        terms = Terms.read(request.requestor_data)
        return terms is not None and self._owners.get(lease_id) in (None, "", terms.owner)

    def _end(self, lease_id: str, code: str, text: str) -> None:
        log.info("Lease %s: not handed over: %s", lease_id, text)
        _keep(self._ended, lease_id, Ended(code, text))


def _keep(entries: OrderedDict[K, V], key: K, value: V) -> None:
    """Add an entry, and forget the oldest ones beyond the limit."""
    entries[key] = value
    while len(entries) > MOST_ENDED:
        entries.popitem(last=False)

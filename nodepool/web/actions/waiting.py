"""Hand-over of waiting leases, and long polls without a thread for each."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeVar

from kazoo.exceptions import KazooException, NoNodeError

from nodepool.exceptions import ZKException
from nodepool.lease import LeaseError, Leases, Terms
from nodepool.status import causes
from nodepool.status.once import Once
from nodepool.web.actions.places import Places
from nodepool.web.actions.routes import Later, Refused
from nodepool.zk import paths
from nodepool.zk.mirror.feed import Event, Feed
from nodepool.zk.records import FAILED, FULFILLED
from nodepool.zk.zookeeper import ZooKeeper

#: Concurrent hand-overs: the lock of a node may take up to 30 s.
HAND_OVERS = 8
#: Seconds until a hand-over that failed because of ZooKeeper is repeated.
RETRY = 5.0
MOST_ENDED = 1000
#: Clients that wait: in all, and for one owner.
MOST_POLLS = (300, 150)
#: Leases: a server records the end of a session, with all requests of it, in one message.
MOST_EXPECTED = 2000

K = TypeVar("K")
V = TypeVar("V")

log = logging.getLogger("nodepool.lease")


class Ended(NamedTuple):
    """Why a lease was not handed over."""

    code: str
    text: str


class Waiting:
    """The waiting leases of this server, and the clients that wait for leases."""

    def __init__(
        self,
        zk: Callable[[], ZooKeeper],
        feed: Feed | None,
        max_hold_age: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._zk = zk
        self._max_hold_age = max_hold_age
        self._feed = feed
        self._monotonic = monotonic
        self._lock = threading.Lock()
        #: Lease id -> seconds for which it is held; 0: its request is to be withdrawn.
        self._expected: dict[str, float] = {}
        #: Lease id -> whether something has changed since its hand-over was started.
        self._running: dict[str, bool] = {}
        #: Lease id -> monotonic time at which its hand-over is repeated.
        self._again: dict[str, float] = {}
        #: Secrets of requests that may have been created, and that nobody follows.
        self._unknown: OrderedDict[str | None, bool] = OrderedDict()
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._polls: dict[int, tuple[Later, Callable[[], None]]] = {}
        self.places = Places(*MOST_POLLS)
        self._numbers = itertools.count()
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._executor = ThreadPoolExecutor(HAND_OVERS, "Thread-WebApp-lease")
        self._thread = threading.Thread(target=self._run, name="Thread-WebApp-leases", daemon=True)

    def start(self) -> None:
        if self._feed is not None:
            self._feed.subscribe(self._heard)
            self._thread.start()

    def stop(self, timeout: float) -> None:
        if self._feed is not None:
            self._feed.unsubscribe(self._heard)
        self._arrived.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def __len__(self) -> int:
        """Return how many clients wait."""
        return len(self._polls)

    # -- for the calls

    def expect(self, lease_id: str, seconds: float) -> None:
        """Hand the lease over when its nodes are ready."""
        with self._lock:
            self._expected[lease_id] = seconds
        self._arrived.put(lease_id)

    def withdraw(self, secret: str | None) -> None:
        """Delete the request with this secret, if it was created, as soon as it is seen."""
        with self._lock:
            _keep(self._unknown, secret, True)
        with suppress(Refused):
            for request in self._zk().readRequests():
                self._arrived.put(request.id)

    @property
    def full(self) -> bool:
        """Return whether as many leases wait here as one session should own."""
        return len(self._expected) >= MOST_EXPECTED

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

    def park(self, later: Later, resume: Callable[[], None]) -> bool:
        """Call ``resume`` when an event names the lease, or at the deadline.

        :return: False: too many clients wait already.
        """
        if self._feed is None or (later.owner is not None and not self.places.take(later.owner)):
            return False
        with self._lock:
            self._polls[next(self._numbers)] = later, resume
        if later.work is not None:
            later.work.add_done_callback(lambda _work: self._arrived.put(later.lease_id))
        missed = self._feed.since(later.since)[0] if self._feed.number != later.since else []
        # Otherwise only the time of the next wake-up has to be computed again.
        self._arrived.put(later.lease_id if any(event.get("request") == later.lease_id for event in missed) else "")
        return True

    # -- the thread

    def _heard(self, event: Event) -> None:
        lease_id = event.get("request")
        if isinstance(lease_id, str) and (lease_id in self._expected or self._unknown or self._polled(lease_id)):
            self._arrived.put(lease_id)

    def _polled(self, lease_id: str) -> bool:
        return any(later.lease_id == lease_id for later, _resume in list(self._polls.values()))

    def _run(self) -> None:
        while True:
            lease_id: str | None = ""
            with suppress(queue.Empty):
                lease_id = self._arrived.get(timeout=self._pause())
            if lease_id is None:
                return
            now = self._monotonic()
            with self._lock:
                due = [one for one, moment in self._again.items() if moment <= now]
                for one in due:
                    del self._again[one]
            for one in (lease_id, *due):
                try:
                    if one:
                        self._changed(one)
                    # Nothing can be reported of a lease before its hand-over.
                    self._resume("" if one in self._expected else one)
                except Exception:  # it affects this lease only
                    log.exception("Lease %s: error while its change was processed:", one)

    def _pause(self) -> float | None:
        with self._lock:
            moments = [*self._again.values(), *(later.deadline for later, _resume in self._polls.values())]
        return max(0.0, min(moments) - self._monotonic()) if moments else None

    def _resume(self, lease_id: str) -> None:
        """Resume the polls of a lease, and those at their deadline."""
        now = self._monotonic()
        with self._lock:
            due = [n for n, (later, _) in self._polls.items() if later.lease_id == lease_id or later.deadline <= now]
            found = [self._polls.pop(number) for number in due]
        for later, resume in found:
            if later.owner is not None:
                self.places.free(later.owner)
            resume()

    def _changed(self, lease_id: str) -> None:
        """Start the hand-over of an expected lease whose request is finished."""
        try:
            request = self._zk().getCachedRequest(lease_id)
        except Refused:  # the mirror is not complete
            with self._lock:
                self._again[lease_id] = self._monotonic() + RETRY
            return
        terms = None if request is None else Terms.read(request.requestor_data)
        with self._lock:
            if terms is not None and self._unknown.pop(terms.secret, False):
                self._expected[lease_id], request = 0.0, None
            if lease_id not in self._expected or (request is not None and request.state not in (FULFILLED, FAILED)):
                return
            running = lease_id in self._running
            self._running[lease_id] = running
            seconds = self._expected[lease_id]
        if not running:
            self._executor.submit(self._finish, lease_id, seconds)

    def _finish(self, lease_id: str, seconds: float) -> None:
        """Hand the lease over, or note why that is impossible; on a thread of the executor."""
        finished, retry = True, False
        try:
            finished = self._hand_over(lease_id, seconds)
        except (KazooException, ZKException, TimeoutError, Refused) as error:
            log.warning("Lease %s: not handed over yet: %s: %s", lease_id, type(error).__name__, error)
            finished, retry = False, True
        except Exception:
            log.exception("Lease %s: error while it was handed over:", lease_id)
            self._end(lease_id, "failed", "internal error, see the log of the launcher")
        with self._lock:
            changed = self._running.pop(lease_id)
            if finished:
                del self._expected[lease_id]
            elif retry:
                self._again[lease_id] = self._monotonic() + RETRY
        self._arrived.put(lease_id if finished or (changed and not retry) else "")

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
        if request is None:
            if Leases(zk).get(lease_id) is None:
                self._end(lease_id, "gone", f"The request of lease {lease_id} was canceled, or lost with the session; ask again")
        elif request.state == FAILED:
            cause = causes.of_request(Once(zk), request)
            self._end(lease_id, "failed", f"{cause.text}. Suggestion: {cause.remedy}" if cause.remedy else cause.text)
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

    def _end(self, lease_id: str, code: str, text: str) -> None:
        log.info("Lease %s: not handed over: %s", lease_id, text)
        with self._lock:
            _keep(self._ended, lease_id, Ended(code, text))


def _keep(entries: OrderedDict[K, V], key: K, value: V) -> None:
    """Add an entry, and forget the oldest ones beyond the limit."""
    entries[key] = value
    while len(entries) > MOST_ENDED:
        entries.popitem(last=False)

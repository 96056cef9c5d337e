"""Which request next, and which of our pools takes it (launcher.md sections 2 - 4).

Requests that are alike in all that matters (labels, provider wish, tenant, who declined) form a class, kept in
serving order.  Only the head of a class is looked at; when it has to wait, the whole class waits, with the reason,
until something changes.  So thousands of waiting requests cost nothing.
"""

from __future__ import annotations

import bisect
import heapq
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import KazooException

from nodepool.offers import joined, why_not_offered
from nodepool.zk import paths
from nodepool.zk.components import RegisteredPool
from nodepool.zk.records import FAILED, REQUESTED, NodeRequest
from nodepool.zk.requests import MIN_READY
from nodepool.zk.writer import TransactionFailed, Txn

if TYPE_CHECKING:
    from nodepool.launcher.pool import NodePool
    from nodepool.launcher.poolworker import PoolWorker

SortKey = tuple[str, int, str]

#: After so many decisions newcomers are sorted in, so that an urgent one overtakes a flood.
ROUND = 32
#: Seconds that other launchers get to register again after a lost session; counted from the reconnect.
REGISTRATION_GRACE = 5.0
#: Seconds after which waiting requests are looked at again without any event (safety net).
RESYNC = 30.0


@dataclass
class RequestClass:
    """Requests that are treated alike."""

    node_types: tuple[str, ...]
    provider: str | None
    tenant: str | None
    declined: frozenset[str]
    queue: list[tuple[SortKey, str]] = field(default_factory=list)
    #: Why its head has to wait; None when it has not been looked at since something changed.
    reason: str | None = None
    #: Launcher ids of paused pools that found nothing to decline, and for which state of affairs.
    checked: dict[str, int] = field(default_factory=dict)
    #: Launcher ids of pools that have looked and cannot serve it now, with the reason; until something changes.
    refused: dict[str, str] = field(default_factory=dict)
    #: The error that was logged last.
    logged: str | None = None

    def look_again(self) -> None:
        """Something has changed."""
        self.reason = None
        self.refused.clear()

    def __post_init__(self) -> None:
        self.labels = frozenset(self.node_types)


@dataclass(frozen=True)
class Decision:
    """What to do with the head of a class."""

    worker: PoolWorker | None = None
    check_only: bool = False
    decline_by: tuple[str, ...] = ()
    reason: str = ""


def choose(
    cls: RequestClass, pools: list[RegisteredPool], workers: dict[str, Any], version: int
) -> Decision:
    """Decide about the head of the class from a snapshot; no effects.

    ``workers`` are our own pools by launcher id; each offers ``paused``, ``load`` and ``admission(cls)``.
    """
    eligible = [p for p in pools if cls.labels <= p.labels and p.id not in cls.declined]
    if not eligible:
        if not workers.keys() <= {p.id for p in pools}:
            return Decision(reason="some pools of ours are still being registered")
        ours = tuple(i for i in workers if i not in cls.declined and any(p.id == i for p in pools))
        if ours:
            return Decision(decline_by=ours)
        if workers and pools and all(p.id in cls.declined for p in pools):
            return Decision(decline_by=(next(iter(workers)),))  # its last hope has gone: re-evaluate
        return Decision(reason="no pool of ours offers it; other launchers still have to decline")
    if cls.provider and any(p.provider_name == cls.provider for p in eligible):
        eligible = [p for p in eligible if p.provider_name == cls.provider]
    ours_eligible = [p for p in eligible if p.id in workers]
    if not ours_eligible:
        return Decision(reason="another launcher can serve it")

    def is_paused(pool: RegisteredPool) -> bool:
        worker = workers.get(pool.id)
        return bool(worker.paused) if worker is not None else pool.paused

    best = min((p.priority for p in eligible if not is_paused(p)), default=None)
    reasons: list[str] = []
    usable: list[Any] = []
    for pool in ours_eligible:
        worker = workers[pool.id]
        if best is not None and best < pool.priority:
            reasons.append(f"{worker.label}: a pool of better priority is open")
            continue
        if pool.id in cls.refused:
            reasons.append(f"{worker.label}: {cls.refused[pool.id]}")
            continue
        reason = worker.admission(cls)
        if reason is None and worker.paused:
            if cls.checked.get(pool.id) != version:
                return Decision(worker=worker, check_only=True)
            reason = "paused at quota"
        if reason is None:
            usable.append(worker)
        else:
            reasons.append(f"{worker.label}: {reason}")
    if usable:
        return Decision(worker=min(usable, key=lambda w: w.load))
    return Decision(reason="; ".join(reasons))


class Assignment(threading.Thread):
    """Hands requests to pool workers in serving order."""

    log = logging.getLogger("nodepool.Assignment")

    def __init__(self, nodepool: NodePool) -> None:
        super().__init__(name="PoolWorker-assignment", daemon=True)
        self.nodepool = nodepool
        self._condition = threading.Condition()
        self._dirty: dict[str, None] = {}
        self._wake_all = True
        self._stopping = False
        self._timers: list[tuple[float, str]] = []
        self._classes: dict[tuple[Any, ...], RequestClass] = {}
        self._where: dict[str, tuple[RequestClass, SortKey]] = {}
        self._claimed: set[str] = set()
        self._events = 0
        self._claimed_at: dict[str, int] = {}
        #: Grows whenever a decline check may come out differently.
        self.version = 0
        self.decisions = 0
        #: Nothing is declined before this moment (monotonic seconds).
        self.others_return_until = 0.0
        #: Requests that cannot be put into a class, and why.
        self._unusable: dict[str, str] = {}
        self._resync_at = time.monotonic() + RESYNC

    def session_lost(self) -> None:
        """ZooKeeper may have been gone for everybody: give other launchers time to register again."""
        self.others_return_until = time.monotonic() + REGISTRATION_GRACE

    # -- input, from any thread

    def request_changed(self, request_id: str, request: NodeRequest | None) -> None:
        """A request appeared, changed or vanished; most changes of requests in work do not concern us."""
        if (request is None or request._state != REQUESTED) and request_id not in self._where:
            return
        with self._condition:
            self._dirty[request_id] = None
            self._condition.notify()

    def wake(self, recheck: bool = False) -> None:
        """Something that waiting requests may wait for has changed."""
        self._events += 1
        if recheck:
            self.version += 1
        with self._condition:
            if not self._wake_all:
                self._wake_all = True
                if self._where:
                    self._condition.notify()  # else whoever comes next brings it about

    def recheck(self, reason: str) -> None:
        """Look again at the classes that wait for this reason, and only at them."""
        with self._condition:
            for cls in self._classes.values():
                if cls.reason is not None and reason in cls.reason and cls.queue:
                    cls.look_again()
                    self._dirty.setdefault(cls.queue[0][1], None)
            self._condition.notify()

    def release(self, request_id: str, wait_for: str | None = None, retry_after: float = 0.0,
                checked_by: str | None = None, refused_by: str | None = None) -> None:
        """A pool is through with the request; when it is still open it is queued again.

        :param wait_for: the reason why its class has to wait for a change; only for this pool with ``refused_by``.
        :param retry_after: seconds to leave it alone.
        """
        with self._condition:
            self._claimed.discard(request_id)
            # What happened since it was handed out may have taken the reason to wait away.
            unchanged = self._claimed_at.pop(request_id, self._events) == self._events
            if retry_after > 0:
                self._claimed.add(request_id)
                heapq.heappush(self._timers, (time.monotonic() + retry_after, request_id))
            else:
                self._queue_again(request_id)
                entry = self._where.get(request_id)
                if entry is not None:
                    self._dirty.setdefault(request_id, None)
                    if checked_by is not None:
                        entry[0].checked[checked_by] = self.version  # another pool may still take it
                    elif wait_for is not None and refused_by is not None:
                        if unchanged:
                            entry[0].refused[refused_by] = wait_for
                    elif wait_for is not None and unchanged:
                        entry[0].reason = wait_for
                    if entry[0].reason is None or wait_for is None:
                        self._condition.notify()
                return
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def reason_for(self, request_id: str) -> str | None:
        """Why an open request has not been taken; None when it is not waiting here."""
        with self._condition:
            entry = self._where.get(request_id)
            return entry[0].reason if entry is not None else None

    def explain(self) -> list[tuple[str, tuple[str, ...], str]]:
        """(request, labels, why it has not been taken) of all requests waiting here, in serving order."""
        with self._condition:
            entries = [(key, request_id, cls) for request_id, (cls, key) in self._where.items()]
        return [(request_id, cls.node_types, cls.reason or "to be looked at") for _, request_id, cls in sorted(
            entries, key=lambda entry: entry[:2])]

    def waiting(self) -> int:
        with self._condition:
            return len(self._where)

    # -- the queue (condition held)

    def _remove(self, request_id: str) -> None:
        entry = self._where.pop(request_id, None)
        if entry is None:
            return
        cls, key = entry
        index = bisect.bisect_left(cls.queue, (key, request_id))
        if index < len(cls.queue) and cls.queue[index][1] == request_id:
            del cls.queue[index]

    def _queue_again(self, request_id: str) -> None:
        """:meth:`_refresh`; whatever goes wrong concerns this request only."""
        try:
            self._refresh(request_id)
        except Exception as error:
            self._remove(request_id)
            if self._unusable.get(request_id) != repr(error):
                self._unusable[request_id] = repr(error)
                self.log.exception("Request %s is left out:", request_id)
        else:
            self._unusable.pop(request_id, None)

    def _refresh(self, request_id: str) -> None:
        request: NodeRequest | None = self.nodepool.zk.request_tree.get(request_id)
        if request is None or request._state != REQUESTED or request_id in self._claimed:
            self._remove(request_id)
            return
        declined = tuple(sorted(set(request.declined_by)))
        class_key = (tuple(request.node_types), request.provider, request.tenant_name, declined,
                     request.reuse, request.requestor == MIN_READY)
        sort_key = request.priority
        entry = self._where.get(request_id)
        cls = self._classes.get(class_key)
        if cls is None:
            cls = self._classes[class_key] = RequestClass(
                tuple(request.node_types), request.provider, request.tenant_name, frozenset(declined))
        if entry is not None:
            if entry[0] is cls and entry[1] == sort_key:
                return
            self._remove(request_id)
        bisect.insort(cls.queue, (sort_key, request_id))
        self._where[request_id] = (cls, sort_key)

    def rebuild(self) -> None:
        """Look at every request again (after a synchronisation)."""
        with self._condition:
            for request_id in list(self._where):
                self._dirty[request_id] = None
            for request in self.nodepool.zk.request_tree.snapshot():
                self._dirty[request.id] = None
            self._wake_all = True
            self._condition.notify()

    def _resync(self) -> None:
        """Safety net: look at all classes again, and for open requests that are in none of them."""
        self._wake_all = True
        for request in self.nodepool.zk.request_tree.snapshot():
            if request._state == REQUESTED and request.id not in self._where and request.id not in self._claimed:
                self._dirty[request.id] = None
        for request_id in [i for i in self._unusable if self.nodepool.zk.request_tree.get(i) is None]:
            del self._unusable[request_id]

    # -- the loop

    def run(self) -> None:
        while True:
            with self._condition:
                if self._stopping:
                    return
                if not self._dirty and not self._wake_all:
                    wait = min([self._resync_at, *(due for due, _ in self._timers[:1])]) - time.monotonic()
                    if wait > 0:
                        self._condition.wait(wait)
                    if self._stopping:
                        return
            try:
                self._pass()
            except Exception:
                self.log.exception("Error assigning requests:")
                with self._condition:
                    self._condition.wait(1.0)

    def _pass(self) -> None:
        ready = self.nodepool.zk.connected and self.nodepool.zk.synced
        with self._condition:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                request_id = heapq.heappop(self._timers)[1]
                self._claimed.discard(request_id)
                self._dirty[request_id] = None
                entry = self._where.get(request_id)
                if entry is not None:
                    entry[0].look_again()
            if now >= self._resync_at:
                self._resync_at = now + RESYNC
                self._resync()
            dirty, self._dirty = self._dirty, {}
            for request_id in dirty:
                self._queue_again(request_id)
            if self._wake_all:
                self._wake_all = False
                empty = [key for key, cls in self._classes.items() if not cls.queue]
                for key in empty:
                    del self._classes[key]
                for cls in self._classes.values():
                    cls.look_again()
            heads = [(cls.queue[0], id(cls), cls) for cls in self._classes.values()
                     if cls.queue and cls.reason is None]
        if not ready or not heads:
            return
        heapq.heapify(heads)
        pools = self.nodepool.zk.getRegisteredPools()
        workers = self.nodepool.workers_by_id()
        for _ in range(ROUND):
            if not heads:
                return
            head, _ident, cls = heapq.heappop(heads)
            try:
                self._decide(cls, head[1], pools, workers)
            except Exception as error:
                # Whatever is wrong with this class, the others go on; it is looked at again like any that waits.
                self._log_once(cls, head[1], error)
                with self._condition:
                    cls.reason = f"error: {error!r}"
            with self._condition:
                if cls.queue and cls.reason is None:
                    heapq.heappush(heads, (cls.queue[0], id(cls), cls))
        if heads:
            with self._condition:
                # More to do: go round again, after newcomers have been sorted in.
                self._dirty.setdefault(heads[0][0][1], None)

    def _log_once(self, cls: RequestClass, request_id: str, error: Exception) -> None:
        if cls.logged != repr(error):
            cls.logged = repr(error)
            self.log.error("Cannot assign request %s (%s):", request_id, ",".join(cls.node_types), exc_info=error)

    def _decide(self, cls: RequestClass, request_id: str, pools: list[RegisteredPool],
                workers: dict[str, PoolWorker]) -> None:
        self.decisions += 1
        events = self._events
        decision = choose(cls, pools, workers, self.version)
        wait = self.others_return_until - time.monotonic() if decision.decline_by else 0.0
        if wait > 0:
            # Everybody's registration went with the session: who can serve it may not be back yet.
            decision = Decision(reason="after a lost session: other launchers may still have to register again")
            with self._condition:
                heapq.heappush(self._timers, (time.monotonic() + wait + 0.01, request_id))
        with self._condition:
            if not cls.queue or cls.queue[0][1] != request_id:
                return
            if decision.worker is None and not decision.decline_by:
                cls.reason = decision.reason
                return
            self._claimed.add(request_id)
            self._claimed_at[request_id] = events
            self._remove(request_id)
        try:
            if decision.worker is not None:
                decision.worker.offer(request_id, decision.check_only)
            else:
                self._decline(request_id, decision.decline_by)
        except Exception as error:
            self._log_once(cls, request_id, error)
            self.release(request_id, retry_after=1.0)  # else it would be claimed for ever

    def _decline(self, request_id: str, launcher_ids: tuple[str, ...]) -> None:
        """None of our pools can serve it: say so for all of them at once."""
        zk = self.nodepool.zk
        seen = zk.request_tree.get(request_id)
        if seen is None or seen.state != REQUESTED:
            self.release(request_id)
            return
        request = seen.copy()
        registered, workers = {pool.id: pool for pool in zk.getRegisteredPools()}, self.nodepool.workers_by_id()
        for launcher_id in launcher_ids:
            if launcher_id not in request.declined_by:
                request.declined_by.append(launcher_id)
                worker, pool = workers.get(launcher_id), registered.get(launcher_id)
                if worker is not None and pool is not None:
                    missing = set(request.node_types) - pool.labels
                    self.nodepool.declines.note(request, launcher_id, worker.label, f"does not offer {joined(missing)}")
        pools = registered.keys() | workers.keys()
        if pools <= set(request.declined_by):
            request.state = FAILED
        else:
            request.state = REQUESTED
        self._write_decline(request, False)

    def _write_decline(self, request: NodeRequest, lock_directory_exists: bool) -> None:
        zk = self.nodepool.zk
        request_id = request.id or ""
        directory = paths.request_lock(request_id)
        txn = Txn(zk.kazoo_client)
        if not lock_directory_exists:
            txn.create(directory)
        txn.delete(directory)  # refused while somebody holds the lock
        txn.set(paths.request(request_id), request.serialize(), request.stat.version if request.stat else -1,
                tree=zk.request_tree, record=request.copy())

        def written(_results: list[Any] | None, error: BaseException | None) -> None:
            if error is None:
                if request.state == FAILED:
                    self.log.info("Failed request %s: %s", request_id, why_not_offered(
                        request.node_types, zk.getRegisteredPools()) or self.nodepool.declines.known(request))
                self.release(request_id)
            elif isinstance(error, TransactionFailed) and error.path == directory and error.index == 0 \
                    and not lock_directory_exists:
                self._write_decline(request, True)
            else:
                if not isinstance(error, (TransactionFailed, KazooException)):
                    self.log.warning("Cannot decline %s: %r", request_id, error)
                self.release(request_id, retry_after=0.1)

        zk.writer.submit(txn, written)


__all__ = ["Assignment", "Decision", "RequestClass", "choose"]

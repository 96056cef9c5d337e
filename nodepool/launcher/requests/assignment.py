"""Select the next request and the pool that serves it (LAU-2 to LAU-4).

Requests that agree in labels, provider preference, tenant and declining pools form a class, kept in serving order. Only
the head of a class is considered; if it has to wait, the whole class waits, with the reason, until something changes.
Thousands of waiting requests thus cost nothing.
"""

from __future__ import annotations

import bisect
import heapq
import logging
import math
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from nodepool.launcher.pool import Pool
from nodepool.launcher.requests.choice import Decision, RequestClass, SortKey, choose
from nodepool.launcher.requests.declining import decline_for_all
from nodepool.launcher.requests.moves import OTHERS_TURN, Moves
from nodepool.launcher.requests.safety_net import RESYNC, SafetyNet
from nodepool.launcher.state import LauncherState
from nodepool.reasons import Code, Declined, Reason, because
from nodepool.zk.components import RegisteredPool
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import REQUESTED, NodeRequest

#: After this many decisions new requests are sorted in, so that an urgent one overtakes a flood.
ROUND = 32
#: Further decisions of a round, for the classes that waited longest: each wake-up starts with the most urgent class.
OVERDUE = 8
#: Seconds for other launchers to register again after a lost session; counted from the reconnect.
REGISTRATION_GRACE = 5.0


class Assignment(threading.Thread):
    """Hands requests to pool workers in serving order."""

    log = logging.getLogger("nodepool.Assignment")

    def __init__(self, state: LauncherState) -> None:
        super().__init__(name="PoolWorker-assignment", daemon=True)
        self.state = state
        self._condition = threading.Condition()
        self._dirty: dict[str, None] = {}
        self._wake_all = True
        self._stopping = False
        #: When resting requests are queued again.
        self._resting: list[tuple[float, str]] = []
        self._classes: dict[tuple[Any, ...], RequestClass] = {}
        self._where: dict[str, tuple[RequestClass, SortKey]] = {}
        #: Handed out, with the pool that has it; None: resting for a moment, or being declined.
        #: And the number of events on which that decision was based.
        self._claimed: dict[str, tuple[Pool | None, int]] = {}
        #: Counts events; their number at the last wake-up of everything, and of each rechecked reason.
        self._events = 0
        self._woken = 0
        self._rechecked: dict[Reason, int] = {}
        #: Requests that were left to other launchers: how often, and since when (monotonic seconds).
        self._left_to_others: dict[str, tuple[int, float]] = {}
        #: Increases whenever a decline check may have another result.
        self.version = 0
        self.decisions = 0
        #: Nothing is declined before this moment (monotonic seconds).
        self.others_return_until = 0.0
        self._net = SafetyNet(state.statsd, state.clock.monotonic())
        self._moves = Moves(state, self.times_left, self.leave_to_others)
        self._look_at_moves = True

    def session_lost(self) -> None:
        """Delay declines after a lost session, so that other launchers can register again."""
        self.others_return_until = self.state.clock.monotonic() + REGISTRATION_GRACE

    # -- input, from any thread

    def request_changed(self, request_id: str, request: NodeRequest | None) -> None:
        """Process a new, changed or deleted request; most changes of running ones are irrelevant."""
        open_still = request is not None and request._state == REQUESTED
        offered = self._net.offered.get(request_id)
        if offered is not None and not open_still:
            with self._condition:
                self._net.taken(request_id, request is not None and not self._changed_since(offered[0]))
        if not open_still and request_id not in self._where:
            return
        with self._condition:
            self._dirty[request_id] = None
            self._condition.notify()

    def wake(self, recheck: bool = False) -> None:
        """Recheck all waiting requests, because something they may wait for has changed."""
        with self._condition:
            self._events += 1
            self._woken = self._events
            if recheck:
                self.version += 1
            if not self._wake_all:
                self._wake_all = self._look_at_moves = True
                if self._where or any(worker.paused for worker in self.state.workers.values()):
                    self._condition.notify()  # else the next event triggers it

    def recheck(self, code: Code, **parameters: object) -> None:
        """Recheck only the classes that wait for this reason."""
        with self._condition:
            self._events += 1
            self._rechecked[because(code, **parameters)] = self._events
            for cls in self._classes.values():
                if not cls.queue or not cls.waits_for(code, **parameters):
                    continue
                cls.look_again(code, **parameters)
                self._dirty.setdefault(cls.queue[0][1], None)
            self._condition.notify()

    def _changed_since(self, moment: int, *reasons: Reason) -> bool:
        """Return whether the awaited event may have happened since then (condition held)."""
        return self._woken > moment or any(
            at > moment and reason.matches(what.code, **dict(what.parameters))
            for what, at in self._rechecked.items()
            for reason in reasons
        )

    def release(
        self,
        request_id: str,
        wait_for: Reason | None = None,
        retry_after: float = 0.0,
        checked_by: str | None = None,
        refused_by: str | None = None,
        full: bool = False,
        hand_to: str | None = None,
    ) -> None:
        """Release a request of a pool; if it is still open, it is queued again.

        :param wait_for: the reason why its class has to wait for a change; only for this pool with ``refused_by``.
        :param retry_after: seconds for which the request rests.
        :param full: the pool has no capacity: another one may serve it, also of worse priority.
        :param hand_to: launcher id of our pool that has requested it and considers it next.
        """
        worker = self.state.workers.get(hand_to) if hand_to is not None else None
        with self._condition:
            _pool, claimed_at = self._claimed.pop(request_id, (None, self._events))
            if retry_after > 0:
                self._claimed[request_id] = None, self._events
                heapq.heappush(self._resting, (self.state.clock.monotonic() + retry_after, request_id))
                self._condition.notify()
                return
            self._queue_again(request_id)
            entry = self._where.get(request_id)
            if entry is None:
                self._condition.notify()
                return
            # Still open: our pool could not serve it. If another launcher does, nothing was missed here.
            self._net.offered.pop(request_id, None)
            self._dirty.setdefault(request_id, None)
            if worker is not None:
                # Its former pool looks open because of the nodes that it returned, and would take the request again.
                self._claim(request_id, worker, self._events)
            if checked_by is not None:
                entry[0].checked[checked_by] = self.version  # another pool may still serve it
            elif wait_for is not None and not self._changed_since(claimed_at, wait_for):
                # Otherwise an event since it was handed out may have removed the reason to wait.
                if refused_by is not None:
                    (entry[0].full if full else entry[0].refused)[refused_by] = wait_for
                else:
                    entry[0].reasons = (wait_for,)
            if not entry[0].reasons or wait_for is None:
                self._condition.notify()
        if worker is not None:
            worker.offer(request_id, check_only=False, gives_way=True)

    def leave_to_others(self, request_id: str) -> None:
        """Let other launchers accept the request for :data:`OTHERS_TURN` seconds."""
        with self._condition:
            now = self.state.clock.monotonic()
            self._left_to_others[request_id] = (self.times_left(request_id) + 1, now)
            if entry := self._where.get(request_id):
                entry[0].again_at = min(entry[0].again_at, now + OTHERS_TURN)

    def times_left(self, request_id: str) -> int:
        """Return how often the request was left to others."""
        return self._left_to_others.get(request_id, (0, 0.0))[0]

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def explain(self) -> list[tuple[str, tuple[str, ...], tuple[Reason, ...]]]:
        """Return (request, labels, reasons) of all requests waiting here, in serving order."""
        with self._condition:
            entries = [(key, request_id, cls) for request_id, (cls, key) in self._where.items()]
        return [
            (request_id, cls.node_types, cls.reasons or (because(Code.NOT_LOOKED_AT),))
            for _, request_id, cls in sorted(entries, key=lambda entry: entry[:2])
        ]

    def is_wanted(self, label: str) -> bool:
        """Return whether a request that waits here needs such a node."""
        with self._condition:
            return any(cls.queue and label in cls.labels for cls in self._classes.values())

    def waiting(self) -> int:
        with self._condition:
            return len(self._where)

    def waiting_for(self) -> Counter[Code | Declined]:
        """Return the number of requests per reason; a request counts for each of its reasons."""
        found: Counter[Code | Declined] = Counter()
        with self._condition:
            for cls in self._classes.values():
                for code in {reason.code for reason in cls.reasons} or {Code.NOT_LOOKED_AT}:
                    found[code] += len(cls.queue)
        return found

    # -- the queue (condition held)

    def _remove(self, request_id: str) -> None:
        entry = self._where.pop(request_id, None)
        if entry is None:
            return
        cls, key = entry
        del cls.queue[bisect.bisect_left(cls.queue, (key, request_id))]

    def _claim(self, request_id: str, worker: Pool | None, events: int) -> None:
        """Mark a request as handed to this pool; None: it is being declined.

        ``events``: the event count on which that decision was based.
        """
        self._claimed[request_id] = worker, events
        self._remove(request_id)

    def _queue_again(self, request_id: str) -> None:
        """Put an open request into its class; the mirror has none with unusable fields."""
        request: NodeRequest | None = self.state.zk.request_tree.get(request_id)
        if request is None or request._state != REQUESTED or request_id in self._claimed:
            self._remove(request_id)
            return
        declined = tuple(sorted(set(request.declined_by)))
        class_key = (
            tuple(request.node_types),
            request.provider,
            request.tenant_name,
            declined,
            request.reuse,
            request.requestor == MIN_READY,
        )
        sort_key = request.priority
        entry = self._where.get(request_id)
        cls = self._classes.get(class_key)
        if cls is None:
            cls = self._classes[class_key] = RequestClass(
                tuple(request.node_types),
                request.provider,
                request.tenant_name,
                frozenset(declined),
                may_wait=request.requestor != MIN_READY,
            )
        if entry is not None:
            if entry[0] is cls and entry[1] == sort_key:
                return
            self._remove(request_id)
        bisect.insort(cls.queue, (sort_key, request_id))
        if cls.queue[0][1] == request_id:
            cls.look_again(Code.POOL_PAUSED)  # the former head may wait where a more urgent one need not
        self._where[request_id] = (cls, sort_key)

    def rebuild(self) -> None:
        """Read every request again (after a synchronization)."""
        with self._condition:
            self._dirty.update(dict.fromkeys(self._where))
            self._dirty.update(dict.fromkeys(request.id or "" for request in self.state.zk.request_tree.snapshot()))
            self._wake_all = True
            self._condition.notify()

    # -- the loop

    def run(self) -> None:
        while True:
            with self._condition:
                if not (self._dirty or self._wake_all or self._stopping):
                    due = [self._net.due, self._moves.due, *(each[0] for each in self._resting[:1])]
                    due += [cls.again_at for cls in self._classes.values() if cls.queue]
                    self._condition.wait(max(0.0, min(due) - self.state.clock.monotonic()))
                if self._stopping:
                    return
            try:
                self._pass()
            except Exception:
                self.log.exception("Error assigning requests:")
                with self._condition:
                    self._condition.wait(1.0)

    def _pass(self) -> None:
        ready = self.state.zk.connected and self.state.zk.synced
        with self._condition:
            self._run_timers(ready)
            dirty, self._dirty = self._dirty, {}
            for request_id in dirty:
                self._queue_again(request_id)
            if self._wake_all:
                self._wake_all = False
                self._classes = {key: cls for key, cls in self._classes.items() if cls.queue}
                for cls in self._classes.values():
                    cls.look_again()
            heads = [(cls.queue[0], id(cls), cls) for cls in self._classes.values() if cls.queue and not cls.reasons]
            look_at_moves = ready and self._look_at_moves
            self._look_at_moves = self._look_at_moves and not ready
        if look_at_moves:
            self._moves.look()
        if not ready or not heads:
            return
        heapq.heapify(heads)
        pools = self.state.zk.getRegisteredPools()
        workers = self.state.workers
        for _ in range(ROUND):
            if not heads:
                return
            head, _ident, cls = heapq.heappop(heads)
            self._try_to_decide(cls, head[1], pools, workers)
            with self._condition:
                if cls.queue and not cls.reasons:
                    heapq.heappush(heads, (cls.queue[0], id(cls), cls))
        if heads:
            self._decide_overdue(sorted(heads), pools, workers)
            with self._condition:
                # More to do: start another round, after new requests have been sorted in.
                self._dirty.setdefault(heads[0][0][1], None)

    def _decide_overdue(
        self,
        undecided: list[tuple[tuple[SortKey, str], int, RequestClass]],
        pools: list[RegisteredPool],
        workers: Mapping[str, Pool],
    ) -> None:
        """Decide about the classes that waited longest for a decision.

        Pools that a more urgent class may want are excluded.
        """
        overdue = sorted(undecided, key=lambda entry: entry[2].decided)[:OVERDUE]
        for entry in sorted(overdue):
            head, _ident, cls = entry
            before = {other.labels for better, _, other in undecided if better < head and other is not cls and not other.reasons}
            contested = {p.id for p in pools if any(labels <= p.labels for labels in before)}
            self._try_to_decide(cls, head[1], pools, workers, contested)

    def _try_to_decide(
        self,
        cls: RequestClass,
        request_id: str,
        pools: list[RegisteredPool],
        workers: Mapping[str, Pool],
        contested: Collection[str] = (),
    ) -> None:
        try:
            self._decide(cls, request_id, pools, workers, contested)
        except Exception as error:
            # An error affects only this class, which is rechecked like any waiting one.
            self._log_once(cls, request_id, error)
            with self._condition:
                cls.reasons = (because(Code.ERROR, error=repr(error)),)

    def _run_timers(self, ready: bool) -> None:
        """Process what no event announces (condition held)."""
        now = self.state.clock.monotonic()
        while self._resting and self._resting[0][0] <= now:
            _due, request_id = heapq.heappop(self._resting)
            self._claimed.pop(request_id, None)
            self._dirty[request_id] = None
        for cls in self._classes.values():
            if cls.again_at <= now:
                cls.look_again()
        if now >= self._moves.due:
            self._moves.due, self._look_at_moves = math.inf, True
        if now >= self._net.due:
            self._net.due = now + RESYNC
            if ready:
                self._look_at_everything(now)

    def _look_at_everything(self, now: float) -> None:
        """Compare our state with the mirror and recheck all that wait (condition held)."""
        snapshot = self.state.zk.request_tree.snapshot()
        alive = {request.id for request in snapshot}
        self._left_to_others = {i: left for i, left in self._left_to_others.items() if i in alive}
        found = [*self._net.offered.values(), *(cls.netted for cls in self._classes.values() if cls.netted is not None)]
        moments = [*(events for _pool, events in self._claimed.values()), *(events for events, _reasons in found)]
        oldest = min(moments, default=self._events)  # earlier events are not asked for any more
        self._rechecked = {reason: at for reason, at in self._rechecked.items() if at > oldest}
        adrift = {r.id or "" for r in snapshot if r._state == REQUESTED and not self._is_known(r.id or "")}
        for request_id in self._net.confirmed(adrift, now):
            self._claimed.pop(request_id, None)
            self._dirty[request_id] = None
        for cls in self._classes.values():
            if cls.reasons:
                netted = (self._events, cls.reasons) if all(reason.code.told for reason in cls.reasons) else None
                cls.look_again()
                cls.netted = netted

    def _is_known(self, request_id: str) -> bool:
        worker, _events = self._claimed.get(request_id, (None, 0))
        claimed = request_id in self._claimed and (worker is None or worker.has(request_id))
        return claimed or request_id in self._where or request_id in self._dirty

    def _log_once(self, cls: RequestClass, request_id: str, error: Exception) -> None:
        if cls.logged != repr(error):
            cls.logged = repr(error)
            self.log.error("Cannot assign request %s (%s):", request_id, ",".join(cls.node_types), exc_info=error)

    def _decide(
        self,
        cls: RequestClass,
        request_id: str,
        pools: list[RegisteredPool],
        workers: Mapping[str, Pool],
        contested: Collection[str] = (),
    ) -> None:
        """Decide about the head of a class.

        :param contested: pools that more urgent classes may want, which are not decided yet.
        """
        self.decisions += 1
        cls.decided = self.decisions
        with self._condition:
            events, left = self._events, self._left_to_others.get(request_id)
        now = self.state.clock.monotonic()
        insist = left is not None and now >= left[1] + OTHERS_TURN
        views = {launcher_id: worker.view(cls) for launcher_id, worker in workers.items()}
        decision = choose(cls, pools, views, self.version, insist)
        if decision.pool in contested:
            return
        worker = workers[decision.pool] if decision.pool is not None else None
        again_at = math.inf if left is None or insist else left[1] + OTHERS_TURN
        if decision.decline_by and now < self.others_return_until:
            # All registrations were lost with the session: pools that can serve it may not be registered yet.
            decision = Decision(reasons=(because(Code.AFTER_SESSION_LOSS),))
            again_at = self.others_return_until
        elif decision.decline_by and self.state.is_starting(cls.labels):
            decision = Decision(reasons=(because(Code.REGISTERING),))  # the reload that starts it wakes us
        with self._condition:
            if not cls.queue or cls.queue[0][1] != request_id:
                return
            if worker is None and not decision.decline_by:
                if not self._changed_since(events, *decision.reasons):
                    cls.reasons, cls.again_at = decision.reasons, again_at
                if decision.left_to_others and left is None:
                    self.leave_to_others(request_id)
                return
            if cls.netted is not None and not self._changed_since(cls.netted[0]):
                self._net.offered[request_id] = cls.netted
            self._claim(request_id, worker, events)
        try:
            if worker is not None:
                worker.offer(request_id, decision.check_only, decision.gives_way)
            else:
                decline_for_all(self.state, request_id, decision.decline_by, self.release)
        except Exception as error:
            self._log_once(cls, request_id, error)
            self.release(request_id, retry_after=1.0)  # else it would remain claimed forever

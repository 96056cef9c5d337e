"""The thread that offers requests to pools, in serving order (LAU-2 to LAU-4)."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter

from nodepool.launcher.requests.choice import Decision, choose
from nodepool.launcher.requests.declining import decline_for_all
from nodepool.launcher.requests.moves import OTHERS_TURN, Moves
from nodepool.launcher.requests.queue import Candidate, Claim, ClassKey, RequestQueue, Ticket
from nodepool.launcher.state import LauncherState
from nodepool.reasons import Code, Declined, Reason, because
from nodepool.zk.components import RegisteredPool
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import REQUESTED, NodeRequest

#: Seconds between two comparisons with the mirror, which also recheck everything.
RESYNC = 30.0
#: Seconds for other launchers to register again after a lost session; counted from the reconnect.
REGISTRATION_GRACE = 5.0


class Assignment(threading.Thread):
    """Takes events, asks the queue which request is next, and offers it to a pool."""

    log = logging.getLogger("nodepool.Assignment")

    def __init__(self, state: LauncherState) -> None:
        super().__init__(name="PoolWorker-assignment", daemon=True)
        self.state = state
        #: Guarded by the condition.
        self.queue = RequestQueue()
        self._condition = threading.Condition()
        #: Requests to be read from the mirror.
        self._changed: dict[str, None] = {}
        #: Another pass is necessary now.
        self._stirred = False
        self._stopping = False
        self._resync_at = -math.inf
        #: Claims that no pool knew at the last comparison.
        self._orphans: dict[str, Claim] = {}
        #: Nothing is declined before this moment (monotonic seconds).
        self.others_return_until = 0.0
        self._moves = Moves(state, self.queue.times_left, self.yield_to_others)
        self._check_moves = True

    # -- input, from any thread

    def _stir(self) -> None:
        self._stirred = True
        self._condition.notify()

    def session_lost(self) -> None:
        """Delay declines after a lost session, so that other launchers can register again."""
        self.others_return_until = self.state.clock.monotonic() + REGISTRATION_GRACE

    def request_changed(self, request_id: str, request: NodeRequest | None) -> None:
        """Process a new, changed or deleted request; most of running ones are irrelevant."""
        if (request is not None and request._state == REQUESTED) or request_id in self.queue:
            with self._condition:
                self._changed[request_id] = None
                self._stir()

    def rebuild(self) -> None:
        """Compare the queue with the mirror, which was synchronized."""
        with self._condition:
            self._resync_at = -math.inf
            self._stir()

    def wake(self, recheck: bool = False) -> None:
        """Recheck all waiting requests, because something they may wait for has changed.

        :param recheck: reasons to decline may have changed, too.
        """
        with self._condition:
            self.queue.wake(recheck)
            self._check_moves = True
            # Otherwise the next event triggers it.
            if self.queue or any(worker.paused for worker in self.state.workers.values()):
                self._stir()

    def recheck(self, code: Code, **parameters: object) -> None:
        """Recheck only the classes that wait for this reason."""
        with self._condition:
            if self.queue.recheck(because(code, **parameters)):
                self._stir()

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

        :param retry_after: seconds for which the request rests.
        :param hand_to: launcher id of our pool that has requested it and considers it next.

        For the others see :meth:`RequestQueue.release`.
        """
        worker = self.state.workers.get(hand_to) if hand_to is not None else None
        with self._condition:
            if retry_after > 0:
                self.queue.rest(request_id, self.state.clock.monotonic() + retry_after)
                self._stir()
                return
            ticket = self._ticket(request_id)
            cls = self.queue.release(request_id, ticket, wait_for, checked_by, refused_by, full)
            if cls is not None and worker is not None:
                # Its former pool looks open because of the nodes that it returned, and would
                # get the request again.
                self.queue.claim(request_id, Claim(hand_to, self.queue.changes.moment))
            if cls is not None and cls.is_due:
                self._stir()
        if cls is not None and worker is not None:
            worker.offer(request_id, check_only=False, gives_way=True)

    def yield_to_others(self, request_id: str) -> None:
        """Let other launchers accept the request for :data:`OTHERS_TURN` seconds."""
        with self._condition:
            self.queue.yield_to_others(request_id, self.state.clock.monotonic() + OTHERS_TURN)

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify()

    # -- queries, from any thread

    def explain(self) -> list[tuple[str, tuple[str, ...], str, tuple[Reason, ...]]]:
        """Return (request, labels, state, reasons) of all requests waiting here."""
        with self._condition:
            return self.queue.rows()

    def is_wanted(self, label: str) -> bool:
        """Return whether a request that waits here needs such a node."""
        with self._condition:
            return self.queue.is_wanted(label)

    def waiting(self) -> int:
        return len(self.queue)

    def waiting_for(self) -> Counter[Code | Declined]:
        """Return the number of requests per reason; a request counts for each of its reasons."""
        with self._condition:
            return self.queue.waiting_for()

    # -- the mirror (condition held)

    def _ticket(self, request_id: str) -> Ticket | None:
        """Return the place of an open request; the mirror has none with unusable fields."""
        request: NodeRequest | None = self.state.zk.request_tree.get(request_id)
        if request is None or request._state != REQUESTED:
            return None
        key = ClassKey(
            tuple(request.node_types),
            request.provider,
            request.tenant_name,
            frozenset(request.declined_by),
            request.reuse,
            request.requestor == MIN_READY,
        )
        return key, request.priority

    def _resync(self) -> None:
        """Find what no event has announced, and recheck all that wait."""
        claims = self.queue.claims
        orphans = {i: claim for i, claim in claims.items() if not self._has(i, claim)}
        # A pool may be about to release what it has just finished; twice is too often.
        for request_id in [i for i, claim in orphans.items() if self._orphans.get(i) is claim]:
            del claims[request_id]
        self._orphans = orphans
        states = {r.id or "": r._state for r in self.state.zk.request_tree.snapshot()}
        open_ids = {i for i, state in states.items() if state == REQUESTED}
        self._changed.update(dict.fromkeys(self.queue.strays(states, open_ids)))
        self.queue.wake()

    def _has(self, request_id: str, claim: Claim) -> bool:
        """Return whether somebody will release the claim."""
        worker = self.state.workers.get(claim.holder or "")
        known = claim.holder is None or request_id in self.state.handlers
        return known or (worker is not None and worker.has(request_id))

    # -- the loop

    def run(self) -> None:
        while True:
            with self._condition:
                if not (self._stirred or self._stopping):
                    due = min(self._resync_at, self._moves.due, self.queue.due)
                    self._condition.wait(max(0.0, due - self.state.clock.monotonic()))
                if self._stopping:
                    return
                self._stirred = False
            try:
                self._pass()
            except Exception:
                self.log.exception("Error assigning requests:")
                with self._condition:
                    self._condition.wait(1.0)

    def _pass(self) -> None:
        ready = self.state.zk.connected and self.state.zk.synced
        with self._condition:
            now = self.state.clock.monotonic()
            if now >= self._resync_at:
                self._resync_at = now + RESYNC
                if ready:
                    self._resync()
            changed, self._changed = self._changed, {}
            for request_id in (*self.queue.tick(now), *changed):
                self.queue.put(request_id, self._ticket(request_id))
            if now >= self._moves.due:
                self._moves.due, self._check_moves = math.inf, True
            check_moves = ready and self._check_moves
            self._check_moves = self._check_moves and not ready
            decide = ready and self.queue.is_due
        if check_moves:
            self._moves.check()
        if decide:
            self._decide_round()

    def _decide_round(self) -> None:
        pools, candidates = self.state.zk.getRegisteredPools(), self.queue.round()
        while True:
            with self._condition:
                candidate = next(candidates, None)
                if candidate is None:
                    # More to do: start another round, after new requests have been sorted in.
                    self._stirred = self._stirred or self.queue.is_due
                    return
            try:
                self._decide(candidate, pools)
            except Exception as error:
                # An error affects only this class, which is rechecked like any waiting one.
                self._log_once(candidate, error)
                with self._condition:
                    candidate.cls.reasons = (because(Code.ERROR, error=repr(error)),)

    def _log_once(self, candidate: Candidate, error: Exception) -> None:
        cls = candidate.cls
        if cls.logged != repr(error):
            cls.logged = repr(error)
            message = "Cannot assign request %s (%s):"
            labels = ",".join(cls.key.node_types)
            self.log.error(message, candidate.head[1], labels, exc_info=error)

    def _decide(self, candidate: Candidate, pools: list[RegisteredPool]) -> None:
        """Offer a request to a pool, decline it, or let its class wait."""
        cls, request_id, left_until = candidate.cls, candidate.head[1], candidate.left_until
        now, workers = self.state.clock.monotonic(), self.state.workers
        insist = left_until is not None and now >= left_until
        views = {launcher_id: worker.view(cls) for launcher_id, worker in workers.items()}
        decision = choose(cls, pools, views, self.queue.changes.declines, insist)
        offered = next((pool.labels for pool in pools if pool.id == decision.pool), None)
        if offered is not None and any(labels <= offered for labels in candidate.before):
            return  # a more urgent class may want the pool
        worker = workers[decision.pool] if decision.pool is not None else None
        again_at = math.inf if left_until is None or insist else left_until
        if decision.decline_by and now < self.others_return_until:
            # All registrations were lost with the session: pools that can serve it may not be
            # registered yet.
            decision = Decision(reasons=(because(Code.AFTER_SESSION_LOSS),))
            again_at = self.others_return_until
        elif decision.decline_by and self.state.is_starting(cls.labels):
            # The reload that starts it wakes us.
            decision = Decision(reasons=(because(Code.REGISTERING),))
        with self._condition:
            if cls.queue[:1] != [candidate.head]:
                return
            if worker is None and not decision.decline_by:
                self.queue.postpone(candidate, decision.reasons, again_at)
                if decision.left_to_others and left_until is None:
                    self.queue.yield_to_others(request_id, now + OTHERS_TURN)
                return
            self.queue.claim(request_id, Claim(decision.pool, candidate.moment))
        try:
            if worker is not None:
                worker.offer(request_id, decision.check_only, decision.gives_way)
            else:
                decline_for_all(self.state, request_id, decision.decline_by, self.release)
        except Exception as error:
            self._log_once(candidate, error)
            self.release(request_id, retry_after=1.0)  # else it would remain claimed forever

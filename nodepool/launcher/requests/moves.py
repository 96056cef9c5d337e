"""Move waiting requests from full pools to others, and resolve deadlocks (LAU-6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from nodepool.base.backoff import Backoff
from nodepool.driver.request.base import RequestHandler, RequestHost
from nodepool.launcher.pool import Pool
from nodepool.launcher.requests.choice import eligible_pools
from nodepool.launcher.requests.queue import ClassKey, RequestClass
from nodepool.launcher.state import LauncherState
from nodepool.zk.components import RegisteredPool
from nodepool.zk.records import PENDING, READY

#: Seconds that a request waits for its pool before one of worse priority may serve it.
PATIENCE = 10.0
#: The same before another launcher may serve it; and seconds for the other one to accept it.
OTHERS_TURN = 2.0
#: Seconds between two questions to a pool whether it could serve a request that waits elsewhere.
ASK_AGAIN = 1.0
#: Seconds after which requests that wait with assigned nodes count as waiting for each other.
STANDSTILL = 5.0
#: Seconds for which a request rests whose nodes were deleted in favor of another pool.
LONG_REST = 60.0


@dataclass
class Question:
    """Whether other pools could serve a request that waits."""

    #: When they may be asked again (monotonic seconds).
    again_at: float = -math.inf
    #: Launcher ids of those that have not answered yet.
    unanswered: set[str] = field(default_factory=set)


class Moves:
    """Finds another pool for paused requests; only for the assignment's thread.

    :param times_left: how often the request was left to other launchers.
    :param yield_to_others: leaves it to them now.
    """

    def __init__(
        self,
        state: LauncherState,
        times_left: Callable[[str], int],
        yield_to_others: Callable[[str], None],
    ) -> None:
        self._state = state
        self._times_left = times_left
        self._yield_to_others = yield_to_others
        #: When to check without an event (monotonic seconds).
        self.due = math.inf
        #: About the requests that wait here.
        self.questions: WeakKeyDictionary[RequestHandler, Question] = WeakKeyDictionary()

    def check(self) -> None:
        self.due = math.inf
        workers = self._state.workers
        paused = [h for worker in workers.values() for h in list(worker.paused_handlers)]
        if not paused:
            return
        pools = self._state.zk.getRegisteredPools()
        for handler in sorted(paused, key=lambda h: h.request.priority):
            if handler.accepted and not handler.done:
                self._check_pools(handler, pools, workers)

    def _check_pools(
        self, handler: RequestHandler, pools: list[RegisteredPool], workers: Mapping[str, Pool]
    ) -> None:
        request, own_id = handler.request, handler.launcher_id
        labels, declined = tuple(request.node_types), frozenset(request.declined_by)
        cls = RequestClass(ClassKey(labels, request.provider, request.tenant_name, declined))
        eligible = sorted(eligible_pools(cls, pools), key=lambda p: p.priority)
        mine = next((p for p in eligible if p.id == own_id), None)
        if mine is None:
            return
        able: list[Pool] = []
        for pool in eligible:
            worker = workers.get(pool.id)
            if pool is mine or (
                not _is_open(worker, cls) if worker is not None else not pool.is_open_to(cls.labels)
            ):
                continue
            patience = PATIENCE if pool.priority > mine.priority else 0.0
            if worker is None:
                # They cannot be asked: wait longer each time, and not if it already has nodes.
                turns = 1 + self._times_left(request.id or "")
                patience = max(patience, Backoff(OTHERS_TURN, 256 * OTHERS_TURN).pause(turns))
            if self._state.clock.monotonic() < handler.paused_since + patience:
                self.due = min(self.due, handler.paused_since + patience)
            elif worker is not None:
                able.append(worker)
            elif not handler.nodeset and not able:
                self._yield_to_others(request.id or "")
                handler.pw.post(handler, handler.move)
                return
        if able:
            self._ask(able, handler)

    def _ask(self, workers: list[Pool], handler: RequestHandler) -> None:
        """Ask the first pool without a pending question; a pool that refuses asks the next one."""
        now, question = (
            self._state.clock.monotonic(),
            self.questions.setdefault(handler, Question()),
        )
        if now >= question.again_at:
            question.again_at = now + ASK_AGAIN
            workers = [
                worker for worker in workers if worker.launcher_id not in question.unanswered
            ]
            if workers:
                workers[0].ask(handler, question.unanswered, workers[1:])
        self.due = min(self.due, question.again_at)


def _is_open(worker: Pool, cls: RequestClass) -> bool:
    view = worker.view(cls)
    return not (view.paused or view.closed or view.full or view.refuses)


def end_standstill(state: LauncherState, worker: RequestHost) -> None:
    """Release the nodes of the last paused request of a provider after a long standstill.

    An earlier request has waited for them for long; otherwise each could hold what the other needs,
    forever. Nodes of the same pool are kept for the earlier request; those of another pool are
    deleted, because they occupy the quota of the provider.
    """
    waiting = [
        h for w in state.getPoolWorkers(worker.provider_name) for h in list(w.paused_handlers)
    ]
    worst = max((h for h in waiting if h.nodeset), key=lambda h: h.request.priority, default=None)
    if (
        worst is None
        or worst.pw is not worker
        or state.clock.monotonic() - worst.paused_since < STANDSTILL
        or any(node.state != READY for node in worst.nodeset)
    ):
        return
    better = [
        h
        for h in waiting
        if h.request.priority < worst.request.priority
        and state.clock.monotonic() - h.paused_since >= STANDSTILL
    ]
    here = [h.request.id for h in better if h.pw is worker] or _stuck_elsewhere(
        state, worker, worst
    )
    there = [h.request.id for h in better if h.wants_more_of_provider]
    if here or there:
        worst.log.info(
            "Releasing request and nodes: request %s, which comes first, waits for capacity of the "
            "same provider",
            (here or there)[0],
        )
        worker.post(worst, worst.move, STANDSTILL if here else LONG_REST, not here)


def _stuck_elsewhere(state: LauncherState, worker: RequestHost, worst: RequestHandler) -> list[str]:
    """Return earlier pending requests of other launchers that are stuck with our nodes.

    All of their nodes belong to our pool and have been ready for long.
    """
    zk, now = state.zk, state.clock.time()
    tree = zk.node_tree
    with tree.lock:
        candidates = {i: list(ids) for i, ids in tree.by_request.items() if i}
    found = []
    for request_id, node_ids in candidates.items():
        request = zk.request_tree.get(request_id)
        if (
            request is None
            or request.state != PENDING
            or request.priority >= worst.request.priority
            or request_id in state.handlers
        ):
            continue
        nodes = [node for node in map(tree.get, node_ids) if node is not None]
        if nodes and all(
            (n.provider, n.pool, n.state) == (worker.provider_name, worker.pool_name, READY)
            and now - (n.state_time or 0) >= STANDSTILL
            for n in nodes
        ):
            found.append(str(request_id))
    return found

"""One provider pool: runs the handlers of its requests (LAU-5 to LAU-7)."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable

from nodepool.base import hostnames
from nodepool.driver.quota.support import LimitsPending, QuotaSupport, counts_labels
from nodepool.driver.request.base import RequestHandler
from nodepool.driver.request.state import How, Outcome
from nodepool.exceptions import FOREIGN
from nodepool.launcher.pool import Pool
from nodepool.launcher.pools.admission import PoolAdmission
from nodepool.launcher.pools.capacity import PoolCapacity
from nodepool.launcher.pools.fullness import FORGET
from nodepool.launcher.requests import moves
from nodepool.launcher.requests.assignment import Assignment
from nodepool.launcher.state import LauncherState
from nodepool.metrics import tracing
from nodepool.reasons import Code, because
from nodepool.zk.components import PoolComponent
from nodepool.zk.records import REQUESTED

#: Seconds between two checks for changes that no event announces.
TICK = 1.0


class PoolWorker(threading.Thread, PoolAdmission):
    """The thread of one pool. Drivers know it as ``pw`` (DRV-5.1).

    :param request_dropped: called with the id of a request that remains unchanged in ZooKeeper.
    """

    def __init__(
        self,
        state: LauncherState,
        assignment: Assignment,
        provider_name: str,
        pool_name: str,
        request_dropped: Callable[[str], object],
    ) -> None:
        PoolAdmission.__init__(self, state, assignment, provider_name, pool_name)
        threading.Thread.__init__(self, name=f"PoolWorker.{self.label}", daemon=True)
        self.launcher_id = f"{hostnames.fqdn()}-{self.name}-{uuid.uuid4().hex}"
        self.component: PoolComponent | None = None
        self._door = threading.Lock()
        self._closed = False
        self.capacity = PoolCapacity(self)
        self._leaving = False
        self._request_dropped = request_dropped

    # -- what handlers use

    def progress(self, handler: RequestHandler) -> None:
        """Let the handler check its launches, because one has ended."""
        self.post(handler, handler.poll)
        self._launches_ended()

    def ended(self, handler: RequestHandler, outcome: Outcome) -> None:
        """Clean up after a handler; the outcome decides what happens to the request."""
        if not handler.done:  # its launches still run
            self.assignment.release(handler.request.id or "", hand_to=outcome.hand_to)
            return
        self.capacity.end_creation(handler)
        if handler in self.request_handlers:
            self.request_handlers.remove(handler)
        if handler in self.paused_handlers:
            self.paused_handlers.discard(handler)
            self.assignment.wake()  # others may overtake those that still wait
        if self.nodepool.handlers.get(handler.request.id or "") is handler:
            del self.nodepool.handlers[handler.request.id or ""]
        self.nodepool.zk.reservations.release(("tenant", handler))
        tracer, trace = tracing.current(), None
        if tracer is not None:
            trace = tracer.request_ended(
                handler.request, outcome.how.name.lower(), self.provider_name, self.pool_name
            )
        if outcome.how is How.FULFILLED:
            for label in set(handler.request.node_types):
                handler.manager.label_problems.clear(label, self.pool_name)
            self.nodepool.request_fulfilled(handler.request, handler.accepted_time, trace)
        self._release_claim(handler, outcome)
        if outcome.retry_after or outcome.how in (How.WITHDRAWN, How.REFUSED):
            self._launches_ended()
        if handler.life.promised:
            # Other requests of the tenant may wait for the quota promised to this one.
            self.assignment.recheck(Code.TENANT_LIMIT, tenant=handler.request.tenant_name)

    def _release_claim(self, handler: RequestHandler, outcome: Outcome) -> None:
        request_id, reason = handler.request.id or "", outcome.wait_for
        if handler.life.released:
            self.assignment.wake()  # another pool may have the request by now: its claim remains
        elif outcome.how is How.WITHDRAWN:
            checked_by = self.launcher_id if outcome.checked else None
            self.assignment.release(
                request_id,
                wait_for=reason or self.paused_reason(),
                checked_by=checked_by,
                refused_by=self.launcher_id,
            )
        elif outcome.how is How.REFUSED:
            if reason is None:
                told = counts_labels(self.getProviderManager())
                reason = because(Code.NOTHING_FREE if told else Code.NOTHING_FREE_NO_EVENT)
            self.assignment.release(
                request_id,
                wait_for=reason,
                refused_by=self.launcher_id,
                full=handler.life.gives_way,
            )
        else:
            self.assignment.release(
                request_id, retry_after=outcome.retry_after, hand_to=outcome.hand_to
            )
            if not outcome.retry_after:
                self.assignment.wake()
            if outcome.how is How.DROPPED:
                self._request_dropped(request_id)

    # -- what the assignment uses

    def offer(self, request_id: str, check_only: bool, gives_way: bool = False) -> None:
        """Queue a request for this pool.

        ``gives_way``: another pool is open, if this one has no capacity.
        """
        with self._door:
            if not self._closed:
                self.backlog.ids.add(request_id)
                self._tasks.put((self._consider, (request_id, check_only, gives_way)))
                return
        self.assignment.release(request_id)

    # -- requests

    def _consider(self, request_id: str, check_only: bool, gives_way: bool = False) -> None:
        try:
            self._take_on(request_id, check_only, gives_way)
        finally:
            if self.backlog.considered(request_id, self.paused):  # also after a failure
                self.assignment.recheck(Code.BUSY)

    def _take_on(self, request_id: str, check_only: bool, gives_way: bool) -> None:
        request = self.getZK().request_tree.get(request_id)
        if (
            request is None
            or request.state != REQUESTED
            or self.launcher_id in request.declined_by
            or not self.running
        ):
            self.backlog.ids.discard(request_id)
            self.assignment.release(request_id)
            self._launches_ended()
            return
        manager = self.getProviderManager()
        if manager is None:
            self.assignment.release(
                request_id, wait_for=because(Code.PROVIDER_NOT_RUNNING), refused_by=self.launcher_id
            )
            self._launches_ended()
            return
        try:
            handler = manager.getRequestHandler(self, request.copy())
        except FOREIGN as error:
            self.log.exception("The driver cannot handle request %s:", request_id)
            manager.label_problems.driver_failed(request.node_types, self.pool_name, error)
            self.assignment.release(request_id, retry_after=30.0)
            self._launches_ended()
            return
        self.nodepool.handlers[request_id] = handler
        self.request_handlers.append(handler)
        self.backlog.ids.discard(request_id)
        if handler.BLOCKING:
            self.post(handler, handler.life.begin, check_only, gives_way)
        else:  # this is its thread
            handler.life.begin(check_only, gives_way)

    def ask(self, waiting: RequestHandler, unanswered: set[str], others: list[Pool]) -> None:
        """Request a move of what waits at another pool of ours if this pool has capacity for all.

        :param unanswered: launcher ids of pools that have not answered; contains ours meanwhile.
        :param others: pools to ask next, in this order, if this one has none.
        """
        unanswered.add(self.launcher_id)
        self._tasks.put((self._ask_driver, (waiting, unanswered, others)))

    def _ask_driver(
        self, waiting: RequestHandler, unanswered: set[str], others: list[Pool]
    ) -> None:
        try:
            manager = self.getProviderManager()
            assert manager is not None
            handler = manager.getRequestHandler(self, waiting.request.copy())
        except FOREIGN as error:
            self._log_once("The driver cannot handle a request:", error)
            self._decline(waiting, unanswered, others)
        else:
            self.post(handler, self._answer, handler, waiting, unanswered, others)

    def _decline(self, waiting: RequestHandler, unanswered: set[str], others: list[Pool]) -> None:
        unanswered.discard(self.launcher_id)
        if others:
            others[0].ask(waiting, unanswered, others[1:])

    def _answer(
        self,
        handler: RequestHandler,
        waiting: RequestHandler,
        unanswered: set[str],
        others: list[Pool],
    ) -> None:
        try:
            if not self.paused and self.running and handler.could_serve():
                unanswered.discard(self.launcher_id)
                waiting.pw.post(waiting, waiting.move, 0.0, False, self.launcher_id)
                return
        except LimitsPending as error:
            self.log.debug("Not requesting a move of request %s: %s", waiting.request.id, error)
        except FOREIGN as error:
            self._log_once(
                "Cannot decide whether there is capacity for a request that waits at another pool:",
                error,
            )
        self._decline(waiting, unanswered, others)

    # -- events

    def _poll_limits(self) -> None:
        """Poll the limits: no event announces that they grow."""
        manager = self.getProviderManager()
        if isinstance(manager, QuotaSupport) and any(
            h.wants_more_of_provider is not False for h in list(self.paused_handlers)
        ):
            manager.limits_are_waited_for(self.capacity.limits_known)

    def refresh(self) -> None:
        """Publish labels and priority and check everything again.

        After changes of the configuration and of drains.
        """
        self._tasks.put((self._publish, ()))
        self._tasks.put((self._release_drained, ()))
        self.capacity_changed()

    def _release_drained(self) -> None:
        """Release requests that wait for capacity although the pool is drained for them."""
        pool = self.getPoolConfig()
        if pool is not None and self.nodepool.drains.all():
            for handler in self._paused_for():
                labels, manager = handler.request.node_types, self.getProviderManager()
                if self.nodepool.drains.blocked(pool, labels, manager) is not None:
                    self.post(handler, handler.hand_back)

    def _publish(self) -> None:
        self._publish_at = None
        provider, pool = self.getProviderConfig(), self.getPoolConfig()
        if self.component is None or provider is None or pool is None:
            return
        priority = pool.priority if pool.priority is not None else provider.priority
        full = self._full.labels & set(pool.labels)
        self.component.update(
            supported_labels=sorted(pool.labels),
            # A label without capacity does not affect the others: launchers of 11.0.0 read
            # ``paused`` only.
            paused=self.paused
            or (bool(full) and full == set(pool.labels))
            or self.nodepool.drains.of_pool(pool) is not None,
            # An additional key of ours, only written if not empty.
            **(
                {"full_labels": sorted(full)}
                if full or self.component.content.get("full_labels")
                else {}
            ),
            priority=100 if priority is None else priority,
        )

    # -- the thread

    def run(self) -> None:
        self.running = True
        try:
            self._register()
        except FOREIGN:
            self.log.exception("Cannot register the pool:")
        next_tick = self.clock.monotonic() + TICK
        while not (self._leaving and not self.request_handlers and not self.backlog.ids):
            now = self.clock.monotonic()
            if self._publish_at is not None and now >= self._publish_at:
                self.guard(self._publish, ())
            if now >= next_tick:
                next_tick = now + TICK
                self.guard(self._tick, ())
            try:
                task = self._tasks.get(timeout=self._pause(next_tick))
            except queue.Empty:
                continue
            if task is None:
                break
            self.guard(*task)
        self.running = False
        self._close_door()

    def _close_door(self) -> None:
        """Release requests that arrived last, since nobody would process them."""
        with self._door:
            self._closed = True
        for request_id in list(self.backlog.ids):
            self.backlog.ids.discard(request_id)
            self.assignment.release(request_id)

    def _pause(self, next_tick: float) -> float | None:
        ticking = (
            self.request_handlers or self._full.labels or (self.component is None and self.running)
        )
        due = [t for t in (self._publish_at, next_tick if ticking else None) if t is not None]
        return max(0.0, min(due) - self.clock.monotonic()) if due else None

    def _tick(self) -> None:
        """Check what no event announces: external quota, threads of classic drivers."""
        if self.component is None and self.running and self.nodepool.zk.connected:
            self.guard(self._register, ())
        self._room(FORGET)
        self._retry()
        if self.paused_handlers:
            self.guard(self._poll_limits, ())
            self.guard(self._release_drained, ())
            self.guard(moves.end_standstill, (self.nodepool, self))
        polled = [
            handler
            for handler in list(self.request_handlers)
            if handler.BLOCKING and not handler.paused
        ]
        for handler in polled:
            self.post(handler, handler.poll)
        if polled:
            self._launches_ended()  # launches in threads of the driver

    def _register(self) -> None:
        provider, pool = self.getProviderConfig(), self.getPoolConfig()
        if provider is None or pool is None:
            return
        component = PoolComponent(self.nodepool.zk.client, hostnames.short())
        priority = pool.priority if pool.priority is not None else provider.priority
        component.content.update(
            id=self.launcher_id,
            name=self.pool_name,
            provider_name=self.provider_name,
            state=component.RUNNING,
            supported_labels=sorted(pool.labels),
            priority=100 if priority is None else priority,
        )
        component.register()
        self.component = component

    # -- stopping

    def retire(self) -> None:
        """Release all requests, then stop: the pool is no longer configured.

        Unregister now; the thread ends when the last handler has ended.
        """
        self.running = False
        for handler in list(self.request_handlers):
            self.post(handler, handler.hand_back)
        self._unregister()
        self._tasks.put((self._retire_when_idle, ()))

    def _retire_when_idle(self) -> None:
        self._leaving = True

    def stop(self) -> None:
        self.running = False
        self._tasks.put(None)
        self._unregister()

    def _unregister(self) -> None:
        component, self.component = self.component, None
        if component is not None:
            component.unregister()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        self._helpers.shutdown(wait=False, cancel_futures=True)

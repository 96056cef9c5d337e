"""PoolCapacity: turns, pauses and promised quota of one pool (LAU-5, LAU-6)."""

from __future__ import annotations

import threading

from nodepool.driver.quota.support import QuotaSupport
from nodepool.driver.request.base import RequestHandler
from nodepool.driver.request.state import End, How, Outcome
from nodepool.launcher.pools.admission import PoolAdmission
from nodepool.launcher.requests.tenants import tenant_shortage
from nodepool.reasons import Code, Reason


class PoolCapacity:
    """Capacity of one pool, for its handlers."""

    def __init__(self, pool: PoolAdmission) -> None:
        self._pool = pool
        self.label = pool.label
        self._lock = threading.Lock()
        self._creator: object = None
        #: Handlers that wait for their turn to create nodes.
        self.queue: list[RequestHandler] = []

    # -- turns

    def begin_creation(self, handler: RequestHandler) -> bool:
        """Return whether the handler may create nodes now; otherwise ``run`` is called later.

        Handlers on helper threads fill their node sets sequentially: several with a part of their
        nodes each would wait for each other forever.
        """
        with self._lock:
            if self._creator is None or self._creator is handler:
                self._creator = handler
                return True
            if handler not in self.queue:
                self.queue.append(handler)
            return False

    def end_creation(self, handler: RequestHandler) -> None:
        """Let the next handler create nodes: those of this one are recorded, or will not be."""
        with self._lock:
            if handler in self.queue:
                self.queue.remove(handler)
            if self._creator is not handler:
                return
            self._creator = None
            following = min(self.queue, key=lambda waiting: waiting.request.priority, default=None)
            if following is not None:
                self.queue.remove(following)
        if following is not None:
            self._pool.post(following, following.run)

    # -- pauses

    def blocks(self, handler: RequestHandler) -> bool:
        key = handler.request.priority[:2]
        return any(
            not waiting.holds_nothing or waiting.request.priority[:2] <= key
            for waiting in list(self._pool.paused_handlers)
        )

    def pause_changed(self, handler: RequestHandler) -> None:
        pool, before, waited = self._pool, self._pool.paused, handler in self._pool.paused_handlers
        if handler.paused:
            pool.paused_handlers.add(handler)
        else:
            pool.paused_handlers.discard(handler)
        if before != pool.paused:
            pool.publish_soon()
        if before != pool.paused or (waited and not handler.paused):
            # Others may overtake those that still wait, for example after the one that held nodes.
            pool.assignment.wake()

    def note_full(self, labels: list[str], reason: Reason) -> None:
        self._pool.note_full(labels, reason)

    # -- quota

    def promise(self, handler: RequestHandler) -> bool:
        """Promise the nodes of the request to its tenant; return False without limits for it.

        :raises End: the limits of the tenant are not sufficient now.
        """
        request, state = handler.request, self._pool.nodepool
        limits = (
            state.config.tenant_resource_limits.get(request.tenant_name)
            if request.tenant_name
            else None
        )
        pool, manager = self._pool.getPoolConfig(), self._pool.getProviderManager()
        if not limits or pool is None or not isinstance(manager, QuotaSupport):
            return False
        if any(label not in pool.labels for label in request.node_types):
            return False
        shortage = tenant_shortage(state, request, limits, pool, manager, handler)
        if shortage is not None:
            raise End(Outcome(How.WITHDRAWN, wait_for=shortage))
        return True

    def recorded(self, handler: RequestHandler, missing: list[str]) -> None:
        """Reduce the tenant's promise to the missing labels; the other nodes are in the mirror."""
        tenant, state = handler.request.tenant_name, self._pool.nodepool
        if (
            not tenant
            or tenant not in state.config.tenant_resource_limits
            or not isinstance(handler.manager, QuotaSupport)
        ):
            return
        key, reservations = ("tenant", handler), state.zk.reservations
        if missing:
            needed = handler.manager.quotaNeededByLabels(missing, handler.pool)
            reservations.reserve(key, None, None, tenant, needed.get_resources())
        else:
            reservations.release(key)
        # Between the change of the mirror and this call they were counted twice.
        self._pool.assignment.recheck(Code.TENANT_LIMIT, tenant=tenant)

    def promise_released(self) -> None:
        """Retry paused handlers, because quota promised to nodes that failed is free again."""
        for worker in self._pool.nodepool.getPoolWorkers(self._pool.provider_name):
            worker.capacity_changed()

    def limits_known(self) -> None:
        """Retry after the limits of the provider were read again; callable from any thread."""
        self._pool.capacity_changed()
        self._pool.assignment.wake()

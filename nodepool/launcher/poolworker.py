"""One provider pool: runs the handlers of its requests (launcher.md sections 5 - 7)."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nodepool import hostnames
from nodepool.driver.quota import QuotaSupport
from nodepool.driver.resources import QuotaInformation
from nodepool.launcher.tenants import tenant_shortage
from nodepool.zk.components import PoolComponent
from nodepool.zk.records import REQUESTED

if TYPE_CHECKING:
    from nodepool.launcher.assignment import RequestClass
    from nodepool.launcher.pool import NodePool

#: Requests handed to a pool that it has not looked at yet; more wait in serving order.
BACKLOG = 48
#: Helper threads of a pool whose driver's checks may block.
HELPERS = 8
#: Seconds between two looks at handlers that no event announces.
TICK = 1.0
#: Seconds during which changes of ``paused`` are collected before they are published.
PUBLISH_DELAY = 0.05

Task = tuple[Callable[..., Any], tuple[Any, ...]]


class _Mailbox:
    """Runs the steps of one handler one after the other on helper threads."""

    def __init__(self, worker: PoolWorker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._running = False

    def put(self, task: Task) -> None:
        with self._lock:
            self._tasks.append(task)
            if self._running:
                return
            self._running = True
        self._worker.help(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._running = False
                    return
                function, args = self._tasks.popleft()
            self._worker.guard(function, args)


class PoolWorker(threading.Thread):
    """The thread of one pool.  Drivers see it as ``pw`` (driver-api.md 5.1)."""

    def __init__(self, nodepool: NodePool, provider_name: str, pool_name: str) -> None:
        super().__init__(name=f"PoolWorker.{provider_name}-{pool_name}", daemon=True)
        self.nodepool = nodepool
        self.provider_name = provider_name
        self.pool_name = pool_name
        self.label = f"{provider_name}-{pool_name}"
        self.log = logging.getLogger(f"nodepool.{self.name}")
        self.launcher_id = f"{hostnames.fqdn()}-{self.name}-{uuid.uuid4().hex}"
        self.running = False
        self.paused_handlers: set[Any] = set()
        self.request_handlers: list[Any] = []
        self.component: PoolComponent | None = None
        self.backlog = 0
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._mailboxes: dict[Any, _Mailbox] = {}
        self._creation_lock = threading.Lock()
        self._creator: Any = None
        self._creation_queue: deque[Any] = deque()
        self._helpers: ThreadPoolExecutor | None = None
        self._retry_queued = False
        self._publish_at: float | None = None
        self._counts_labels: bool | None = None
        self._logged: set[str] = set()
        self._leaving = False

    # -- what drivers use

    def getZK(self) -> Any:
        return self.nodepool.getZK()

    def getProviderConfig(self) -> Any:
        return self.nodepool.config.providers.get(self.provider_name)

    def getPoolConfig(self) -> Any:
        provider = self.getProviderConfig()
        return provider.pools.get(self.pool_name) if provider is not None else None

    def getProviderManager(self) -> Any:
        return self.nodepool.config.provider_managers.get(self.provider_name)

    # -- what handlers use

    def post(self, handler: Any, function: Callable[..., Any], *args: Any) -> None:
        """Run the next step of a handler; steps of one handler never overlap."""
        if not handler.BLOCKING:
            self._tasks.put((function, args))
            return
        mailbox = self._mailboxes.get(handler)
        if mailbox is None:
            mailbox = self._mailboxes.setdefault(handler, _Mailbox(self))
        mailbox.put((function, args))

    def progress(self, handler: Any) -> None:
        """A launch of this handler has ended."""
        self.post(handler, handler.poll)

    def claim(self, node_id: str | None) -> bool:
        return self.nodepool.claims.claim(node_id)

    def unclaim(self, node_id: str | None) -> None:
        self.nodepool.claims.release(node_id)

    def begin_creation(self, handler: Any) -> bool:
        """Whether the handler may make new nodes now; else ``run`` is called when it may.

        Handlers that run on helper threads fill their node sets one after the other: several of them, each with some
        of its nodes, would wait for each other for ever.
        """
        with self._creation_lock:
            if self._creator is None or self._creator is handler:
                self._creator = handler
                return True
            if handler not in self._creation_queue:
                self._creation_queue.append(handler)
            return False

    def withdraw_paused(self, handler: Any) -> None:
        """The handler was not accepted yet, and the pool has paused."""
        self.withdraw(handler, wait_for=f"{self.label}: paused at quota", checked_by=self.launcher_id)

    def end_creation(self, handler: Any) -> None:
        """The new nodes are recorded, or will not be."""
        with self._creation_lock:
            if handler in self._creation_queue:
                self._creation_queue.remove(handler)
            if self._creator is not handler:
                return
            self._creator = None
            following = self._creation_queue.popleft() if self._creation_queue else None
        if following is not None:
            self.post(following, following.run)

    def pause_changed(self, handler: Any) -> None:
        before = self.paused
        if handler.paused:
            self.paused_handlers.add(handler)
        else:
            self.paused_handlers.discard(handler)
        if before != self.paused:
            if self._publish_at is None:
                self._publish_at = time.monotonic() + PUBLISH_DELAY
                self._tasks.put((self._nothing, ()))
            self.nodepool.assignment.wake()

    def recorded(self, handler: Any, missing: list[str]) -> None:
        """Nodes of the handler are in the mirror now: the tenant's promise shrinks to the labels still missing."""
        tenant = handler.request.tenant_name
        if not tenant or tenant not in self.nodepool.config.tenant_resource_limits \
                or not isinstance(handler.manager, QuotaSupport):
            return
        key, reservations = ("tenant", handler), self.getZK().reservations
        needed = QuotaInformation()
        for label in missing:
            needed.add(handler.manager.quotaNeededByLabel(label, handler.pool))
        if missing:
            reservations.reserve(key, None, None, tenant, needed.get_resources())
        else:
            reservations.release(key)

    def make_room(self, handler: Any) -> None:
        """No quota: an idle node of this pool may have to go."""
        manager = self.getProviderManager()
        if manager is not None and manager.PAUSE_AT_QUOTA:
            self.getZK().deleteOldestUnusedNode(self.provider_name, self.pool_name)

    def retry_later(self, handler: Any) -> None:
        """The provider refused for quota; :meth:`_tick` tries again."""

    def request_released(self, handler: Any) -> None:
        """The request is open again while launches of this handler still run."""
        self.nodepool.assignment.release(handler.request.id)

    def finished(self, handler: Any, retry_after: float | None = None) -> None:
        """The handler has come to its end; ``retry_after``: the request was given back unserved."""
        self.end_creation(handler)
        if handler in self.request_handlers:
            self.request_handlers.remove(handler)
        self.paused_handlers.discard(handler)
        self._mailboxes.pop(handler, None)
        self.nodepool.handler_finished(handler)
        assignment = self.nodepool.assignment
        if retry_after is None:
            assignment.release(handler.request.id)
            assignment.wake()
        elif retry_after > 0:
            assignment.release(handler.request.id, retry_after=retry_after)
            self._launches_ended()
        else:
            assignment.release(handler.request.id, wait_for="nothing free", refused_by=self.launcher_id)
            self._launches_ended()

    # -- what the assignment uses

    @property
    def paused(self) -> bool:
        return bool(self.paused_handlers)

    @property
    def load(self) -> int:
        return len(self.request_handlers) + self.backlog

    def admission(self, cls: RequestClass) -> str | None:
        """None when the pool takes (further) requests of this class now, else why not.

        A driver or an option that raises closes this pool only, and says so where people look for the reason.
        """
        try:
            return self._admission(cls)
        except Exception as error:
            self._log_once("Cannot tell whether the pool takes a request:", error)
            return f"error: {error!r}"

    def _log_once(self, message: str, error: Exception) -> None:
        key = message + repr(error)
        if key not in self._logged and len(self._logged) < 100:
            self._logged.add(key)
            self.log.error("%s", message, exc_info=error)

    def _admission(self, cls: RequestClass) -> str | None:
        provider, manager = self.getProviderConfig(), self.getProviderManager()
        if not self.running or provider is None or manager is None:
            return "not running"
        if provider.max_concurrency == 0:
            return "max-concurrency is 0"
        if self.backlog >= BACKLOG:
            return "busy"
        if self._counts_labels is None:
            self._counts_labels = isinstance(manager, QuotaSupport) and (
                type(manager).getLabelQuota is not QuotaSupport.getLabelQuota)
        if self._counts_labels:
            quota = manager.getLabelQuota()
            short = [label for label in cls.labels if quota.get(label, 0) <= 0]
            if short:
                return f"no free node of {','.join(sorted(short))}"
        if provider.max_concurrency > 0:
            active = sum(worker.active_launches() for worker in self.nodepool.getPoolWorkers(self.provider_name))
            if active >= provider.max_concurrency:
                return f"max-concurrency: {active} launches under way"
        return None

    def active_launches(self) -> int:
        return self.backlog + sum(self._launches(handler) for handler in list(self.request_handlers))

    def _launches(self, handler: Any) -> int:
        try:
            alive = int(handler.alive_thread_count)
        except Exception as error:
            self._log_once("The driver cannot tell how many launches are under way; all of the request count:", error)
            return len(handler.request.node_types)
        if alive or handler.nodeset or handler.paused or handler.done:
            return alive
        return len(handler.request.node_types)  # just taken on: its launches are about to begin

    def _launches_ended(self) -> None:
        """What counted as launches to come does so no more."""
        provider = self.getProviderConfig()
        if provider is not None and provider.max_concurrency != -1:
            self.nodepool.assignment.recheck("max-concurrency")

    def offer(self, request_id: str, check_only: bool) -> None:
        self.backlog += 1
        self._tasks.put((self._consider, (request_id, check_only)))

    # -- requests

    def _consider(self, request_id: str, check_only: bool) -> None:
        self.backlog -= 1
        if self.backlog == BACKLOG // 2:
            self.nodepool.assignment.wake()
        assignment = self.nodepool.assignment
        zk = self.getZK()
        request = zk.request_tree.get(request_id)
        if request is None or request.state != REQUESTED or self.launcher_id in request.declined_by \
                or not self.running:
            assignment.release(request_id)
            self._launches_ended()
            return
        manager = self.getProviderManager()
        if manager is None:
            assignment.release(request_id, wait_for="the provider is not running",
                               refused_by=self.launcher_id)
            self._launches_ended()
            return
        try:
            handler = manager.getRequestHandler(self, request.copy())
        except Exception as error:
            self.log.exception("The driver cannot handle request %s:", request_id)
            self.nodepool.declines.driver_failed(self, request, error)
            assignment.release(request_id, retry_after=30.0)
            self._launches_ended()
            return
        self.request_handlers.append(handler)
        self.nodepool.handler_started(handler)
        self.post(handler, self._begin, handler, manager, check_only)

    def _begin(self, handler: Any, manager: Any, check_only: bool) -> None:
        """First step of a handler: only look while the pool is paused, else serve it."""
        try:
            if isinstance(manager, QuotaSupport):
                shortage = self._tenant_shortage(handler, manager)
                if shortage is not None:
                    self.withdraw(handler, wait_for=shortage)
                    return
            if check_only or self.paused:
                reasons = handler.getDeclinedReasons()
                if not reasons:
                    self.withdraw(handler, wait_for=f"{self.label}: paused at quota", checked_by=self.launcher_id)
                    return
                handler.log.info("Declining node request because: %s", ", ".join(reasons))
                handler.declined_because = "; ".join(reasons)
                handler.declineRequest()
                return
        except Exception as error:
            handler.trouble(error)
            return
        handler.run()

    def withdraw(self, handler: Any, wait_for: str, checked_by: str | None = None) -> None:
        """The handler has not accepted its request, which waits for a change now."""
        handler.done = True
        if handler in self.request_handlers:
            self.request_handlers.remove(handler)
        self._mailboxes.pop(handler, None)
        self.nodepool.handler_finished(handler)
        self.nodepool.assignment.release(
            handler.request.id, wait_for=wait_for, checked_by=checked_by, refused_by=self.launcher_id)
        self._launches_ended()

    def _tenant_shortage(self, handler: Any, manager: Any) -> str | None:
        request = handler.request
        limits = self.nodepool.config.tenant_resource_limits.get(request.tenant_name) if request.tenant_name else None
        if not limits:
            return None
        pool = self.getPoolConfig()
        if any(label not in pool.labels for label in request.node_types):
            return None
        return tenant_shortage(self.nodepool, request, limits, pool, manager, handler)

    # -- events

    def capacity_changed(self) -> None:
        """Quota may have become free: paused handlers try again, in request order."""
        if self.paused_handlers and not self._retry_queued:
            self._retry_queued = True
            self._tasks.put((self._retry_paused, ()))

    def limits_known(self) -> None:
        """The limits of the provider have been asked for again; from any thread."""
        self.capacity_changed()
        self.nodepool.assignment.wake()

    def _retry_paused(self) -> None:
        self._retry_queued = False
        for handler in sorted(self.paused_handlers, key=lambda h: h.request.priority):
            self.post(handler, handler.run)

    def session_lost(self) -> None:
        """All our locks are gone: drop every handler, others (or we) start anew."""
        for handler in list(self.request_handlers):
            self.post(handler, handler.drop)

    def refresh(self) -> None:
        """The configuration has changed: publish labels and priority, look at everything again."""
        self._tasks.put((self._publish, ()))
        self.capacity_changed()

    def _nothing(self) -> None:
        """Wakes the thread."""

    def _publish(self) -> None:
        self._publish_at = None
        provider, pool = self.getProviderConfig(), self.getPoolConfig()
        if self.component is None or provider is None or pool is None:
            return
        priority = pool.priority if pool.priority is not None else provider.priority
        self.component.update(
            supported_labels=sorted(pool.labels), paused=self.paused, priority=100 if priority is None else priority)

    # -- the thread

    def run(self) -> None:
        self.running = True
        try:
            self._register()
        except Exception:
            self.log.exception("Cannot register the pool:")
        next_tick = time.monotonic() + TICK
        while not (self._leaving and not self.request_handlers and not self.backlog):
            now = time.monotonic()
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

    def _pause(self, next_tick: float) -> float | None:
        ticking = self.request_handlers or (self.component is None and self.running)
        due = [t for t in (self._publish_at, next_tick if ticking else None) if t is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _tick(self) -> None:
        """What no event announces: external quota, threads of classic drivers."""
        if self.component is None and self.running and self.nodepool.zk.connected:
            self.guard(self._register, ())
        self.capacity_changed()
        for handler in list(self.request_handlers):
            if handler.BLOCKING and not handler.paused:
                self.post(handler, handler.poll)

    def guard(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run a step; whatever it raises concerns that step only."""
        try:
            function(*args)
        except (Exception, SystemExit):  # also of drivers that end a program
            self.log.exception("Error in pool %s:", self.label)

    def help(self, function: Callable[[], None]) -> None:
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(HELPERS, thread_name_prefix=f"{self.name}_helper")
        try:
            self._helpers.submit(function)
        except RuntimeError:
            self.log.debug("Not running a step: the pool has stopped")

    def _register(self) -> None:
        provider, pool = self.getProviderConfig(), self.getPoolConfig()
        if provider is None or pool is None:
            return
        component = PoolComponent(self.nodepool.zk.client, hostnames.short())
        priority = pool.priority if pool.priority is not None else provider.priority
        component.content.update(
            id=self.launcher_id, name=self.pool_name, provider_name=self.provider_name, state=component.RUNNING,
            supported_labels=sorted(pool.labels), priority=100 if priority is None else priority)
        component.register()
        self.component = component

    # -- stopping

    def leave(self) -> None:
        """The pool is not configured any more: hand every request back, then stop."""
        self.running = False
        for handler in list(self.request_handlers):
            self.post(handler, handler.hand_back)

    def stop_when_idle(self) -> None:
        """Unregister now; end when the last handler has come to its end."""
        component, self.component = self.component, None
        if component is not None:
            component.unregister()
        self._leaving = True
        self._tasks.put((self._nothing, ()))

    def stop(self) -> None:
        self.running = False
        self._tasks.put(None)
        if self.component is not None:
            self.component.unregister()
            self.component = None

    def join(self, timeout: float | None = None) -> None:
        if self.ident is not None:
            super().join(timeout)
        if self._helpers is not None:
            self._helpers.shutdown(wait=False, cancel_futures=True)

"""PoolAdmission: whether a pool can accept a request, and if not, why (LAU-2 and LAU-4)."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable

from nodepool.config.model import ConfigPool, ProviderConfig
from nodepool.driver.provider import Provider
from nodepool.driver.quota.support import counts_labels
from nodepool.driver.request.base import RequestHandler
from nodepool.exceptions import FOREIGN
from nodepool.launcher.pool import Pool
from nodepool.launcher.pools.backlog import Backlog
from nodepool.launcher.pools.fullness import Fullness
from nodepool.launcher.requests.assignment import Assignment
from nodepool.launcher.requests.choice import PoolView
from nodepool.launcher.requests.queue import RequestClass
from nodepool.launcher.state import LauncherState
from nodepool.reasons import Code, Reason, because
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds during which changes of ``paused`` are collected before they are published.
PUBLISH_DELAY = 0.05


class PoolAdmission(Pool):
    """The part of :class:`~nodepool.launcher.pools.worker.PoolWorker` for the assignment."""

    def __init__(
        self, state: LauncherState, assignment: Assignment, provider_name: str, pool_name: str
    ) -> None:
        super().__init__(provider_name, pool_name)
        self.log = logging.getLogger(f"nodepool.PoolWorker.{self.label}")
        #: Drivers use this name.
        self.nodepool = state
        self.clock = state.clock
        self.assignment = assignment
        self.running = False
        self.backlog = Backlog()
        self._full = Fullness()
        self._retry_queued = False
        #: When to publish our component record (monotonic seconds); None: it is up to date.
        self._publish_at: float | None = None
        self._logged: set[str] = set()

    # -- what drivers use

    def getZK(self) -> ZooKeeper:
        return self.nodepool.zk

    def getProviderConfig(self) -> ProviderConfig | None:
        return self.nodepool.config.providers.get(self.provider_name)

    def getPoolConfig(self) -> ConfigPool | None:
        provider = self.getProviderConfig()
        return provider.pools.get(self.pool_name) if provider is not None else None

    def getProviderManager(self) -> Provider | None:
        return self.nodepool.config.provider_managers.get(self.provider_name)

    # -- what the assignment uses

    def _paused_for(self) -> list[RequestHandler]:
        """Return the handlers that the pool is paused for, the most urgent first."""
        return sorted(self.paused_handlers, key=lambda handler: handler.request.priority)

    def paused_reason(self) -> Reason:
        waiting = self._paused_for()
        return because(Code.POOL_PAUSED, request=waiting[0].request.id if waiting else "").at(
            self.label
        )

    @property
    def load(self) -> int:
        return len(self.request_handlers) + len(self.backlog.ids)

    def has(self, request_id: str) -> bool:
        return (
            request_id in self.backlog.ids
            or getattr(self.nodepool.handlers.get(request_id), "pw", None) is self
        )

    def view(self, cls: RequestClass) -> PoolView:
        pool = self.getPoolConfig()
        if pool is not None and not cls.labels.issubset(pool.labels):
            return PoolView(self.label, paused=self.paused)  # it will not be asked
        closed, waiting = self._guarded(self._closed_to, cls), self._paused_for()
        return PoolView(
            self.label,
            self.load,
            bool(waiting),
            closed,
            self._full.reason(cls.labels),
            None if closed else self._guarded(self._admission, cls),
            str(waiting[0].request.id) if waiting else "",
            waiting[0].request.priority
            if waiting and all(handler.holds_nothing for handler in waiting)
            else None,
        )

    def _guarded(
        self, ask: Callable[[RequestClass], Reason | None], cls: RequestClass
    ) -> Reason | None:
        """Return the reason, or an error reason if the driver or an option raises.

        The error closes only this pool, and is shown as the reason of waiting requests.
        """
        try:
            return ask(cls)
        except FOREIGN as error:
            self._log_once("Cannot decide whether the pool accepts a request:", error)
            return because(Code.ERROR, error=repr(error))

    def _admission(self, cls: RequestClass) -> Reason | None:
        if self.backlog.refuses():
            return because(Code.BUSY)
        manager = self.getProviderManager()
        if counts_labels(manager):
            # Otherwise each free node would be promised to all waiting requests, and the fastest
            # would get it, not the first.
            free, wanted = manager.getLabelQuota(), self._about_to_be_used()
            short = [label for label in cls.labels if free.get(label, 0) <= wanted[label]]
            if short:
                return because(Code.BEING_TAKEN, labels=",".join(sorted(short)))
        provider = self.getProviderConfig()
        if provider is not None and (limit := provider.max_concurrency) > 0:
            active = sum(
                worker.active_launches()
                for worker in self.nodepool.getPoolWorkers(self.provider_name)
            )
            if active >= limit:
                return because(Code.MAX_CONCURRENCY, active=active)
        return None

    def _about_to_be_used(self) -> Counter[str]:
        """Return the free nodes, by label, that undecided requests here may still take."""
        # A handler that has accepted its request has nodes or creates new ones.
        ids = {
            *self.backlog.ids,
            *(h.request.id for h in list(self.request_handlers) if not (h.accepted or h.done)),
        }
        requests = map(self.nodepool.zk.request_tree.get, ids)
        return Counter(
            label for request in requests if request is not None for label in request.node_types
        )

    def _log_once(self, message: str, error: BaseException) -> None:
        key = message + repr(error)
        if key not in self._logged and len(self._logged) < 100:
            self._logged.add(key)
            self.log.error("%s", message, exc_info=error)

    def _closed_to(self, cls: RequestClass) -> Reason | None:
        provider, manager = self.getProviderConfig(), self.getProviderManager()
        pool = self.getPoolConfig()
        if not self.running or provider is None or manager is None or pool is None:
            return because(Code.NOT_RUNNING)
        if (drained := self.nodepool.drains.blocked(pool, cls.labels, manager)) is not None:
            self.note_full(*drained)
            return drained[1]
        if provider.max_concurrency == 0:
            return because(Code.SWITCHED_OFF)
        if counts_labels(manager):
            quota = manager.getLabelQuota()
            short = [label for label in cls.labels if quota.get(label, 0) <= 0]
            if short:
                reason = because(Code.NO_FREE_NODE, labels=",".join(sorted(short)))
                self.note_full(short, reason)
                return reason
        return self._launches_fail(provider, cls)

    def _launches_fail(self, provider: ProviderConfig, cls: RequestClass) -> Reason | None:
        """Return why no nodes may be launched for the class, unless enough of them are ready."""
        failing = self.nodepool.launch_failures.blocked(provider, cls.key.node_types)
        if failing is None or (cls.key.reuse and self._has_ready(cls, failing[0])):
            return None
        self.note_full(*failing)
        return failing[1]

    def _has_ready(self, cls: RequestClass, labels: list[str]) -> bool:
        tree = self.nodepool.zk.node_tree
        for label in labels:
            free = (
                node_id
                for node_id in tree.iter_free(self.provider_name, self.pool_name, label)
                if (node := tree.get(node_id)) is not None
                and self.nodepool.drains.of_node(node) is None
            )
            wanted = cls.key.node_types.count(label)
            if len(list(itertools.islice(free, wanted))) < wanted:
                return False
        return True

    def _has_none(self, label: str) -> bool:
        """Return whether a request waits for the label, and certainly no node of it is free, or
        can be launched.
        """
        provider, manager = self.getProviderConfig(), self.getProviderManager()
        none_free = counts_labels(manager) and manager.getLabelQuota().get(label, 0) <= 0
        failures, drains, pool = (
            self.nodepool.launch_failures,
            self.nodepool.drains,
            self.getPoolConfig(),
        )
        return (
            none_free
            or (provider is not None and failures.blocked(provider, [label]) is not None)
            or (pool is not None and drains.blocked(pool, [label], manager) is not None)
        ) and self.assignment.is_wanted(label)

    def note_full(self, labels: list[str], reason: Reason) -> None:
        """Record that there is no capacity for these labels, and publish it.

        Until that changes this pool is asked last for them.
        """
        if self._full.reason(labels) is None:
            self._full.note(labels, reason)
            self.publish_soon()

    def _room(self, age: float = -math.inf) -> None:
        """Wake waiting requests, because there may be capacity again."""
        if self._full.forget(self._has_none, age):
            self.publish_soon()
            self.assignment.wake()

    def publish_soon(self) -> None:
        """Publish to other launchers whether we accept requests."""
        if self._publish_at is None:
            self._publish_at = self.clock.monotonic() + PUBLISH_DELAY
            self._tasks.put(
                (bool, ())
            )  # wakes the thread, which waits for tasks without a time limit

    def capacity_changed(self) -> None:
        self._room()
        self._retry()

    def _retry(self) -> None:
        if self.paused_handlers and not self._retry_queued:
            self._retry_queued = True
            self._tasks.put((self._retry_paused, ()))

    def _retry_paused(self) -> None:
        self._retry_queued = False
        for handler in self._paused_for():
            self.post(handler, handler.run)

    def active_launches(self) -> int:
        return len(self.backlog.ids) + sum(
            self._launches(handler) for handler in list(self.request_handlers)
        )

    def _launches(self, handler: RequestHandler) -> int:
        try:
            alive = int(handler.alive_thread_count)
        except FOREIGN as error:
            self._log_once(
                "The driver does not report its number of running launches; counting all nodes of "
                "the request:",
                error,
            )
            return len(handler.request.node_types)
        if alive or handler.nodeset or handler.paused or handler.done:
            return alive
        return len(handler.request.node_types)  # just accepted: its launches are about to start

    def _launches_ended(self) -> None:
        """Recheck requests that wait for running launches or assigned nodes.

        The launches that capacity was reserved for have ended.
        """
        provider = self.getProviderConfig()
        if provider is not None and provider.max_concurrency != -1:
            self.assignment.recheck(Code.MAX_CONCURRENCY)
        self.assignment.recheck(Code.LAUNCHES_FAIL)
        if counts_labels(self.getProviderManager()):
            self.assignment.recheck(Code.BEING_TAKEN)

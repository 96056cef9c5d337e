"""Quota arithmetic for providers that know their limits (DRV-6.4, LAU-8)."""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeGuard

from nodepool.base import threads
from nodepool.base.amounts import exact
from nodepool.base.clock import SYSTEM, Clock
from nodepool.base.problems import error_line
from nodepool.config.model import ConfigPool, ProviderConfig
from nodepool.driver.quota import amounts
from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.exceptions import FOREIGN
from nodepool.reasons import Code, because
from nodepool.zk.zookeeper import ZooKeeper


class LimitsPending(Exception):
    """The decision needs newer limits, which are being queried."""

    def __init__(self, provider: str) -> None:
        self.reason = because(Code.LIMITS_UNKNOWN, provider=provider)
        super().__init__(str(self.reason))


class Shortage(NamedTuple):
    """Missing amount for new nodes; more than ``limit`` is used when it was lowered."""

    resource: str
    needed: float
    left: float
    limit: float
    used: float


class QuotaSupport:
    """Mix-in for providers.  Uses ``self.log``, ``self.provider`` and ``self._zk``.

    Limits are outdated when they are older than ``MAX_QUOTA_AGE`` or when the cloud has refused
    something for quota. Outdated ones are kept and used until newer ones are available.
    """

    log: logging.Logger | logging.LoggerAdapter[Any]
    provider: ProviderConfig
    _zk: ZooKeeper
    _current_nodepool_quota: tuple[float, QuotaInformation] | None = None
    clock: Clock = SYSTEM
    #: Seconds after which limits that could not be renewed in the background are queried again.
    RENEWAL_PAUSE: float = 10.0
    #: Seconds after which limits are queried again while a request waits for free quota.
    WAITING_AGE: float = 20.0
    #: How often the cloud has contradicted the limits, and of these, how often before the last
    #: query of the limits.
    _quota_contradicted = 0
    _quota_considered = 0
    _quota_renew_after = float("-inf")
    _renewal_lock = threading.Lock()
    #: The last renewal of the limits in the background.
    _renewal: Future[None] | None = None

    def __init__(self, *args: object, **kw: object) -> None:
        super().__init__(*args, **kw)
        #: Held from checking the quota until the promise is booked.
        self.quota_lock = threading.RLock()
        #: Set at the stop: renewals do not pause any more.
        self._quota_stopping = threading.Event()

    # -- to implement

    def quotaNeededByLabel(self, label: str, pool: ConfigPool) -> QuotaInformation:
        """Return the needs of one node of the label (a name)."""
        raise NotImplementedError

    def unmanagedQuotaUsed(self) -> QuotaInformation:
        """Return what others use in the same account."""
        raise NotImplementedError

    def getProviderLimits(self) -> QuotaInformation:
        """Return the limits of the account."""
        raise NotImplementedError

    # -- given

    def quotaNeededByLabels(self, labels: Iterable[str], pool: ConfigPool) -> QuotaInformation:
        """Return the needs of one node of each label, all together. Not in 11.0.0."""
        needed = QuotaInformation()
        for label in labels:
            needed.add(self.quotaNeededByLabel(label, pool))
        return needed

    def _limits(self) -> QuotaInformation:
        """Return limits minus unmanaged use: the cached object, do not change it."""
        with self.quota_lock:
            cached, outdated, _ = self._known_limits()
            if cached is None or outdated:
                cached = self._query_limits(cached)
        return cached[1]

    def _query_limits(
        self, cached: tuple[float, QuotaInformation] | None
    ) -> tuple[float, QuotaInformation]:
        """Query the limits; if that fails, keep older ones until the next attempt."""
        considered = self._quota_contradicted
        try:
            limits = self.getProviderLimits().copy()
            limits.subtract(self.unmanagedQuotaUsed())
            self.log.debug("Available quota for %s: %s", self.provider.name, limits)
            known = self.clock.monotonic(), limits
        except FOREIGN as error:
            if cached is None:
                raise
            self.log.warning(
                "Unable to get the quota of %s, using an older value: %s",
                self.provider.name,
                error_line(error),
            )
            self._quota_renew_after = self.clock.monotonic() + min(
                self.RENEWAL_PAUSE, amounts.max_age()
            )
            known = self._quota_renew_after - amounts.max_age(), cached[1]
        self._current_nodepool_quota = known
        self._quota_considered = considered
        return known

    def known_limits(self) -> Mapping[str, float] | None:
        """Return the last known limits without querying the cloud; None: not known yet."""
        cached = self._current_nodepool_quota
        return cached[1].get_resources() if cached is not None else None

    def _known_limits(self) -> tuple[tuple[float, QuotaInformation] | None, bool, bool]:
        """Return the last known limits, and whether the cloud has contradicted them."""
        # In this order: limits are stored before the contradictions that they consider.
        contradicted = self._quota_considered != self._quota_contradicted
        cached = self._current_nodepool_quota
        old = cached is None or self.clock.monotonic() - cached[0] >= amounts.max_age()
        return cached, old or contradicted, contradicted

    def short_of_limits(
        self, needed: Mapping[str, float], parts: list[Mapping[str, float]], launch: bool
    ) -> Shortage | None:
        """Apply :meth:`fits` to the limits; only the very first call waits for the cloud.

        Outdated limits are renewed in the background. Meanwhile they are sufficient for accepting a
        node, but not for refusing one, nor for a launch when the cloud has just refused one.

        :raises LimitsPending: the decision has to wait for the renewal.
        """
        cached, outdated, contradicted = self._known_limits()
        if cached is None:
            return self.fits(needed, self._limits(), parts)
        short = self.fits(needed, cached[1], parts)
        if outdated:
            self._renew_limits()
            if short is not None or (launch and contradicted):
                raise LimitsPending(self.provider.name)
        return short

    def limits_are_waited_for(self, wake: Callable[[], Any]) -> None:
        """Renew limits older than ``WAITING_AGE`` for a waiting request, then call ``wake``."""
        cached = self._current_nodepool_quota
        renewing = self._renewal is not None and not self._renewal.done()
        if (
            cached is not None
            and self.clock.monotonic() - cached[0] >= self.WAITING_AGE
            and not renewing
        ):
            self._renew_limits()
            self.when_limits_known(wake)

    def when_limits_known(self, wake: Callable[[], Any]) -> None:
        """Call ``wake`` once on the renewal thread when the renewal ends; now if there is none."""
        if self._renewal is None:
            wake()
        else:
            self._renewal.add_done_callback(lambda _renewal: wake())

    def _renew_limits(self) -> None:
        """Renew the limits in the background, one renewal at a time."""
        with self._renewal_lock:
            if self._renewal is None or self._renewal.done():
                self._renewal = (
                    threads.shared().lane(f"quota-{self.provider.name}", 1).submit(self._renew_now)
                )

    def _renew_now(self) -> None:
        # A cloud that refuses launches and does not report limits is not queried all the time.
        self._quota_stopping.wait(max(0.0, self._quota_renew_after - self.clock.monotonic()))
        self._query_limits(self._current_nodepool_quota)

    def estimatedNodepoolQuota(self) -> QuotaInformation:
        """Return a copy of the limits minus unmanaged use, cached for ``MAX_QUOTA_AGE`` s.

        It is older when the cloud does not report its limits.
        """
        return self._limits().copy()

    def invalidateQuotaCache(self) -> None:
        """Query the limits again before the next decision: the cloud contradicts them."""
        self._quota_contradicted += 1

    def estimatedNodepoolQuotaUsed(self, pool: ConfigPool | None = None) -> QuotaInformation:
        """Return our nodes' use (in one pool): stored resources, estimates, and promises."""
        used = QuotaInformation()
        for source in self._usage_parts(pool):
            used.add(QuotaInformation.from_resources(source))
        return used

    def _usage_parts(self, pool: ConfigPool | None = None) -> list[Mapping[str, float]]:
        used, promised, unmeasured = self._zk.node_tree.usage_and_promises(
            self.provider.name, pool.name if pool is not None else None
        )
        parts: list[Mapping[str, float]] = [used, promised]
        for node_pool, label, count in unmeasured:
            need = self._estimate(node_pool, label)
            if need is not None:
                parts.append({key: value * count for key, value in need.items()})
        return parts

    def _estimate(self, pool_name: str | None, label: str) -> Mapping[str, float] | None:
        pool = self.provider.pools.get(pool_name or "")
        if pool is None or label not in (pool.labels or ()):
            return None  # a node of a pool or label that is not configured any more
        try:
            need = self.quotaNeededByLabel(label, pool)
        except Exception as error:
            self.log.warning(
                "Cannot determine what label %s of %s needs: %s", label, self.provider.name, error
            )
            return None
        return need.get_resources()

    def fits(
        self,
        needed: Mapping[str, float],
        limits: QuotaInformation,
        parts: list[Mapping[str, float]],
    ) -> Shortage | None:
        """Return None when ``needed`` fits in addition to ``parts``, else the shortage."""
        compute = limits.quota["compute"]
        for key, need in needed.items():
            if not need:
                continue
            limit = compute.get(key, limits.default)
            if limit == math.inf:
                continue
            used = exact(sum(part.get(key, 0) for part in parts))
            left = exact(limit - used)
            if exact(left - need) < 0:
                return Shortage(key, exact(need), max(left, 0), limit, used)
        return None

    def getLabelQuota(self) -> Mapping[str, float]:
        """Return label -> number of further nodes; infinite unless the driver counts them."""
        return defaultdict(lambda: math.inf)


def counts_labels(manager: object) -> TypeGuard[QuotaSupport]:
    """Return whether the driver counts free nodes, because it launches none."""
    return (
        isinstance(manager, QuotaSupport)
        and type(manager).getLabelQuota is not QuotaSupport.getLabelQuota
    )

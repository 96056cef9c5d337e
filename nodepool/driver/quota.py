"""Quota arithmetic for providers that know their limits (driver-api.md 6.4, launcher.md section 8)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from nodepool.driver.resources import QuotaInformation


class QuotaSupport:
    """Mix-in for providers.  Uses ``self.log``, ``self.provider`` and ``self._zk``."""

    log: logging.Logger | logging.LoggerAdapter[Any]
    provider: Any
    _zk: Any
    _current_nodepool_quota: tuple[float, QuotaInformation] | None = None
    _monotonic = staticmethod(time.monotonic)

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._current_nodepool_quota = None

    # -- to implement

    def quotaNeededByLabel(self, label: str, pool: Any) -> QuotaInformation:
        """What one node of the label (a name) needs."""
        raise NotImplementedError

    def unmanagedQuotaUsed(self) -> QuotaInformation:
        """What others use in the same account."""
        raise NotImplementedError

    def getProviderLimits(self) -> QuotaInformation:
        """The limits of the account."""
        raise NotImplementedError

    # -- given

    @property
    def quota_lock(self) -> threading.RLock:
        """Held from looking at the quota until the promise is booked."""
        lock = self.__dict__.get("_quota_lock")
        if lock is None:
            lock = self.__dict__.setdefault("_quota_lock", threading.RLock())
        return lock  # type: ignore[no-any-return]

    def _limits(self) -> QuotaInformation:
        """Limits minus unmanaged use; the cached object itself, not to be changed."""
        from nodepool.driver import utils

        now = self._monotonic()
        cached = self._current_nodepool_quota
        if cached is not None and now - cached[0] < utils.MAX_QUOTA_AGE:
            return cached[1]
        with self.quota_lock:
            cached = self._current_nodepool_quota
            if cached is not None and now - cached[0] < utils.MAX_QUOTA_AGE:
                return cached[1]
            try:
                limits = self.getProviderLimits().copy()
                limits.subtract(self.unmanagedQuotaUsed())
            except Exception as error:
                if cached is None:
                    raise
                self.log.warning("Unable to get the quota of %s, using an older value: %s", self.provider.name, error)
                limits = cached[1]
            self._current_nodepool_quota = (self._monotonic(), limits)
            self.log.debug("Available quota for %s: %s", self.provider.name, limits)
            return limits

    def estimatedNodepoolQuota(self) -> QuotaInformation:
        """Limits minus unmanaged use, at most ``MAX_QUOTA_AGE`` seconds old; a copy."""
        return self._limits().copy()

    def invalidateQuotaCache(self) -> None:
        """Fetch the limits again before the next decision."""
        self._current_nodepool_quota = None

    def estimatedNodepoolQuotaUsed(self, pool: Any = None) -> QuotaInformation:
        """What our nodes use (in one pool): stored resources, estimates for the rest, and promises."""
        used = QuotaInformation()
        compute = used.quota["compute"]
        for source in self._usage_parts(pool):
            for name, amount in source.items():
                compute[name] = compute.get(name, 0) + amount
        return used

    def _usage_parts(self, pool: Any = None) -> list[Mapping[str, float]]:
        name = self.provider.name
        pool_name = pool.name if pool is not None else None
        tree = self._zk.node_tree
        parts: list[Mapping[str, float]] = [
            tree.usage(name, pool_name), self._zk.reservations.provider(name, pool_name)]
        for node_pool, label, count in tree.unmeasured_nodes(name, pool_name):
            need = self._estimate(node_pool, label)
            if need is not None:
                parts.append({key: value * count for key, value in need.items()})
        return parts

    def _estimate(self, pool_name: str | None, label: str) -> Mapping[str, float] | None:
        pool = self.provider.pools.get(pool_name)
        labels = getattr(pool, "labels", None) or ()
        if pool is None or label not in labels:
            return None  # a node of a pool or label that is not configured any more
        try:
            need = self.quotaNeededByLabel(label, pool)
        except Exception as error:
            self.log.warning("Cannot tell what label %s of %s needs: %s", label, self.provider.name, error)
            return None
        return need.get_resources()

    def fits(self, needed: Mapping[str, float], limits: QuotaInformation, parts: list[Mapping[str, float]]) -> str | None:
        """None when ``needed`` fits beside ``parts``, else what is short by how much."""
        compute = limits.quota["compute"]
        for key, need in needed.items():
            if not need:
                continue
            limit = compute.get(key, limits.default)
            if limit == math.inf:
                continue
            used = sum(part.get(key, 0) for part in parts)
            if limit - used - need < 0:
                return f"{key}: {need} needed, {limit - used} of {limit} left"
        return None

    def getLabelQuota(self) -> Mapping[str, float]:
        """Label -> how many more nodes of it there are; infinite unless the driver counts them."""
        return defaultdict(lambda: math.inf)

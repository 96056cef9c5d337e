"""Tenant limits (LAU-8.4): over all providers, including promises."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping

from nodepool.base.amounts import exact
from nodepool.config.model import ConfigPool
from nodepool.driver.quota.support import LimitsPending, QuotaSupport
from nodepool.driver.request.base import RequestHandler
from nodepool.launcher.state import LauncherState
from nodepool.reasons import Code, Reason, because
from nodepool.zk.records import NodeRequest

log = logging.getLogger("nodepool.Tenants")

# Held from reading the sums until the promise is recorded; two pools must not use the same quota.
_lock = threading.Lock()


def tenant_shortage(
    state: LauncherState,
    request: NodeRequest,
    limits: Mapping[str, float],
    pool: ConfigPool,
    manager: QuotaSupport,
    key: RequestHandler,
) -> Reason | None:
    """Return None after promising the nodes of this request to the tenant, or the shortage."""
    needed = manager.quotaNeededByLabels(request.node_types, pool).get_resources()
    with _lock:
        used = tenant_usage(state, request.tenant_name)
        for name, need in needed.items():
            limit = limits.get(name, math.inf)
            if limit != math.inf and exact(limit - used.get(name, 0) - need) < 0:
                return because(
                    Code.TENANT_LIMIT,
                    tenant=request.tenant_name,
                    limit=limit,
                    resource=name,
                    used=used.get(name, 0),
                    needed=need,
                )
        state.zk.reservations.reserve(("tenant", key), None, None, request.tenant_name, needed)
    return None


def tenant_usage(state: LauncherState, tenant: str | None) -> dict[str, float]:
    """Return what nodes of the tenant use at all launchers, including promises of this one."""
    if tenant is None:
        return {}
    tree = state.zk.node_tree
    # Read first, because a promise is released after its node is in the mirror: counting twice is
    # safe, missing it is not.
    promised = state.zk.reservations.tenant(tenant)
    with tree.lock:
        used: dict[str, float] = dict(tree.measured.tenants.get(tenant, ()))
        unmeasured = list(tree.unmeasured.tenants.get(tenant, {}).items())
    for name, amount in promised.items():
        used[name] = exact(used.get(name, 0) + amount)
    for (provider, pool_name, label), count in unmeasured:
        for name, amount in _estimate(state, provider, pool_name, label).items():
            used[name] = exact(used.get(name, 0) + amount * count)
    return used


def _estimate(
    state: LauncherState, provider: str | None, pool_name: str | None, label: str
) -> Mapping[str, float]:
    config = state.config.providers.get(provider or "")
    manager = state.config.provider_managers.get(provider or "")
    pool = config.pools.get(pool_name or "") if config is not None else None
    if pool is None or label not in pool.labels or not isinstance(manager, QuotaSupport):
        # Launchers without this provider cannot know more, and all launchers have to compute the
        # same number.
        return {"instances": 1}
    try:
        return manager.quotaNeededByLabel(label, pool).get_resources()
    except LimitsPending:
        raise  # known in a moment
    except Exception as error:  # perhaps of another provider: no reason to fail this request
        log.warning(
            "Provider %s does not report the resources of label %s; its nodes count as instances "
            "only: %r",
            provider,
            label,
            error,
        )
        return {"instances": 1}

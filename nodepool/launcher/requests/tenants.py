"""Tenant limits (LAU-8.4): over all providers, promises included."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping

from nodepool.base.amounts import exact
from nodepool.config.model import ConfigPool
from nodepool.driver.provider import RequestHandler
from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.driver.quota.support import LimitsPending, QuotaSupport
from nodepool.launcher.state import LauncherState
from nodepool.reasons import Code, Reason, because
from nodepool.zk.records import NodeRequest

log = logging.getLogger("nodepool.Tenants")

# From looking at the sums until the promise is booked; two pools must not spend the same rest.
_lock = threading.Lock()


def tenant_shortage(
    state: LauncherState,
    request: NodeRequest,
    limits: Mapping[str, float],
    pool: ConfigPool,
    manager: QuotaSupport,
    key: RequestHandler,
) -> Reason | None:
    """None when the tenant may have the nodes of this request (they are then promised), else what is short."""
    needed = QuotaInformation()
    for label in request.node_types:
        needed.add(manager.quotaNeededByLabel(label, pool))
    with _lock:
        used = tenant_usage(state, request.tenant_name)
        for name, need in needed.get_resources().items():
            limit = limits.get(name, math.inf)
            if limit != math.inf and exact(limit - used.get(name, 0) - need) < 0:
                return because(
                    Code.TENANT_LIMIT, tenant=request.tenant_name, limit=limit, resource=name, used=used.get(name, 0), needed=need
                )
        state.zk.reservations.reserve(("tenant", key), None, None, request.tenant_name, needed.get_resources())
    return None


def tenant_usage(state: LauncherState, tenant: str | None) -> dict[str, float]:
    """Return what the nodes of the tenant use at all launchers, and what this one is about to use."""
    if tenant is None:
        return {}
    tree = state.zk.node_tree
    # First, as a promise is released once its node is in the mirror: it may count twice, but never not at all.
    promised = state.zk.reservations.tenant(tenant)
    with tree.lock:
        used: dict[str, float] = dict(tree.tenant_usage.get(tenant, ()))
        unmeasured = list(tree.unmeasured_tenant.get(tenant, {}).items())
    for name, amount in promised.items():
        used[name] = exact(used.get(name, 0) + amount)
    for (provider, pool_name, label), count in unmeasured:
        for name, amount in _estimate(state, provider, pool_name, label).items():
            used[name] = exact(used.get(name, 0) + amount * count)
    return used


def _estimate(state: LauncherState, provider: str | None, pool_name: str | None, label: str) -> Mapping[str, float]:
    config = state.config.providers.get(provider or "")
    manager = state.config.provider_managers.get(provider or "")
    pool = config.pools.get(pool_name or "") if config is not None else None
    if pool is None or label not in pool.labels or not isinstance(manager, QuotaSupport):
        # Launchers without this provider cannot know more; all of them have to come to the same number.
        return {"instances": 1}
    try:
        return manager.quotaNeededByLabel(label, pool).get_resources()
    except LimitsPending:
        raise  # known in a moment
    except Exception as error:  # of another provider, perhaps: no reason to fail this request
        log.warning("Provider %s cannot tell what label %s needs; its nodes count as instances: %r", provider, label, error)
        return {"instances": 1}

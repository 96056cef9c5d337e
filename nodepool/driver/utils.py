"""Helpers for drivers (DRV-6): the public names of code in other modules."""

from __future__ import annotations

import importlib
from typing import Any

from nodepool.driver.quota import amounts
from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.driver.toolkit.image_uploader import ImageUploader, Segment
from nodepool.driver.toolkit.rate_limiter import RateLimiter, RateLimitInstance
from nodepool.driver.toolkit.ttl_cache import LazyExecutorTTLCache

MAX_QUOTA_AGE = 300
"""How long limits of a provider are remembered, in seconds."""
amounts.max_age = lambda: MAX_QUOTA_AGE

_LATE = {
    "NodeDeleter": "nodepool.driver.toolkit.threads",
    "NodeLauncher": "nodepool.driver.toolkit.threads",
    "QuotaSupport": "nodepool.driver.quota.support",
}


def __getattr__(name: str) -> Any:
    """Import these on first use: they need ZooKeeper, unlike readers of configurations."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)


__all__ = [
    "MAX_QUOTA_AGE",
    "ImageUploader",
    "LazyExecutorTTLCache",
    "NodeDeleter",  # noqa: F822 (late)
    "NodeLauncher",  # noqa: F822 (late)
    "QuotaInformation",
    "QuotaSupport",  # noqa: F822 (late)
    "RateLimitInstance",
    "RateLimiter",
    "Segment",
]

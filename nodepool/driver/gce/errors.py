"""Error kinds of Google's APIs (GCE-10)."""

from __future__ import annotations

from nodepool.cloud import ErrorKind
from nodepool.cloud.http import classified

QUOTA = frozenset(("quotaExceeded", "QUOTA_EXCEEDED", "limitExceeded", "LIMIT_EXCEEDED"))
THROTTLED = frozenset(
    ("rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED", "operationRateExceeded")
)
CAPACITY = frozenset(("stockout", "STOCKOUT", "UNSUPPORTED_OPERATION", "RESOURCE_NOT_READY"))
TRANSIENT = frozenset(
    ("backendError", "internalError", "INTERNAL_ERROR", "resourceNotReady", "SERVICE_UNAVAILABLE")
)
#: Prefixes of codes for an exhausted zone, with or without details.
EXHAUSTED = ("ZONE_RESOURCE_POOL_EXHAUSTED", "RESOURCE_POOL_EXHAUSTED")


def kind_of_code(code: str, message: str = "") -> ErrorKind | None:
    if code in QUOTA:
        # Google uses the same code for requests per minute.
        return ErrorKind.THROTTLED if "per minute" in message.lower() else ErrorKind.QUOTA
    if code in THROTTLED:
        return ErrorKind.THROTTLED
    if code in CAPACITY or code.startswith(EXHAUSTED):
        return ErrorKind.CAPACITY
    if code in TRANSIENT:
        return ErrorKind.TRANSIENT
    return None


def classify(error: BaseException) -> ErrorKind:
    return classified(error, kind_of_code)

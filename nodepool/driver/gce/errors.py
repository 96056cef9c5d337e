"""Error kinds of Google's APIs (GCE-10)."""

from __future__ import annotations

from nodepool.cloud import ErrorKind
from nodepool.cloud.http import classified

#: Error code -> kind.
KINDS = {
    **dict.fromkeys(
        ("quotaExceeded", "QUOTA_EXCEEDED", "limitExceeded", "LIMIT_EXCEEDED"), ErrorKind.QUOTA
    ),
    **dict.fromkeys(
        (
            "rateLimitExceeded",
            "userRateLimitExceeded",
            "RATE_LIMIT_EXCEEDED",
            "operationRateExceeded",
        ),
        ErrorKind.THROTTLED,
    ),
    **dict.fromkeys(
        ("stockout", "STOCKOUT", "UNSUPPORTED_OPERATION", "RESOURCE_NOT_READY"), ErrorKind.CAPACITY
    ),
    **dict.fromkeys(
        (
            "backendError",
            "internalError",
            "INTERNAL_ERROR",
            "resourceNotReady",
            "SERVICE_UNAVAILABLE",
        ),
        ErrorKind.TRANSIENT,
    ),
}
#: Prefixes of codes for an exhausted zone, with or without details.
EXHAUSTED = ("ZONE_RESOURCE_POOL_EXHAUSTED", "RESOURCE_POOL_EXHAUSTED")
#: The same for a subnetwork, whose addresses our own machines have.
NO_ADDRESSES = "IP_SPACE_EXHAUSTED"


def kind_of_code(code: str, message: str = "") -> ErrorKind | None:
    if code.startswith(NO_ADDRESSES):
        return ErrorKind.QUOTA
    kind = ErrorKind.CAPACITY if code.startswith(EXHAUSTED) else KINDS.get(code)
    # Google uses the same code for requests per minute.
    if kind is ErrorKind.QUOTA and "per minute" in message.lower():
        return ErrorKind.THROTTLED
    return kind


def classify(error: BaseException) -> ErrorKind:
    return classified(error, kind_of_code)

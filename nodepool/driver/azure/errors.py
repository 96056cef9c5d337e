"""Error kinds of Azure's API (AZU-12)."""

from __future__ import annotations

from nodepool.cloud import ErrorKind
from nodepool.cloud.http import classified

#: Error code -> kind.
KINDS = {
    **dict.fromkeys(("QuotaExceeded", "ResourceQuotaExceeded", "SubnetIsFull"), ErrorKind.QUOTA),
    **dict.fromkeys(
        (
            "SkuNotAvailable",
            "AllocationFailed",
            "ZonalAllocationFailed",
            "OverconstrainedAllocationRequest",
            "OverconstrainedZonalAllocationRequest",
            "NotAvailableForSubscription",
            "SpotEvicted",
        ),
        ErrorKind.CAPACITY,
    ),
    **dict.fromkeys(
        ("TooManyRequests", "SubscriptionRequestsThrottled", "OperationsPerTimeThresholdExceeded"),
        ErrorKind.THROTTLED,
    ),
    **dict.fromkeys(
        (
            "InternalServerError",
            "ServerTimeout",
            "RetryableError",
            "GatewayTimeout",
            "AnotherOperationInProgress",
            "RetryableErrorDueToAnotherOperation",
            "OperationPreempted",
            "InternalExecutionError",
        ),
        ErrorKind.TRANSIENT,
    ),
}


def kind_of_code(code: str, message: str = "") -> ErrorKind | None:
    # The same code means an exhausted quota, or an operation not allowed in the resource's state.
    if code == "OperationNotAllowed" and "quota" in message.lower():
        return ErrorKind.QUOTA
    # Of public addresses, static ones, network interfaces and others.
    if code.endswith("CountLimitReached"):
        return ErrorKind.QUOTA
    return KINDS.get(code)


def classify(error: BaseException) -> ErrorKind:
    return classified(error, kind_of_code)

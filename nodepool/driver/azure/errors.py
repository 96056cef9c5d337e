"""Error kinds of Azure's API (AZU-12)."""

from __future__ import annotations

from nodepool.cloud import ErrorKind
from nodepool.cloud.http import classified

QUOTA = frozenset(
    ("QuotaExceeded", "PublicIPCountLimitReached", "ResourceQuotaExceeded", "SubnetIsFull")
)
CAPACITY = frozenset(
    (
        "SkuNotAvailable",
        "AllocationFailed",
        "ZonalAllocationFailed",
        "OverconstrainedAllocationRequest",
        "OverconstrainedZonalAllocationRequest",
        "NotAvailableForSubscription",
        "SpotEvicted",
    )
)
THROTTLED = frozenset(
    ("TooManyRequests", "SubscriptionRequestsThrottled", "OperationsPerTimeThresholdExceeded")
)
TRANSIENT = frozenset(
    (
        "InternalServerError",
        "ServerTimeout",
        "RetryableError",
        "GatewayTimeout",
        "AnotherOperationInProgress",
        "RetryableErrorDueToAnotherOperation",
        "OperationPreempted",
        "InternalExecutionError",
    )
)


def kind_of_code(code: str, message: str = "") -> ErrorKind | None:
    # The same code means an exhausted quota, or an operation not allowed in the resource's state.
    if code in QUOTA or (code == "OperationNotAllowed" and "quota" in message.lower()):
        return ErrorKind.QUOTA
    for codes, kind in (
        (CAPACITY, ErrorKind.CAPACITY),
        (THROTTLED, ErrorKind.THROTTLED),
        (TRANSIENT, ErrorKind.TRANSIENT),
    ):
        if code in codes:
            return kind
    return None


def classify(error: BaseException) -> ErrorKind:
    return classified(error, kind_of_code)

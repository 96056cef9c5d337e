"""Error kinds of AWS (AWS-2.6)."""

from __future__ import annotations

from typing import Any

from nodepool.cloud import ErrorKind
from nodepool.cloud.errors import CallTimeout

#: Error code -> kind.
KINDS = {
    **dict.fromkeys(
        (
            "VolumeLimitExceeded",
            "HostLimitExceeded",
            "VcpuLimitExceeded",
            "InstanceLimitExceeded",
            "MaxSpotInstanceCountExceeded",
            "MaxSpotFleetRequestCountExceeded",
            "NetworkInterfaceLimitExceeded",
            "AddressLimitExceeded",
        ),
        ErrorKind.QUOTA,
    ),
    **dict.fromkeys(
        (
            "InsufficientInstanceCapacity",
            "InsufficientHostCapacity",
            "SpotMaxPriceTooLow",
            "UnfulfillableCapacity",
            "InsufficientFreeAddressesInSubnet",
            "InsufficientAddressCapacity",
            "InsufficientCapacity",
            "InsufficientCapacityOnHost",
            "InsufficientReservedInstanceCapacity",
            "ReservationCapacityExceeded",
            "InsufficientVolumeCapacity",
        ),
        ErrorKind.CAPACITY,
    ),
    **dict.fromkeys(
        (
            "RequestLimitExceeded",
            "SlowDown",
            "EC2ThrottledException",
            "PriorRequestNotComplete",
            "BandwidthLimitExceeded",
            "RequestThrottled",
            "RequestThrottledException",
            "TooManyRequestsException",
            "LimitExceededException",
        ),
        ErrorKind.THROTTLED,
    ),
    **dict.fromkeys(
        (
            "InternalError",
            "InternalFailure",
            "InternalServerError",
            "InternalServerException",
            "ServiceUnavailable",
            "ServiceUnavailableException",
            "Unavailable",
            "RequestTimeout",
            "RequestTimeoutException",
            "ServerInternal",
        ),
        ErrorKind.TRANSIENT,
    ),
    **dict.fromkeys(
        (
            "AuthFailure",
            "UnauthorizedOperation",
            "InvalidClientTokenId",
            "SignatureDoesNotMatch",
            "ExpiredToken",
            "ExpiredTokenException",
            "RequestExpired",
            "OptInRequired",
            "Blocked",
            "AccessDenied",
            "AccessDeniedException",
            "UnrecognizedClientException",
            "InvalidAccessKeyId",
            "MissingAuthenticationToken",
            "InvalidInstanceType",
            "NoSuchBucket",
            "PendingVerification",
            "InvalidParameterValue",
            "InvalidParameterCombination",
        ),
        ErrorKind.CONFIGURATION,
    ),
    **dict.fromkeys(
        ("NoSuchKey", "NotFound", "404", "ResourceNotFoundException", "InvalidAMIID.Unavailable"),
        ErrorKind.NOT_FOUND,
    ),
}
CREDENTIALS = frozenset(
    (
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "RequestExpired",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
        "InvalidAccessKeyId",
        "MissingAuthenticationToken",
    )
)
"""Codes of kind CONFIGURATION that renewed credentials solve."""
UNREACHABLE = frozenset(
    (
        "HTTPClientError",
        "ConnectionError",
        "EndpointConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ConnectionClosedError",
        "ProxyConnectionError",
        "ResponseStreamingError",
        "IncompleteReadError",
        # Not a proper answer: HTML of a gateway, or truncated.
        "ResponseParserError",
        "NotAnAnswer",
    )
)
BADLY_SET_UP = frozenset(
    (
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "ConfigNotFound",
        "NoRegionError",
        "InvalidRegionError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "SSOTokenLoadError",
        "SSLError",
        "ParamValidationError",
        "EndpointResolutionError",
        "UnknownServiceError",
    )
)
NO_CREDENTIALS = frozenset(
    (
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "SSOTokenLoadError",
    )
)


class AwsError(Exception):
    """An error inside an answer of AWS; classified like those that boto3 raises."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error.get('Code')}: {error.get('Message')}")
        self.response = {"Error": error}


class NotAnAnswer(Exception):
    """The answer is XML, but not from EC2; it would be parsed as an empty result."""


def check_answer(operation: str, answer: object) -> None:
    """Check that the answer is from EC2, which names the request. Raises NotAnAnswer."""
    metadata = answer.get("ResponseMetadata") if isinstance(answer, dict) else None
    if metadata is not None and not metadata.get("RequestId"):
        raise NotAnAnswer(
            f"the answer to {operation} is not from EC2 (status {metadata.get('HTTPStatusCode')}, "
            "no request id)"
        )


def code_of(error: BaseException) -> str:
    """Return AWS's error code, empty for other exceptions."""
    response: object = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    return str((response.get("Error") or {}).get("Code") or "")


def kind_of_code(code: str, status: int = 0) -> ErrorKind | None:
    """Return the kind of an error code, None when only the HTTP status is meaningful."""
    if code in KINDS:
        return KINDS[code]
    if code.startswith("Throttl") or status == 429:
        return ErrorKind.THROTTLED
    # For a deleted import task, its id counts as malformed.
    if code.endswith((".NotFound", ".Unknown")) or code.startswith("InvalidConversionTaskId"):
        return ErrorKind.NOT_FOUND
    return None


def classify(error: BaseException) -> ErrorKind:
    """Return the kind of a boto3 exception, by class names: the library need not be loaded."""
    if isinstance(error, CallTimeout):
        return error.kind
    code = code_of(error)
    if code:
        status = int((error.response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)  # type: ignore[attr-defined]
        kind = kind_of_code(code, status)
        if kind is not None:
            return kind
        return ErrorKind.TRANSIENT if status >= 500 else ErrorKind.OTHER
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & BADLY_SET_UP:
        return ErrorKind.CONFIGURATION
    if names & UNREACHABLE or isinstance(error, OSError):
        return ErrorKind.TRANSIENT
    return ErrorKind.OTHER


def passes(error: BaseException) -> bool:
    """Return whether a retry may succeed: AWS is unreachable or busy, or credentials change."""
    return classify(error) in (ErrorKind.THROTTLED, ErrorKind.TRANSIENT) or needs_credentials(error)


def needs_credentials(error: BaseException) -> bool:
    """Return whether other credentials may solve it."""
    return code_of(error) in CREDENTIALS or any(
        cls.__name__ in NO_CREDENTIALS for cls in type(error).__mro__
    )

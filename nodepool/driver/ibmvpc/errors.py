"""Error kinds of IBM's APIs (IBM-13)."""

from __future__ import annotations

from nodepool.cloud import ErrorKind
from nodepool.cloud.http import HttpRefused, classified, kind_of_status

UNREACHABLE = frozenset(
    ("HTTPClientError", "EndpointConnectionError", "ConnectionClosedError", "ReadTimeoutError")
)
"""Exceptions of the object storage library by name: it need not be loaded."""


def kind_of_code(code: str, message: str = "") -> ErrorKind | None:
    """Return the kind by words in the code: IBM has many codes."""
    text = f"{code} {message}".lower()
    if "quota" in code.lower():
        return ErrorKind.QUOTA
    if "capacity" in text:
        return ErrorKind.CAPACITY
    if code in ("too_many_requests", "rate_limit_exceeded", "over_rate_limit"):
        return ErrorKind.THROTTLED
    if code in ("internal_error", "service_error", "conflict_state"):
        return ErrorKind.TRANSIENT
    return None


def classify(error: BaseException) -> ErrorKind:
    kind = classified(error, kind_of_code)
    return (
        _of_storage(error)
        if kind is ErrorKind.OTHER and not isinstance(error, HttpRefused)
        else kind
    )


def _of_storage(error: BaseException) -> ErrorKind:
    """Return the kind of an object storage error by its attributes."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        lost = UNREACHABLE & {cls.__name__ for cls in type(error).__mro__}
        return (
            ErrorKind.TRANSIENT if lost or isinstance(error, ConnectionError) else ErrorKind.OTHER
        )
    status = int((response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
    code = str((response.get("Error") or {}).get("Code") or "")
    if status == 404 or code in ("NoSuchKey", "404"):
        return ErrorKind.NOT_FOUND
    if status == 429 or code == "SlowDown":
        return ErrorKind.THROTTLED
    return kind_of_status(status)

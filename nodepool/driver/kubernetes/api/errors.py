"""Errors of the API server, and their kinds for the shared call layer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from nodepool.cloud.errors import CallTimeout, ErrorKind, bounded

_QUOTA = "exceeded quota"
#: Not ready yet, or conflicting with another change: the same call works later.
_AGAIN = (409, 500, 502, 503, 504)


class ApiError(Exception):
    """The server refuses a request, or the answer is not from the API server.

    ``status``: of HTTP. ``reason``: the server's code, such as ``AlreadyExists``. ``retry_after``: seconds it asks for.
    """

    def __init__(self, what: str, status: int, reason: str = "", message: str = "", retry_after: float | None = None) -> None:
        super().__init__(f"{what}: {status} {reason}: {message}" if message else f"{what}: {status} {reason}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    @property
    def exists(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"


class ConnectionFailed(Exception):
    """No answer, or an incomplete one."""


class NoAccess(Exception):
    """The kubeconfig cannot be used; the text has file, context and remedy."""


def from_answer(what: str, status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """:param what: verb and object, for the message."""
    try:
        told = json.loads(body)
        reason, message = str(told.get("reason") or ""), str(told.get("message") or "")
    except (ValueError, AttributeError):
        reason, message = "", body[:300].decode("utf-8", "replace")
    try:
        retry_after = float(headers.get("Retry-After", ""))
    except ValueError:
        retry_after = None
    return ApiError(what, status, reason, bounded(message), retry_after)


def classify(error: BaseException) -> ErrorKind:
    if isinstance(error, ConnectionFailed):
        return ErrorKind.TRANSIENT
    if isinstance(error, NoAccess):
        return ErrorKind.CONFIGURATION
    if isinstance(error, CallTimeout):
        return error.kind
    refused = error if isinstance(error, ApiError) else None
    if _QUOTA in (str(error) if refused is None else refused.message or str(error)).lower():
        return ErrorKind.QUOTA
    status = refused.status if refused is not None else None
    if status == 404:
        return ErrorKind.NOT_FOUND
    if status == 429:
        return ErrorKind.THROTTLED
    if status in _AGAIN and not (refused is not None and refused.exists):
        return ErrorKind.TRANSIENT
    if status in (400, 401, 403, 422):
        return ErrorKind.CONFIGURATION
    return ErrorKind.OTHER


def retry_after(error: BaseException) -> float | None:
    return error.retry_after if isinstance(error, ApiError) else None

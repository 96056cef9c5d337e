"""Errors of the API server, and their kinds for the shared call layer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from nodepool.answers import requested_pause
from nodepool.cloud.errors import ErrorKind, bounded
from nodepool.cloud.http import HttpRefused, classified


class ApiError(HttpRefused):
    """The server refuses a request; ``code`` is its reason, such as ``AlreadyExists``."""

    @property
    def exists(self) -> bool:
        return self.status == 409 and self.code == "AlreadyExists"


def from_answer(what: str, status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """:param what: verb and object, for the message."""
    try:
        told = json.loads(body)
        reason, message = str(told.get("reason") or ""), str(told.get("message") or "")
    except (ValueError, AttributeError):
        reason, message = "", body[:300].decode("utf-8", "replace")
    return ApiError(what, status, reason, bounded(message), requested_pause(headers))


def _kind(reason: str, message: str) -> ErrorKind | None:
    if "exceeded quota" in message.lower():
        return ErrorKind.QUOTA
    # It conflicts with another change: the same call works later.
    return ErrorKind.TRANSIENT if reason == "Conflict" else None


def classify(error: BaseException) -> ErrorKind:
    return classified(error, _kind)

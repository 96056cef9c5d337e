"""JSON over HTTPS for clouds without a client library; one connection pool per provider.

Nothing is retried here; :class:`~nodepool.cloud.calls.CloudCalls` does that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import requests
import requests.adapters

from nodepool.answers import CloudSession, requested_pause
from nodepool.cloud.errors import CallTimeout, ErrorKind, bounded
from nodepool.version import get_version_string

CONNECT_TIMEOUT = 10.0
"""Time limit in seconds for establishing a connection."""
TIMEOUT = 60.0
"""Seconds without a byte after which a call has failed."""
CONNECTIONS = 32


class HttpRefused(Exception):
    """The cloud refused the request.

    ``status``: of HTTP. ``code``: the error code of the cloud. ``retry_after``: seconds that the
    cloud asks for, or None.
    """

    def __init__(
        self,
        what: str,
        status: int,
        code: str = "",
        message: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(
            bounded(": ".join(str(part) for part in (what, status, code, message) if part))
        )
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after


class NoAnswer(Exception):
    """No answer, an incomplete one, or one that is not from this cloud."""


class NoAccess(Exception):
    """No usable credentials; the text names the file or variable and the remedy."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: Any
    """Parsed, or text if it is not to be parsed; None if there is none."""


class _Session(CloudSession):
    """A session that stays closed, even if a call was running when it was closed."""

    closed = False

    def request(self, *args: Any, **keywords: Any) -> requests.Response:
        if self.closed:
            raise requests.ConnectionError("the provider is stopped")
        try:
            return super().request(*args, **keywords)
        finally:
            if self.closed:
                super().close()

    def close(self) -> None:
        self.closed = True
        super().close()


def new_session() -> requests.Session:
    """Return a session, which is thread-safe as long as it is not modified."""
    session = _Session()
    adapter = requests.adapters.HTTPAdapter(
        pool_connections=8, pool_maxsize=CONNECTIONS, max_retries=0
    )
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    session.headers.update(
        {"User-Agent": f"nodepool/{get_version_string()}", "Accept": "application/json"}
    )
    return session


def send(
    session: requests.Session,
    method: str,
    url: str,
    what: str,
    *,
    headers: Mapping[str, str] | None = None,
    params: Mapping[str, Any] | None = None,
    body: Any = None,
    data: Any = None,
    timeout: float = TIMEOUT,
    parse: bool = True,
) -> Answer:
    """Make one call.

    :param what: verb and object for messages, since URLs may contain secrets.
    :param body: sent as JSON; ``data`` is sent unchanged.
    :raises NoAnswer, HttpRefused:
    """
    try:
        response = session.request(
            method,
            url,
            headers=headers,
            params=params,
            json=body,
            data=data,
            timeout=(CONNECT_TIMEOUT, timeout),
        )
        content = response.content
    except (requests.RequestException, OSError) as error:
        # The message of the library contains the whole URL.
        raise NoAnswer(f"{what}: {plain(error)}") from None
    if response.status_code >= 300:  # redirects are not followed
        raise refusal(what, response.status_code, response.headers, content)
    if not parse:
        return Answer(response.status_code, response.headers, content.decode("utf-8", "replace"))
    if not content.strip():
        return Answer(response.status_code, response.headers, None)
    try:
        parsed = json.loads(content)
    except ValueError:
        raise NoAnswer(f"{what}: the answer is not JSON (status {response.status_code})") from None
    return Answer(response.status_code, response.headers, parsed)


def plain(error: BaseException) -> str:
    """Return the root cause, such as "Connection refused"."""
    cause: Any = error
    while True:
        below = cause.__cause__ or cause.__context__ or getattr(cause, "reason", None)
        if not isinstance(below, BaseException):
            break
        cause = below
    text = str(cause).partition(" for url:")[0].partition("(Caused by")[0]
    return f"{type(cause).__name__}: {bounded(text)}" if "?" not in text else type(cause).__name__


def refusal(what: str, status: int, headers: Mapping[str, str], content: bytes) -> HttpRefused:
    """Return the exception for an error response.

    Understands ``{"error": {"code", "message"}}``, ``{"errors": [{...}]}`` and
    ``{"error", "error_description"}``.
    """
    code = message = ""
    try:
        told = json.loads(content)
        error = told.get("error") or (told.get("errors") or [{}])[0]
        if isinstance(error, dict):
            code, message = (
                str(error.get("code") or error.get("status") or ""),
                str(error.get("message") or ""),
            )
        else:
            code, message = (
                str(error),
                str(told.get("error_description") or told.get("message") or ""),
            )
    except (ValueError, AttributeError, IndexError, KeyError, TypeError):
        message = content[:300].decode("utf-8", "replace")
    return HttpRefused(what, status, code, bounded(message), requested_pause(headers))


def retry_after(error: BaseException) -> float | None:
    return error.retry_after if isinstance(error, HttpRefused) else None


def classified(
    error: BaseException, kind_of_code: Callable[[str, str], ErrorKind | None]
) -> ErrorKind:
    """Return the type of any error of this module.

    :param kind_of_code: returns the type for the cloud's own code and message; None if they do not
        decide it.
    """
    if isinstance(error, CallTimeout):
        return error.kind
    if isinstance(error, NoAnswer):
        return ErrorKind.TRANSIENT
    if isinstance(error, NoAccess):
        return ErrorKind.CONFIGURATION
    if not isinstance(error, HttpRefused):
        return ErrorKind.OTHER
    if error.status == 404:
        return ErrorKind.NOT_FOUND
    if error.status == 429:
        return ErrorKind.THROTTLED
    return kind_of_code(error.code, error.message) or kind_of_status(error.status)


def kind_of_status(status: int) -> ErrorKind:
    """Return the error type for an HTTP status, if the error code does not decide it."""
    if status >= 500:
        return ErrorKind.TRANSIENT
    if status in (400, 401, 403, 422):
        return ErrorKind.CONFIGURATION
    return ErrorKind.OTHER

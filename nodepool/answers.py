"""Answers of HTTP servers that are not trusted, with a limit of size and time.

Not imported by parts that work without requests.
"""

from __future__ import annotations

import email.utils
import io
import ssl
import time
from collections.abc import Mapping
from typing import Any

import requests
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, MaxRetryError

#: Headers of a call: a small compressed answer may be a large one.
UNCOMPRESSED = {"Accept-Encoding": "identity"}
#: Bytes and seconds of the body of an answer, and of one of a cloud, which may list much.
MOST, LONGEST = 16 << 20, 60.0
MOST_OF_CLOUD, LONGEST_OF_CLOUD = 64 << 20, 120.0


#: Accepted Retry-After in seconds: 0 would mean many calls per second, and a wrong clock would ask
#: for days.
LEAST_ASKED, LONGEST_ASKED = 1.0, 120.0


def requested_pause(headers: Mapping[str, str], most: float = LONGEST_ASKED) -> float | None:
    """Return the seconds of a Retry-After header, which contains seconds or a date.

    :param most: longest pause that is accepted.
    :return: None: there is no valid one.
    """
    text = headers.get("Retry-After") or ""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    # In this order, NaN is the shortest one.
    return min(max(LEAST_ASKED, seconds), most)


class DirectSession(requests.Session):
    """A session that follows no redirects, and sends only credentials of ours.

    The library reads the body of a redirect without a limit, even to ignore it.
    """

    def __init__(self) -> None:
        super().__init__()
        # Without this, a .netrc of the user would replace the header Authorization.
        self.auth = lambda request: request

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


class TrustingAdapter(requests.adapters.HTTPAdapter):
    """Connections to servers whose authority the configuration names.

    The library's own context is too strict for some, see :func:`nodepool.base.tls.trusting`.
    """

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        # The session adds the authority.
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        super().init_poolmanager(*args, ssl_context=self._context, **options)

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        return super().proxy_manager_for(proxy, ssl_context=self._context, **options)


class _Body(io.BytesIO):
    """Lets a library set attributes that a connection has."""


class CloudSession(DirectSession):
    """A session of which every answer is bounded, also for libraries that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.headers.update(UNCOMPRESSED)

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Return the answer, whose body has arrived.

        :raises requests.RequestException: it cannot be had.
        """
        answer = super().send(request, **{**options, "stream": True})
        try:
            answer.raw = _Body(body_of(answer.raw))
        except OSError as error:
            answer.close()
            raise requests.ConnectionError(str(error), request=request) from error
        return answer


def content_of(
    answer: requests.Response, most: int | None = None, longest: float | None = None
) -> bytes:
    """Return the body of an answer that is read from the connection.

    :param most: bytes; `MOST` if not given.
    :param longest: seconds; `LONGEST` if not given.
    :raises OSError: it is compressed, too long, arrives too slowly, or the connection is lost.
    """
    found = body_of(answer.raw, most or MOST, longest or LONGEST)
    # An error may repeat what was sent.
    token = answer.request.headers.get("Authorization", "").rpartition(" ")[2].encode()
    return found.replace(token, b"[token]") if token else found


def body_of(
    answer: BaseHTTPResponse, most: int = MOST_OF_CLOUD, longest: float = LONGEST_OF_CLOUD
) -> bytes:
    """Return the body of an answer; the parameters and errors are those of `content_of`."""
    if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
        raise OSError(f"its answer is compressed ({encoding}) although that was not requested")
    found, deadline = bytearray(), time.monotonic() + longest
    try:
        while data := answer.read1(1 << 16):
            found += data
            if len(found) > most or time.monotonic() > deadline:
                raise OSError(
                    f"its answer has more than {most} bytes, or took longer than {longest:g} s"
                )
    except HTTPError as error:
        raise OSError(str(error)) from error
    return bytes(found)


def is_untrusted(error: Exception) -> bool:
    """Return whether the certificate of a server was refused: a later call fails, too."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def reason_of(error: Exception) -> str:
    """Return why a server does not answer, without the URL that the library repeats."""
    reason = error.args[0] if error.args else type(error).__name__
    if isinstance(reason, MaxRetryError):
        reason = reason.reason
    return (
        f"{reason}; if the certificate is right, set ca-file to that of its authority"
        if is_untrusted(error)
        else str(reason)
    )

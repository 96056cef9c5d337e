"""The parts of HTTP used by the interface: values, errors, negotiation, conditions."""

from __future__ import annotations

import abc
import email.utils
import functools
import http
import logging
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from kazoo.exceptions import KazooException, NoAuthError

from nodepool.access.identity import Denied, Sender
from nodepool.exceptions import NOT_PERMITTED, ZKException

MAX_QUERY_FIELDS = 20
MAX_PARAMETER_LENGTH = 1024
#: Header: seconds after which a client repeats a call that the server cannot answer now.
RETRY = ("Retry-After", "1")
CHALLENGE = ("WWW-Authenticate", 'Bearer realm="nodepool"')

_MEDIA_RANGE = re.compile(r"([\w!#$&^.+-]+|\*)/([\w!#$&^.+-]+|\*)\Z")
_OF_DENIED = {
    http.HTTPStatus.UNAUTHORIZED: (CHALLENGE,),
    http.HTTPStatus.SERVICE_UNAVAILABLE: (RETRY,),
}

_CODES = {
    http.HTTPStatus.FORBIDDEN: "not-allowed",
    http.HTTPStatus.NOT_FOUND: "not-found",
    http.HTTPStatus.METHOD_NOT_ALLOWED: "method-not-allowed",
    http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too-large",
    http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "too-large",
    http.HTTPStatus.SERVICE_UNAVAILABLE: "busy",
}

#: Sends a part of an answer; waits while the client reads too slowly.
Write = Callable[[bytes], Awaitable[None]]

log = logging.getLogger("nodepool.WebApp")


class HttpError(Exception):
    """Answered with this status and text.

    :ivar code: for programs, where errors are JSON; by default that of the status.
    """

    def __init__(
        self,
        status: http.HTTPStatus,
        text: str,
        code: str = "",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.code = code or _CODES.get(status, "bad-request")
        self.headers = headers


def as_answer(error: Exception, path: str, is_call: bool = False) -> HttpError:
    """Return the answer for any error; log the ones that no client has caused.

    :param is_call: the request is a call that may change something.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, Denied):
        return HttpError(error.status, str(error), error.code, _OF_DENIED.get(error.status, ()))
    if isinstance(error, KazooException | ZKException | TimeoutError):
        log.warning("Cannot answer %s: %s: %s", path, type(error).__name__, error)
        text = f"ZooKeeper cannot be reached{'; try again' if is_call else ''}"
        text = NOT_PERMITTED if isinstance(error, NoAuthError) else text
        return HttpError(http.HTTPStatus.SERVICE_UNAVAILABLE, text, "no-zookeeper")
    log.error("Cannot answer %s", path, exc_info=error)
    text = f"Internal error, see the log{' of the launcher' if is_call else ''}"
    return HttpError(http.HTTPStatus.INTERNAL_SERVER_ERROR, text, "internal")


@dataclass(frozen=True)
class Response:
    body: bytes
    content_type: str = "text/plain; charset=UTF-8"
    status: http.HTTPStatus = http.HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()
    #: Whether pages of other sites may read it.
    cors: bool = True


class Stream(abc.ABC):
    """An answer that is sent while it is produced.

    :ivar headers: of the answer.
    """

    headers: tuple[tuple[str, str], ...]

    @abc.abstractmethod
    async def send(self, begin: Callable[[], Awaitable[Write]]) -> None:
        """Produce the answer; canceled when the client disconnects.

        :param begin: sends the head, and returns what sends parts; both may raise
            ``ConnectionError``.
        """


@dataclass(frozen=True)
class Request(Sender):
    """A request that has arrived completely.

    :param query: as sent.
    """

    method: str = "GET"
    path: str = "/"
    query: str = ""
    body: bytes = b""

    @functools.cached_property
    def lists(self) -> Mapping[str, list[str]]:
        """Return the values of each parameter.

        :raises HttpError: one is invalid (400).
        """
        return parse_parameters(self.query)

    @property
    def parameters(self) -> Mapping[str, str]:
        """Return the first value of each parameter."""
        return {name: values[0] for name, values in self.lists.items()}


def parse_parameters(query: str) -> dict[str, list[str]]:
    """Return the values of each parameter.

    :raises HttpError: not UTF-8, too many or too long (400).
    """
    try:
        pairs = urllib.parse.parse_qsl(
            query, keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS
        )
    except ValueError as error:
        raise HttpError(http.HTTPStatus.BAD_REQUEST, f"Bad query: {error}") from None
    result: dict[str, list[str]] = {}
    for name, value in pairs:
        if len(value) > MAX_PARAMETER_LENGTH:
            raise HttpError(
                http.HTTPStatus.BAD_REQUEST,
                f"Parameter is longer than {MAX_PARAMETER_LENGTH} characters",
            )
        result.setdefault(name, []).append(value)
    return result


def names_tag(condition: str | None, tag: str) -> bool:
    """Return whether ``If-None-Match`` names this tag, maybe as weak, or any tag."""
    named = {each.strip().removeprefix("W/") for each in (condition or "").split(",")}
    return not named.isdisjoint({tag, "*"})


def parse_date(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def format_date(seconds: float) -> str:
    return email.utils.formatdate(seconds, usegmt=True)


def _ranges(accept: str) -> list[tuple[str, str, float]] | None:
    """Return media ranges with their weights; None if the header is malformed."""
    result = []
    for part in accept.split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        if not media:
            continue
        match = _MEDIA_RANGE.match(media.lower())
        if not match:
            return None
        weight = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "q":
                try:
                    weight = float(value)
                except ValueError:
                    return None
                if not 0 <= weight <= 1:
                    return None
        result.append((match[1], match[2], weight))
    return result


def negotiate(accept: str | None, offers: Sequence[str]) -> str | None:
    """Return the offer that ranks first; None if none is acceptable.

    Of offers with equal weight the earlier one is returned.
    """
    ranges = _ranges(accept) if accept else None
    if not ranges:
        return offers[0]

    def weight(offer: str) -> float:
        kind, subtype = offer.split("/")
        matching = [
            # The most specific range decides.
            ((r_kind != "*") + (r_sub != "*"), q)
            for r_kind, r_sub, q in ranges
            if r_kind in (kind, "*") and r_sub in (subtype, "*")
        ]
        return max(matching)[1] if matching else 0.0

    best = max(offers, key=weight)
    return best if weight(best) > 0 else None

"""The parts of HTTP used by the interface, on WSGI: values, negotiation, conditions."""

from __future__ import annotations

import email.utils
import http
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_QUERY_FIELDS = 20
MAX_PARAMETER_LENGTH = 1024

_MEDIA_RANGE = re.compile(r"([\w!#$&^.+-]+|\*)/([\w!#$&^.+-]+|\*)\Z")

#: Key of the environment with a Response that exists already.
ANSWER = "nodepool.answer"

StartResponse = Callable[..., Any]


class HttpError(Exception):
    """Answered with this status and text."""

    def __init__(self, status: http.HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@dataclass(frozen=True)
class Response:
    body: bytes
    content_type: str = "text/plain; charset=UTF-8"
    status: http.HTTPStatus = http.HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()
    #: Whether pages of other sites may read it.
    cors: bool = True


@dataclass(frozen=True)
class Request:
    path: str
    #: The first value of each parameter, and all of them.
    parameters: Mapping[str, str]
    lists: Mapping[str, list[str]]
    accept: str | None
    if_modified_since: float | None
    head: bool

    @classmethod
    def fromEnviron(cls, environ: Mapping[str, Any]) -> Request:
        """Return the request.

        :raises HttpError: a parameter is invalid (400).
        """
        lists = parse_parameters(environ.get("QUERY_STRING", ""))
        return cls(
            path=path_of(environ),
            parameters={name: values[0] for name, values in lists.items()},
            lists=lists,
            accept=environ.get("HTTP_ACCEPT"),
            if_modified_since=parse_date(environ.get("HTTP_IF_MODIFIED_SINCE")),
            head=environ.get("REQUEST_METHOD") == "HEAD",
        )


def path_of(environ: Mapping[str, Any]) -> str:
    """Return the path, which WSGI passes as latin-1."""
    return str(environ.get("PATH_INFO", "")).encode("latin-1", "replace").decode("utf-8", "replace")


def parse_parameters(query: str) -> dict[str, list[str]]:
    """Return the values of each parameter.

    :raises HttpError: not UTF-8, too many or too long (400).
    """
    try:
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS)
    except ValueError as error:
        raise HttpError(http.HTTPStatus.BAD_REQUEST, f"Bad query: {error}") from None
    result: dict[str, list[str]] = {}
    for name, value in pairs:
        if len(value) > MAX_PARAMETER_LENGTH:
            raise HttpError(http.HTTPStatus.BAD_REQUEST, f"Parameter is longer than {MAX_PARAMETER_LENGTH} characters")
        result.setdefault(name, []).append(value)
    return result


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


def send(response: Response, head: bool, start_response: StartResponse) -> Iterable[bytes]:
    headers = [
        ("Content-Type", response.content_type),
        ("Content-Length", str(len(response.body))),
        *([("Access-Control-Allow-Origin", "*")] if response.cors else []),
        *response.headers,
    ]
    if response.status == http.HTTPStatus.NOT_MODIFIED:
        headers = [each for each in headers if each[0] not in ("Content-Type", "Content-Length")]
    start_response(f"{response.status.value} {response.status.phrase}", headers)
    return [] if head or response.status == http.HTTPStatus.NOT_MODIFIED else [response.body]

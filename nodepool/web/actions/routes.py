"""The table of calls: who may make them, what they expect, what they answer."""

from __future__ import annotations

import abc
import http
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from nodepool.access.identity import Identity, Role
from nodepool.web.actions.bodies import Body
from nodepool.web.http import RETRY, HttpError, Stream
from nodepool.web.shares import Share
from nodepool.zk import paths

JSON = "application/json"
PROBLEM = "application/problem+json"
B = TypeVar("B", bound=Body)


class Refused(HttpError):
    """The answer is an error (RFC 9457)."""

    def __init__(
        self,
        status: http.HTTPStatus,
        code: str,
        detail: str,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(status, detail, code, headers)


def busy(detail: str) -> Refused:
    """Return the answer of a server that can do no more of this now."""
    return Refused(http.HTTPStatus.SERVICE_UNAVAILABLE, "busy", detail, (RETRY,))


@dataclass(frozen=True)
class Call:
    """One call.

    :param names: the parts of the path in braces.
    :param key: idempotency key of the client.
    """

    identity: Identity
    names: Mapping[str, str]
    query: Mapping[str, str]
    body: Body | None = None
    key: str | None = None

    def parsed(self, kind: type[B]) -> B:
        """Return the body, which is of the type that the route names."""
        assert isinstance(self.body, kind)
        return self.body


@dataclass(frozen=True)
class Reply:
    """An answer; ``content`` is encoded as JSON unless it is a text.

    :param target: the object of the call for the audit log, if the path does not name it.
    """

    content: msgspec.Struct | dict[str, Any] | str | None
    status: http.HTTPStatus = http.HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()
    target: str | None = None


class Later(abc.ABC):
    """An answer that waits for a change of a lease, or for work of another thread."""

    @abc.abstractmethod
    async def outcome(self, share: Share) -> Reply | Stream:
        """Return the answer; on the loop of the server.

        :param share: of the caller; runs everything that may block.
        :raises Refused: the answer is an error.
        """

    async def shortened(self, _share: Share) -> Reply | None:
        """Return the answer to a caller that is not accepted any more; None: it gets an error."""
        return None


@dataclass(frozen=True)
class Route:
    """One call of the API.

    :param path: below ``/api/v1``, with names in braces.
    :param answers: type of the content by status; str is a text, bytes are frames.
    :param of_lease: a lease token may make the call for its own lease.
    :param target: the object for the audit log; empty: the call changes nothing.
    :param query: parameter -> its meaning.
    """

    method: str
    path: str
    function: Callable[[Call], Reply | Later]
    summary: str
    role: Role
    answers: Mapping[http.HTTPStatus, Any]
    body: type[Body] | None = None
    of_lease: bool = False
    target: str = ""
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path) + r"\Z")


class Table:
    """Finds the route of a path."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = routes
        self._patterns = [(route.pattern, route) for route in routes]

    def knows(self, path: str) -> bool:
        return any(pattern.match(path) for pattern, _route in self._patterns)

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """Return the route and the names in the path, which the table knows.

        :raises Refused: the path exists with other methods (405), or names what cannot exist (404).
        """
        found = [
            (route, match.groupdict())
            for pattern, route in self._patterns
            if (match := pattern.match(path))
        ]
        for route, names in found:
            if route.method == method:
                if not paths.are_names(*names.values()):
                    raise Refused(
                        http.HTTPStatus.NOT_FOUND,
                        "not-found",
                        "The path has a name that is not valid",
                    )
                return route, names
        allowed = ", ".join(sorted({route.method for route, _names in found}))
        raise Refused(
            http.HTTPStatus.METHOD_NOT_ALLOWED,
            "method-not-allowed",
            f"{path} supports {allowed}",
            (("Allow", allowed),),
        )


def parse(route: Route, content_type: str, data: bytes) -> Body | None:
    """Return the body of a call.

    :raises Refused: it is not JSON (415), or not of the route's type (422); the text names the
        place.
    """
    if route.body is None:
        return None
    if content_type.partition(";")[0].strip().lower() != JSON:
        raise Refused(
            http.HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "not-json",
            f"Content-Type must be {JSON}, not {content_type[:80] or 'empty'}",
        )
    try:
        return msgspec.json.decode(data or b"{}", type=route.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(
            http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", f"Invalid body: {error}"
        ) from None

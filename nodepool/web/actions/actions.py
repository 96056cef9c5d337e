"""Receives calls: identifies the caller, checks its role, and records the result."""

from __future__ import annotations

import asyncio
import functools
import http
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from nodepool.access import audit
from nodepool.access.access import Access
from nodepool.access.identity import Denied, Identity, Role
from nodepool.access.tokens import LEASE_PREFIX
from nodepool.config.access import AccessConfig
from nodepool.web import access as pages
from nodepool.web.actions.execution import ProgramCalls
from nodepool.web.actions.leases import LeaseCalls
from nodepool.web.actions.openapi import TEXT, document
from nodepool.web.actions.operators import OperatorCalls
from nodepool.web.actions.routes import JSON, Call, Later, Refused, Reply, Route, Table, parse
from nodepool.web.actions.waiting import Waiting
from nodepool.web.admissions import Admissions, Admitted, Dismissed, Hold
from nodepool.web.http import CHALLENGE, Request, Response, Stream, as_answer
from nodepool.web.shares import Share, Shares
from nodepool.web.tables import Leasing
from nodepool.zk.zookeeper import ZooKeeper

API = "/api/v1"
OPENAPI = "/api/v1/openapi.json"
LONGEST_KEY = 255
#: Records the object of a call (None: the one in its path), and the result.
Note = Callable[[str | None, str], None]


class Actions:
    """The calls, for one launcher; the configuration is that in force.

    :param who_sees: ``webapp: pages``, for callers without a name.
    """

    def __init__(self, launcher: Leasing, who_sees: str) -> None:
        self._launcher = launcher
        self.admissions = Admissions()

        def access() -> AccessConfig:
            config = launcher.config
            return AccessConfig() if config is None else config.access

        def max_hold_age() -> float:
            config = launcher.config
            return math.inf if config is None else config.max_hold_age

        self.callers = pages.Callers(who_sees, Access(self._zk, access, self.admissions.note))
        self.waiting = Waiting(self._zk, launcher.feed, max_hold_age)
        leases = LeaseCalls(self._zk, lambda: launcher.config, self.waiting)
        programs, operators = ProgramCalls(launcher, leases), OperatorCalls(self._zk, leases)
        self.table = Table([*leases.routes(), *programs.routes(), *operators.routes()])

    def _zk(self) -> ZooKeeper:
        """Return the facade.

        :raises Refused: it cannot answer now (503).
        """
        zk = self._launcher.getZK()
        if zk is None or not zk.synced:
            raise Refused(
                http.HTTPStatus.SERVICE_UNAVAILABLE,
                "no-zookeeper",
                "ZooKeeper cannot be reached; try again",
            )
        return zk

    def serves(self, path: str) -> bool:
        return path == OPENAPI or (
            path.startswith(API + "/") and self.table.knows(path.removeprefix(API))
        )

    @functools.cached_property
    def _document(self) -> bytes:
        return json.dumps(document(self.table.routes)).encode()

    async def answer(self, request: Request, shares: Shares) -> Response | Stream:
        """Return the answer to a call.

        :param shares: of the threads that run everything that may block.
        """
        if request.path == OPENAPI:
            return Response(self._document, JSON, headers=pages.HEADERS, cors=False)
        owner, job, note, hold = await asyncio.get_running_loop().run_in_executor(
            shares.threads, self._begin, request
        )
        share = shares.of(owner)
        reply = await share.run(job)
        if isinstance(reply, Reply):
            return _response(reply)
        with _noted(note, request):
            outcome = await self._outcome(reply, share, hold)
        note(outcome.target if isinstance(outcome, Reply) else None, "ok")
        return _response(outcome) if isinstance(outcome, Reply) else Admitted(outcome, hold)

    @staticmethod
    async def _outcome(reply: Later, share: Share, hold: Hold) -> Reply | Stream:
        try:
            async with hold():
                return await reply.outcome(share)
        except Dismissed:
            found = await reply.shortened(share)
            if found is None:
                raise
            return found

    def _begin(self, request: Request) -> tuple[str, Callable[[], Reply | Later], Note, Hold]:
        """Return the owner of a call, the job that answers it, and what records and ends it."""
        method = "GET" if request.method == "HEAD" else request.method
        route, names = self.table.find(method, request.path.removeprefix(API))
        try:
            identity = self.callers.identify(request)
        except Denied as error:
            sent = request.headers.get("authorization", "").partition(" ")[2]
            is_return = (route.method, route.path, error.status) == (
                "DELETE",
                "/leases/{id}",
                http.HTTPStatus.GONE,
            )
            if not is_return or not sent.startswith(f"{LEASE_PREFIX}{names['id']}_"):
                raise
            # It has ended already, and with it what identifies the caller.
            identity = Identity("unknown", f"lease:{names['id']}", Role.READ)
            ended: Reply | None = Reply(None, http.HTTPStatus.NO_CONTENT)
        else:
            ended = None
        note = self._auditor(request, identity, route, names)

        def job() -> Reply | Later:
            """Return the answer to the call, which has been recorded, or what waits for it."""
            with _noted(note, request):
                reply = ended or self._call(request, identity, route, names)
            if isinstance(reply, Reply):
                note(reply.target, "ok")
            return reply

        def check() -> Identity:
            found = self.callers.identify(request)
            _check_role(found, route, names)
            return found

        hold = functools.partial(self.admissions.hold, identity, check)
        is_named = identity.via != "anonymous"
        return identity.owner if is_named else self.callers.address(request), job, note, hold

    @staticmethod
    def _call(
        request: Request, identity: Identity, route: Route, names: dict[str, str]
    ) -> Reply | Later:
        _check_role(identity, route, names)
        key = request.headers.get("idempotency-key")
        if key is not None and not (0 < len(key) <= LONGEST_KEY and key.isprintable()):
            text = f"Idempotency-Key must have 1 to {LONGEST_KEY} printable characters"
            raise Refused(http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", text)
        query = request.parameters
        unknown = sorted(set(query) - set(route.query))
        if unknown:
            known = ", ".join(route.query) or "none"
            text = f"Unknown parameter {unknown[0][:40]}; known are {known}"
            raise Refused(http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", text)
        body = parse(route, request.headers.get("content-type", ""), request.body)
        return route.function(Call(identity, names, query, body, key))

    def _auditor(
        self, request: Request, identity: Identity, route: Route, names: dict[str, str]
    ) -> Note:
        address = self.callers.address(request)
        action = route.function.__name__.replace("_", "-")

        def note(target: str | None, result: str) -> None:
            if route.target:
                feed = self._launcher.feed
                event = feed.note if feed is not None else None
                audit.record(
                    event, identity, address, action, target or route.target.format(**names), result
                )

        return note


def _check_role(identity: Identity, route: Route, names: Mapping[str, str]) -> None:
    """Check whether a caller may make a call.

    :raises Refused: it may not.
    """
    own = route.of_lease and identity.lease is not None and identity.lease == names.get("id")
    if not own and (identity.lease is not None or identity.role < route.role):
        if identity.via == "anonymous":
            text = (
                "This call needs a token (`nodepool token create`), or the Unix socket of "
                "the launcher"
            )
            raise Refused(http.HTTPStatus.UNAUTHORIZED, "unauthorized", text, (CHALLENGE,))
        needed = (
            f"the role {route.role.name.lower()}; {identity.owner} has {identity.role.name.lower()}"
        )
        text = (
            "The token of a lease is for its own lease only"
            if identity.lease is not None
            else f"This call needs {needed}"
        )
        raise Refused(http.HTTPStatus.FORBIDDEN, "not-allowed", text)


@contextmanager
def _noted(note: Note, request: Request) -> Iterator[None]:
    """Note the code of an error, and raise it as an answer."""
    try:
        yield
    except Exception as error:
        found = as_answer(error, request.path, True)
        note(None, found.code)
        raise found from error


def _response(reply: Reply) -> Response:
    headers = (*pages.HEADERS, ("Cache-Control", "no-store"), *reply.headers)
    if isinstance(reply.content, str):
        return Response(reply.content.encode(), TEXT, reply.status, headers, cors=False)
    body = b"" if reply.content is None else msgspec.json.encode(reply.content)
    return Response(body, JSON, reply.status, headers, cors=False)

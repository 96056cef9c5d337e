"""Receives calls: identifies the caller, checks its role, and records the result."""

from __future__ import annotations

import dataclasses
import functools
import http
import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from kazoo.exceptions import KazooException

from nodepool.access import audit
from nodepool.access.access import UID, Access
from nodepool.access.identity import Denied, Identity, Role
from nodepool.access.tokens import LEASE_PREFIX
from nodepool.config.access import AccessConfig
from nodepool.config.model import Config
from nodepool.exceptions import ZKException
from nodepool.web import access as pages
from nodepool.web.actions.execution import ProgramCalls
from nodepool.web.actions.leases import LeaseCalls
from nodepool.web.actions.openapi import TEXT, document
from nodepool.web.actions.operators import OperatorCalls
from nodepool.web.actions.routes import JSON, PROBLEM, RETRY, Call, Later, Refused, Reply, Route, Stream, Table, parse
from nodepool.web.actions.waiting import Waiting
from nodepool.web.http import HttpError, Request, Response, path_of
from nodepool.web.tables import Leasing
from nodepool.zk.mirror.feed import Feed
from nodepool.zk.zookeeper import ZooKeeper

API = "/api/v1"
OPENAPI = "/api/v1/openapi.json"
MOST_BODY = 65536
LONGEST_KEY = 255

log = logging.getLogger("nodepool.WebApp")


class Parked:
    """A call that waits, with what is needed to answer it."""

    def __init__(self, later: Later, done: Callable[[Reply | Refused], Response]) -> None:
        self.later = later
        self.done = done


class Actions:
    """The calls, for one launcher.

    :param zk: returns the facade, which has a mirror.
    :param who_sees: ``webapp: pages``, for callers without a name.
    """

    def __init__(
        self,
        zk: Callable[[], ZooKeeper | None],
        config: Callable[[], Config | None],
        feed: Feed | None,
        access: Callable[[], AccessConfig],
        who_sees: str,
        launcher: Leasing | None = None,
    ) -> None:
        self._ready = zk
        self._feed = feed
        self._access = Access(self._zk, access)
        self._who_sees = who_sees

        def max_hold_age() -> float:
            found = config()
            return math.inf if found is None else found.max_hold_age

        self.waiting = Waiting(self._zk, feed, max_hold_age)
        leases = LeaseCalls(self._zk, config, self.waiting)
        programs, operators = ProgramCalls(launcher, leases), OperatorCalls(self._zk, leases)
        self.table = Table([*leases.routes(), *programs.routes(), *operators.routes()])

    @classmethod
    def of_launcher(cls, launcher: Leasing, who_sees: str) -> Actions:
        """Return the calls for a launcher; the configuration of access is that in force."""

        def access_config() -> AccessConfig:
            config = launcher.config
            return AccessConfig() if config is None else config.access

        return cls(launcher.getZK, lambda: launcher.config, launcher.feed, access_config, who_sees, launcher)

    def _zk(self) -> ZooKeeper:
        """Return the facade.

        :raises Refused: it cannot answer now (503).
        """
        zk = self._ready()
        if zk is None or not zk.synced:
            raise Refused(http.HTTPStatus.SERVICE_UNAVAILABLE, "no-zookeeper", "ZooKeeper cannot be reached; try again")
        return zk

    def serves(self, path: str) -> bool:
        return path == OPENAPI or (path.startswith(API + "/") and self.table.knows(path.removeprefix(API)))

    @functools.cached_property
    def _document(self) -> bytes:
        return json.dumps(document(self.table.routes)).encode()

    def identify(self, environ: Mapping[str, Any]) -> Identity:
        """Return who calls.

        :raises Refused: the token is not valid, or nobody may be told anything over this connection.
        """
        try:
            identity = self._access.identify(environ)
        except Denied as error:
            raise Refused(error.status, error.code, str(error), _challenge(error.status)) from error
        if identity.role is Role.READ and identity.via == "anonymous":
            try:
                pages.check(self._who_sees, {**self._seen(environ), "REQUEST_METHOD": "GET"})
            except HttpError as error:
                raise Refused(error.status, "not-allowed", error.text) from error
        return identity

    def check_reader(self, environ: Mapping[str, Any]) -> None:
        """Check whether a client may see pages, tables and events.

        :raises HttpError: it may not.
        """
        if UID not in environ and "HTTP_AUTHORIZATION" not in environ:
            pages.check(self._who_sees, self._seen(environ))
            return
        try:
            identity = self.identify(environ)
        except Refused as error:
            raise HttpError(error.status, str(error)) from error
        if identity.lease is not None:
            raise HttpError(http.HTTPStatus.FORBIDDEN, "The token of a lease is for its own lease only")
        pages.check(pages.EVERYWHERE, environ)

    def _seen(self, environ: Mapping[str, Any]) -> dict[str, Any]:
        """Return the environment with the address of the client of a named proxy."""
        return {**environ, "REMOTE_ADDR": self._access.peer(environ).address}

    def answer(self, environ: Mapping[str, Any]) -> Response | Parked:
        """Return the answer, or a call that waits; never raises."""
        path = path_of(environ)
        if path == OPENAPI:
            return Response(self._document, JSON, headers=pages.HEADERS, cors=False)
        done = functools.partial(self._response, None)
        route: Route | None = None
        identity: Identity | None = None
        try:
            method = "GET" if environ.get("REQUEST_METHOD") == "HEAD" else str(environ.get("REQUEST_METHOD"))
            route, names = self.table.find(method, path.removeprefix(API))
            identity = self.identify(environ)
            note = self._auditor(environ, identity, route, names) if route.target else None
            done = functools.partial(self._response, note)
            reply = self._call(environ, identity, route, names)
            return done(reply) if isinstance(reply, Reply) else Parked(reply, done)
        except Exception as error:
            refused = _refused(error, environ)
            if route is None or (route.method, route.path, refused.status) != ("DELETE", "/leases/{id}", http.HTTPStatus.GONE):
                return done(refused)
            if identity is None:  # the lease that might identify the caller is gone, too
                lease_id = names["id"]
                if not str(environ.get("HTTP_AUTHORIZATION")).partition(" ")[2].startswith(f"{LEASE_PREFIX}{lease_id}_"):
                    return done(refused)
                identity = Identity("unknown", f"lease:{lease_id}", Role.READ)
                done = functools.partial(self._response, self._auditor(environ, identity, route, names))
            return done(Reply(None, http.HTTPStatus.NO_CONTENT))  # it has ended already

    def resume(self, parked: Parked) -> Response | Parked | Stream:
        """Return the answer of a call that waited, or the call; never raises."""
        try:
            reply = parked.later.resume()
            if isinstance(reply, Stream):
                parked.done(Reply(None))  # for the audit log
                return reply
            return parked if reply is None else parked.done(reply)
        except Exception as error:
            return parked.done(_refused(error, {"PATH_INFO": parked.later.lease_id}))

    def give_up(self, parked: Parked) -> Response | Stream:
        """Answer a call now: too many wait already."""
        parked.later.deadline = 0.0
        outcome = self.resume(parked)
        assert not isinstance(outcome, Parked), "its deadline has passed"
        if isinstance(outcome, Stream) or outcome.status >= http.HTTPStatus.BAD_REQUEST:
            return outcome
        return dataclasses.replace(outcome, headers=(*outcome.headers, RETRY))

    @staticmethod
    def _call(environ: Mapping[str, Any], identity: Identity, route: Route, names: dict[str, str]) -> Reply | Later:
        own = route.of_lease and identity.lease is not None and identity.lease == names.get("id")
        if not own and (identity.lease is not None or identity.role < route.role):
            if identity.via == "anonymous":
                text = "This call needs a token (`nodepool token create`), or the Unix socket of the launcher"
                raise Refused(http.HTTPStatus.UNAUTHORIZED, "unauthorized", text, _challenge(http.HTTPStatus.UNAUTHORIZED))
            needed = f"the role {route.role.name.lower()}; {identity.owner} has {identity.role.name.lower()}"
            text = "The token of a lease is for its own lease only" if identity.lease is not None else f"This call needs {needed}"
            raise Refused(http.HTTPStatus.FORBIDDEN, "not-allowed", text)
        key = environ.get("HTTP_IDEMPOTENCY_KEY")
        if key is not None and not (0 < len(key) <= LONGEST_KEY and key.isprintable()):
            text = f"Idempotency-Key must have 1 to {LONGEST_KEY} printable characters"
            raise Refused(http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", text)
        query = Request.fromEnviron(environ).parameters
        unknown = sorted(set(query) - set(route.query))
        if unknown:
            known = ", ".join(route.query) or "none"
            text = f"Unknown parameter {unknown[0][:40]}; known are {known}"
            raise Refused(http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", text)
        data = environ["wsgi.input"].read(MOST_BODY) if route.body is not None else b""
        body = parse(route, str(environ.get("CONTENT_TYPE", "")), data)
        return route.function(Call(identity, names, query, body, key))

    def _auditor(
        self, environ: Mapping[str, Any], identity: Identity, route: Route, names: dict[str, str]
    ) -> Callable[[str | None, str], None]:
        address = self._access.peer(environ).address

        def note(target: str | None, result: str) -> None:
            what = target or route.target.format(**names)
            audit.record(
                self._feed.note if self._feed is not None else None,
                identity,
                address,
                route.function.__name__.replace("_", "-"),
                what,
                result,
            )

        return note

    @staticmethod
    def _response(note: Callable[[str | None, str], None] | None, reply: Reply | Refused) -> Response:
        headers = (*pages.HEADERS, ("Cache-Control", "no-store"), *reply.headers)
        if isinstance(reply, Refused):
            if note is not None:
                note(None, reply.code)
            return Response(msgspec.json.encode(reply.problem()), PROBLEM, reply.status, headers, cors=False)
        if note is not None:
            note(reply.target, "ok")
        if isinstance(reply.content, str):
            return Response(reply.content.encode(), TEXT, reply.status, headers, cors=False)
        body = b"" if reply.content is None else msgspec.json.encode(reply.content)
        return Response(body, JSON, reply.status, headers, cors=False)


def _challenge(status: http.HTTPStatus) -> tuple[tuple[str, str], ...]:
    if status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        return (RETRY,)
    return (("WWW-Authenticate", 'Bearer realm="nodepool"'),) if status == http.HTTPStatus.UNAUTHORIZED else ()


def _refused(error: Exception, environ: Mapping[str, Any]) -> Refused:
    """Return the answer for an error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HttpError):
        return Refused(error.status, "bad-request", error.text)
    if isinstance(error, KazooException | ZKException | TimeoutError):
        log.warning("Cannot answer %s: %s: %s", environ.get("PATH_INFO"), type(error).__name__, error)
        return Refused(http.HTTPStatus.SERVICE_UNAVAILABLE, "no-zookeeper", "ZooKeeper cannot be reached; try again")
    log.error("Cannot answer %s", environ.get("PATH_INFO"), exc_info=error)
    return Refused(http.HTTPStatus.INTERNAL_SERVER_ERROR, "internal", "Internal error, see the log of the launcher")

"""The paths of the web interface: one dispatch, one place that answers errors."""

from __future__ import annotations

import functools
import http
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from nodepool import status
from nodepool.access.identity import Denied, Identity
from nodepool.metrics.prometheus import Exposition
from nodepool.web import access
from nodepool.web.actions.actions import Actions
from nodepool.web.actions.bodies import Problem
from nodepool.web.actions.routes import PROBLEM
from nodepool.web.admissions import Admitted
from nodepool.web.cache import ResponseCache
from nodepool.web.http import (
    HttpError,
    Request,
    Response,
    Stream,
    as_answer,
    format_date,
    negotiate,
    parse_date,
)
from nodepool.web.shares import Shares
from nodepool.web.streams import Follower, Streams
from nodepool.web.tables import Launcher
from nodepool.web.v1 import API, EVENTS, PAGES, Api
from nodepool.zk.zookeeper import ZooKeeper

log = logging.getLogger("nodepool.WebApp")

HTML, TEXT, JSON = "text/html", "text/plain", "application/json"
CONTENT_TYPES = {HTML: "text/plain; charset=UTF-8", TEXT: "text/plain; charset=UTF-8", JSON: JSON}
NO_STORE = (("Cache-Control", "no-store"),)


@dataclass(frozen=True)
class Listing:
    """One path: what it reads, its columns, and its parameters besides ``fields``."""

    read: Callable[..., status.Results]
    columns: Mapping[str, str]
    parameters: tuple[str, ...] = ()
    #: It shows this launcher (``read`` gets the NodePool), not the cluster.
    own: bool = False


def _uploads(zk: ZooKeeper) -> status.Results:
    """Return the table of 11.0.0; JSON has the keys of the detailed one."""
    return status.Results(
        status.image_list(zk, detail=True, ended=False).rows, status.UPLOAD_COLUMNS
    )


def _builds(zk: ZooKeeper) -> status.Results:
    return status.Results(
        status.dib_image_list(zk, detail=True, ended=False).rows, status.BUILD_COLUMNS
    )


LISTINGS = {
    "/image-list": Listing(_uploads, status.UPLOAD_COLUMNS),
    "/dib-image-list": Listing(_builds, status.BUILD_COLUMNS),
    "/image-progress": Listing(status.image_progress, status.PROGRESS_COLUMNS),
    "/image-status": Listing(status.image_status, status.IMAGE_STATUS_COLUMNS),
    "/node-list": Listing(status.node_list, status.NODE_DETAIL_COLUMNS, ("node_id",)),
    "/request-list": Listing(status.request_list, status.REQUEST_COLUMNS),
    "/problem-list": Listing(status.problem_list, status.PROBLEM_COLUMNS),
    "/label-list": Listing(status.label_list, status.LABEL_COLUMNS),
    "/waiting-list": Listing(status.waiting_list, status.WAITING_COLUMNS, own=True),
}


class Application:
    """Answers calls, and every other request like GET, from the launcher's mirror."""

    def __init__(
        self,
        nodepool: Launcher,
        cache: ResponseCache[bytes],
        exposition: Exposition,
        max_age: float,
        check: Callable[[Request], Identity],
        streams: Streams,
        api: Api,
        actions: Actions | None,
        shares: Shares,
    ) -> None:
        """Create the application.

        :param check: raises an error if a client may not see pages, tables and events.
        :param shares: of the threads that run everything that may block.
        """
        self._nodepool = nodepool
        self._cache = cache
        self._exposition = exposition
        self._max_age = max_age
        self._check = check
        self._api = api
        self._streams = streams
        self._actions = actions
        self._shares = shares

    async def answer(self, request: Request) -> Response | Stream:
        """Return the answer to any request; never raises."""
        actions = self._actions
        is_call = actions is not None and actions.serves(request.path)
        try:
            if actions is not None and is_call:
                return await actions.answer(request, self._shares)
            read: Callable[[Request], Response | Follower] = (
                self._streams.read if request.path == EVENTS else self._read
            )
            # Behind a proxy that is named, the client is another one than the peer.
            address = request.address if actions is None else actions.callers.address(request)
            found = await self._shares.of(address).run(functools.partial(read, request))
            if actions is not None and isinstance(found, Follower):
                check = functools.partial(self._check, request)
                return Admitted(
                    found, functools.partial(actions.admissions.hold, found.identity, check)
                )
            return found
        except Exception as error:
            return self.failure(as_answer(error, request.path, is_call), request.path)

    @staticmethod
    def failure(error: HttpError, path: str) -> Response:
        """Return the answer for an error: JSON below ``/api/v1``, else a text."""
        headers = (*NO_STORE, *error.headers)
        if not is_api(path):
            body = error.text.encode("utf-8", "replace")
            return Response(body, status=error.status, headers=headers, cors=not Api.serves(path))
        problem = Problem(error.status.phrase, error.status.value, error.code, error.text)
        return Response(
            msgspec.json.encode(problem),
            PROBLEM,
            error.status,
            (*access.HEADERS, *headers),
            cors=False,
        )

    def _read(self, request: Request) -> Response:
        """Return an answer that changes nothing."""
        parameters = request.parameters
        if not Api.serves(request.path):
            return self._dispatch(request, parameters)
        self._check(request)
        return self._api.answer(request)

    def _dispatch(self, request: Request, parameters: Mapping[str, str]) -> Response:
        listing, accept = LISTINGS.get(request.path), request.headers.get("accept")
        if listing is not None:
            return self._list(request, parameters, listing)
        if request.path == "/ready":
            return self._ready("verbose" in parameters)
        if request.path == "/metrics":
            return Response(*self._exposition.render(accept), headers=NO_STORE)
        if request.path == "/" and negotiate(accept, (TEXT, JSON, HTML)) == HTML:
            try:
                self._check(request)
            except (Denied, HttpError) as error:
                log.debug("Not redirecting to the pages: %s", error)
            else:
                return Response(
                    b"",
                    status=http.HTTPStatus.FOUND,
                    headers=(("Location", PAGES), *NO_STORE),
                    cors=False,
                )
        there = ", ".join(sorted([*LISTINGS, "/ready", "/metrics"]))
        raise HttpError(http.HTTPStatus.NOT_FOUND, f"Not found; there are {there}")

    def _ready(self, verbose: bool) -> Response:
        """Return readiness, with problems in separate lines if not ready or *verbose*.

        Probes of 11.0.0 compare the text with ``OK``.
        """
        ready, details = self._nodepool.getReadiness()
        lines = details if verbose or not ready else []
        body = "\n".join(["OK" if ready else "Not ready", *lines]).encode()
        code = http.HTTPStatus.OK if ready else http.HTTPStatus.SERVICE_UNAVAILABLE
        return Response(body, status=code, headers=NO_STORE)

    def _list(self, request: Request, parameters: Mapping[str, str], listing: Listing) -> Response:
        media = negotiate(request.headers.get("accept"), (HTML, TEXT, JSON))
        if media is None:
            raise HttpError(
                http.HTTPStatus.NOT_ACCEPTABLE, "Available are text/plain and application/json"
            )
        zk = self._nodepool.getZK()
        if zk is None:
            raise HttpError(
                http.HTTPStatus.SERVICE_UNAVAILABLE, "ZooKeeper has not been reached yet"
            )
        if not zk.synced:
            # A call to ZooKeeper would wait for the server and block the few threads that also
            # answer /ready.
            raise HttpError(
                http.HTTPStatus.SERVICE_UNAVAILABLE,
                (
                    "ZooKeeper's content is being read, try again"
                    if zk.connected
                    else "ZooKeeper cannot be reached"
                ),
            )
        arguments = {name: parameters[name] for name in listing.parameters if name in parameters}
        form = "json" if media == JSON else "pretty"
        fields = _fields(parameters, listing) if form == "pretty" else None

        def make() -> bytes:
            source = self._nodepool if listing.own else zk
            return status.output(listing.read(source, **arguments), form, fields).encode()

        entry = self._cache.get((request.path, tuple(arguments.items()), fields, form), make)
        headers = (
            ("Cache-Control", f"max-age={self._max_age:g}, public"),
            ("Last-Modified", format_date(entry.made_at)),
            ("Expires", format_date(entry.made_at + self._max_age)),
        )
        content_type = CONTENT_TYPES[media]
        since = parse_date(request.headers.get("if-modified-since"))
        if since is not None and entry.made_at <= since:
            return Response(b"", content_type, http.HTTPStatus.NOT_MODIFIED, headers)
        return Response(entry.body, content_type, headers=headers)


def is_api(path: str) -> bool:
    return f"{path}/".startswith(API)


def _fields(parameters: Mapping[str, str], listing: Listing) -> tuple[str, ...] | None:
    """Return the requested columns in table order, so that spellings share a cache entry."""
    text = parameters.get("fields")
    if text is None:
        return None
    wanted = {name.strip() for name in text.split(",")}
    return tuple(key for key in listing.columns if key in wanted)

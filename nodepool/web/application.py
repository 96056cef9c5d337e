"""The paths of the web interface as a WSGI application."""

from __future__ import annotations

import http
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kazoo.exceptions import KazooException

from nodepool import status
from nodepool.exceptions import ZKException
from nodepool.metrics.prometheus import Exposition
from nodepool.web.cache import ResponseCache
from nodepool.web.http import ANSWER, HttpError, Request, Response, StartResponse, format_date, negotiate, send
from nodepool.web.streams import Streams
from nodepool.web.tables import Launcher
from nodepool.web.v1 import EVENTS, PAGES, Api
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
    return status.Results(status.image_list(zk, detail=True, ended=False).rows, status.UPLOAD_COLUMNS)


def _builds(zk: ZooKeeper) -> status.Results:
    return status.Results(status.dib_image_list(zk, detail=True, ended=False).rows, status.BUILD_COLUMNS)


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
    """Answers GET, and every other method alike, from the launcher's mirror."""

    def __init__(
        self,
        nodepool: Launcher,
        cache: ResponseCache[bytes],
        exposition: Exposition,
        max_age: float,
        check: Callable[[Mapping[str, Any]], None],
        streams: Streams,
        api: Api,
    ) -> None:
        """Create the application.

        :param check: raises HttpError if a client may not see pages, tables and events.
        """
        self._nodepool = nodepool
        self._cache = cache
        self._exposition = exposition
        self._max_age = max_age
        self._check = check
        self._api = api
        self._streams = streams

    def __call__(self, environ: Mapping[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        head = environ.get("REQUEST_METHOD") == "HEAD"
        return send(environ.get(ANSWER) or self._answer(environ), head, start_response)

    def _answer(self, environ: Mapping[str, Any]) -> Response:
        own = Api.serves(str(environ.get("PATH_INFO", "")))
        try:
            request = Request.fromEnviron(environ)
            if not own:
                return self._dispatch(request, environ)
            if request.path == EVENTS:
                # Clients of streams are handled by StreamChannel; rejected ones get a 503 response with the reason.
                self._streams.check(environ)
                raise HttpError(http.HTTPStatus.SERVICE_UNAVAILABLE, "Try again")
            self._check(environ)
            return self._api.answer(request, environ)
        except HttpError as error:
            return _failure(error.status, error.text, not own)
        except (KazooException, ZKException) as error:
            log.warning("Cannot answer %s: %s: %s", environ.get("PATH_INFO"), type(error).__name__, error)
            return _failure(http.HTTPStatus.SERVICE_UNAVAILABLE, "ZooKeeper cannot be reached", not own)
        except Exception:
            log.exception("Cannot answer %s", environ.get("PATH_INFO"))
            return _failure(http.HTTPStatus.INTERNAL_SERVER_ERROR, "Internal error, see the log", not own)

    def _dispatch(self, request: Request, environ: Mapping[str, Any]) -> Response:
        listing = LISTINGS.get(request.path)
        if listing is not None:
            return self._list(request, listing)
        if request.path == "/ready":
            return self._ready("verbose" in request.parameters)
        if request.path == "/metrics":
            return Response(*self._exposition.render(request.accept), headers=NO_STORE)
        if request.path == "/" and negotiate(request.accept, (TEXT, JSON, HTML)) == HTML:
            try:
                self._check(environ)
            except HttpError as error:
                log.debug("Not redirecting to the pages: %s", error)
            else:
                return Response(b"", status=http.HTTPStatus.FOUND, headers=(("Location", PAGES), *NO_STORE), cors=False)
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

    def _list(self, request: Request, listing: Listing) -> Response:
        media = negotiate(request.accept, (HTML, TEXT, JSON))
        if media is None:
            raise HttpError(http.HTTPStatus.NOT_ACCEPTABLE, "Available are text/plain and application/json")
        zk = self._nodepool.getZK()
        if zk is None:
            raise HttpError(http.HTTPStatus.SERVICE_UNAVAILABLE, "ZooKeeper has not been reached yet")
        if not zk.synced:
            # A call to ZooKeeper would wait for the server and block the few threads that also answer /ready.
            raise HttpError(
                http.HTTPStatus.SERVICE_UNAVAILABLE,
                ("ZooKeeper's content is being read, try again" if zk.connected else "ZooKeeper cannot be reached"),
            )
        arguments = {name: request.parameters[name] for name in listing.parameters if name in request.parameters}
        form = "json" if media == JSON else "pretty"
        fields = _fields(request, listing) if form == "pretty" else None

        def make() -> bytes:
            source = self._nodepool if listing.own else zk
            return status.output(listing.read(source, **arguments), form, fields).encode()

        try:
            entry = self._cache.get((request.path, tuple(arguments.items()), fields, form), make)
        except TimeoutError:
            raise HttpError(http.HTTPStatus.SERVICE_UNAVAILABLE, "Being generated for another client, try again") from None
        headers = (
            ("Cache-Control", f"max-age={self._max_age:g}, public"),
            ("Last-Modified", format_date(entry.made_at)),
            ("Expires", format_date(entry.made_at + self._max_age)),
        )
        content_type = CONTENT_TYPES[media]
        if request.if_modified_since is not None and entry.made_at <= request.if_modified_since:
            return Response(b"", content_type, http.HTTPStatus.NOT_MODIFIED, headers)
        return Response(entry.body, content_type, headers=headers)


def _fields(request: Request, listing: Listing) -> tuple[str, ...] | None:
    """Return the requested columns in table order, so that spellings share a cache entry."""
    text = request.parameters.get("fields")
    if text is None:
        return None
    wanted = {name.strip() for name in text.split(",")}
    return tuple(key for key in listing.columns if key in wanted)


def _failure(code: http.HTTPStatus, text: str, cors: bool = True) -> Response:
    return Response(text.encode("utf-8", "replace"), status=code, headers=NO_STORE, cors=cors)

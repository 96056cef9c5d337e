"""The launcher's web server (CLI-6)."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import os
import socket
import threading
import urllib.parse
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple, cast

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpProcessingError, RawRequestMessage

from nodepool import metrics
from nodepool.base import threads, unix_socket
from nodepool.metrics.prometheus import Exposition
from nodepool.web import connections
from nodepool.web.access import LOOPBACK, Callers
from nodepool.web.actions.actions import Actions
from nodepool.web.application import Application, is_api
from nodepool.web.cache import ResponseCache
from nodepool.web.connections import Connections, HttpConnection
from nodepool.web.http import HttpError, Request, Response, Stream, Write
from nodepool.web.shares import Shares
from nodepool.web.streams import Streams
from nodepool.web.tables import Launcher
from nodepool.web.v1 import Api

THREADS = 4
STOP_TIMEOUT = 5.0
BACKLOG = 1024

log = logging.getLogger("nodepool.WebApp")
#: Logger of the library.
_library = logging.getLogger("nodepool.WebApp.http")


def _is_error(record: logging.LogRecord) -> bool:
    """Return whether a record is about more than a malformed request or a disconnect."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)


_library.addFilter(_is_error)


def _listen(address: str, port: int) -> socket.socket:
    """Return a listening socket; ``OSError`` with address and port in its text."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        family, target = found[0], found[4]
        return socket.create_server(
            target, family=family, backlog=BACKLOG, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise OSError(
            error.errno, f"web server cannot listen on {address} port {port}: {reason}"
        ) from error


class Listener(NamedTuple):
    """What outside code uses of the server."""

    socket: socket.socket


class WebApp(threading.Thread):
    """Serves the state of ``nodepool`` over HTTP; this thread runs the event loop.

    The socket listens once this is constructed; ``OSError`` if it cannot.
    """

    def __init__(
        self,
        nodepool: Launcher,
        port: int = 8005,
        listen_address: str = "0.0.0.0",
        cache_expiry: float = 1,
        *,
        pages: str = LOOPBACK,
        statistics: metrics.Metrics | None = None,
        actions: Actions | None = None,
        unix: str | None = None,
    ) -> None:
        """Create the server.

        :param actions: the calls that change things; None: there are none.
        :param unix: path of the Unix socket; None: there is none.
        """
        super().__init__(name="Thread-WebApp", daemon=True)
        self.nodepool = nodepool
        self.port = port
        self.listen_address = listen_address
        self.cache_expiry = cache_expiry
        self.cache: ResponseCache[bytes] = ResponseCache(cache_expiry)
        exposition = Exposition(statistics or metrics.shared())
        self._stopping: Future[None] = Future()
        self.server = Listener(_listen(listen_address, port))
        self._sockets = [self.server.socket]
        self._unix = unix
        if unix is not None:
            self._sockets.append(unix_socket.listen(unix, "launcher"))
        self._threads = threads.shared().lane("Thread-WebApp-call", THREADS)
        api = Api(nodepool)
        check = Callers(pages).check_reader if actions is None else actions.callers.check_reader
        self.streams = Streams(nodepool.feed, check, api.renew)
        self.actions = actions
        self._application = Application(
            nodepool,
            self.cache,
            exposition,
            cache_expiry,
            check,
            self.streams,
            api,
            actions,
            Shares(self._threads),
        )

    def run(self) -> None:
        log.debug("Web server listens on %s port %s", *self.server.socket.getsockname()[:2])
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop, opened = asyncio.get_running_loop(), Connections()
        most = connections.MOST_HEAD + connections.MOST_BODY
        server = web.Server(
            self._respond,
            request_factory=_begin,
            handler_cancellation=True,
            keepalive_timeout=connections.IDLE_TIMEOUT,
            max_line_size=most,
            max_field_size=most,
            auto_decompress=False,
            access_log=None,
            logger=_library,
        )
        self.streams.start()
        if self.actions is not None:
            self.actions.waiting.start()
            self.actions.admissions.start(self._threads)
        listening = [
            await loop.create_server(
                lambda: HttpConnection(opened, server()), sock=each, backlog=BACKLOG
            )
            for each in self._sockets
        ]
        await asyncio.wrap_future(self._stopping)
        self.streams.stop()
        if self.actions is not None:
            self.actions.waiting.stop()
        for each in listening:
            each.close()
        opened.close()

    async def _respond(self, given: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        if given.transport is None:
            raise ConnectionResetError("The client has disconnected")
        connection = cast(HttpConnection, given.transport.get_protocol())
        try:
            request = await _read(given, connection)
        except web.HTTPException as error:
            # The library discards the rest of the request, and then disconnects.
            if not is_api(given.path):
                error.force_close()
                raise
            failed = HttpError(http.HTTPStatus(error.status), error.text or error.reason)
            response = _plain(self._application.failure(failed, given.path))
            response.force_close()
            return response
        try:
            answer = await self._application.answer(request)
            if isinstance(answer, Response):
                return _plain(answer)
            return await _stream(answer, given)
        finally:
            connection.busy = False

    def stop(self) -> None:
        """End the server and its threads within seconds; allowed if it never ran."""
        if self._stopping.done():
            return
        self._stopping.set_result(None)
        if self.is_alive():
            self.join(STOP_TIMEOUT)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for each in self._sockets:
            each.close()
        if self._unix is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._unix)


def _begin(
    head: RawRequestMessage,
    body: StreamReader,
    protocol: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    """Return the request whose head has arrived, before anything of its body is counted."""
    if protocol.transport is not None:
        cast(HttpConnection, protocol.transport.get_protocol()).begin()
    loop = asyncio.get_running_loop()
    return web.BaseRequest(
        head, body, protocol, writer, task, loop, client_max_size=connections.MOST_BODY
    )


def _plain(answer: Response) -> web.Response:
    headers = [("Server", "nodepool"), *answer.headers]
    if answer.status != 304:
        headers.append(("Content-Type", answer.content_type))
    if answer.cors:
        headers.append(("Access-Control-Allow-Origin", "*"))
    return web.Response(body=answer.body, status=answer.status, headers=headers)


async def _stream(answer: Stream, given: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(
        headers=[("Server", "nodepool"), ("Cache-Control", "no-store"), *answer.headers]
    )
    response.force_close()
    if given.method == "HEAD":
        return response

    async def begin() -> Write:
        await response.prepare(given)
        await response.write(b"")
        return response.write

    try:
        await answer.send(begin)
    except ConnectionError as error:
        log.debug("A client has disconnected: %s", error)
    except Exception:
        log.exception("The answer to %s is not complete:", given.path)
    return response


async def _read(given: web.BaseRequest, connection: HttpConnection) -> Request:
    """Return the request when it has arrived.

    :raises web.HTTPException: it is too large, or malformed.
    """
    if sum(len(name) + len(value) for name, value in given.raw_headers) > connections.MOST_HEAD:
        raise web.HTTPRequestHeaderFieldsTooLarge(
            text=f"The headers have more than {connections.MOST_HEAD} bytes"
        )
    if given.headers.get("Expect", "").lower() == "100-continue":
        await given.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        given.writer.output_size = 0
    try:
        body = await given.read()
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text=f"The body is malformed: {error}") from None
    connection.arrived()
    path, query = (
        part.encode("utf-8", "surrogateescape")
        for part in (given.rel_url.raw_path, given.rel_url.raw_query_string)
    )
    return Request(
        address=connection.address,
        uid=connection.uid,
        headers=joined(given.raw_headers),
        method=given.method,
        path=urllib.parse.unquote_to_bytes(path).decode("utf-8", "replace"),
        query=query.decode("latin-1"),
        body=body,
    )


def joined(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers by their names in lower case, several of a name joined in order.

    The last part of ``X-Forwarded-For`` is what the nearest proxy has added, on its own line or
    not.
    """
    headers: dict[str, str] = {}
    for key, value in raw:
        name, text = key.decode("latin-1").lower(), value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers

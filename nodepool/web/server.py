"""The launcher's web server (CLI-6)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.task import ThreadedTaskDispatcher

from nodepool import metrics
from nodepool.base import unix_socket
from nodepool.metrics.prometheus import Exposition
from nodepool.web import access, connections
from nodepool.web.access import LOOPBACK
from nodepool.web.actions.actions import Actions
from nodepool.web.application import Application
from nodepool.web.cache import ResponseCache
from nodepool.web.streams import Streams
from nodepool.web.tables import Launcher
from nodepool.web.v1 import Api

THREADS = 4
STOP_TIMEOUT = 5.0
S = TypeVar("S", connections.Server, connections.UnixServer)

log = logging.getLogger("nodepool.WebApp")


def _listen(address: str, port: int) -> socket.socket:
    """Return a bound socket; ``OSError`` with address and port in its text."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise OSError(error.errno, f"web server cannot listen on {address} port {port}: {error.strerror}") from error
    return sock


def _adjustments(listening: socket.socket) -> Adjustments:
    return Adjustments(
        sockets=[listening],
        connection_limit=2 * connections.CONNECTION_LIMIT,  # ours comes first
        channel_timeout=connections.IDLE_TIMEOUT,
        cleanup_interval=connections.CHECK,
        max_request_header_size=16384,
        max_request_body_size=65536,
        outbuf_high_watermark=1 << 20,
        ident=None,
        clear_untrusted_proxy_headers=False,  # they decide who may see the pages
    )


class _Dispatcher(ThreadedTaskDispatcher):
    """Names its threads as test benches expect (FAK-4.5)."""

    def start_new_thread(self, target: Callable[[int], None], thread_no: int) -> None:
        threading.Thread(target=target, name=f"Thread-WebApp-{thread_no}", args=(thread_no,), daemon=True).start()


class WebApp(threading.Thread):
    """Serves the state of ``nodepool`` over HTTP.

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
        self._map: dict[int, Any] = {}
        self._stopping = threading.Event()
        listening = _listen(listen_address, port)
        dispatcher = _Dispatcher()
        dispatcher.set_thread_count(THREADS)
        api = Api(nodepool)
        check = functools.partial(access.check, pages) if actions is None else actions.check_reader
        self.streams = Streams(nodepool.feed, check, api.renew)
        application = Application(nodepool, self.cache, exposition, cache_expiry, check, self.streams, api)
        self.actions = actions
        self.server = self._serve(connections.Server, listening, application, dispatcher)
        self.servers: list[connections.Server | connections.UnixServer] = [self.server]
        self._unix = unix
        if unix is not None:
            listening = unix_socket.listen(unix, "launcher")
            self.servers.append(self._serve(connections.UnixServer, listening, application, dispatcher))
        for server in self.servers:
            server.streams, server.actions = self.streams, actions

    def _serve(self, kind: type[S], listening: socket.socket, application: Application, dispatcher: ThreadedTaskDispatcher) -> S:
        return kind(
            application,
            self._map,
            True,
            listening,
            dispatcher=dispatcher,
            bind_socket=False,
            sockinfo=(listening.family, listening.type, listening.proto, listening.getsockname()),
            adj=_adjustments(listening),
        )

    def run(self) -> None:
        self.streams.start()
        if self.actions is not None:
            self.actions.waiting.start()
        log.debug("Web server listens on %s port %s", *self.server.socket.getsockname()[:2])
        while not self._stopping.is_set():
            wasyncore.loop(
                timeout=connections.CHECK if any(server.active_channels for server in self.servers) else 60,
                use_poll=True,
                map=self._map,
                count=1,
            )

    def stop(self) -> None:
        """End the server and its threads within seconds; allowed if it never ran."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.streams.stop(STOP_TIMEOUT)
        if self.actions is not None:
            self.actions.waiting.stop(STOP_TIMEOUT)
        if self.is_alive():
            self.server.pull_trigger()
            self.join(STOP_TIMEOUT)
        # Not earlier: the loop must not use closed descriptors, and we must not write to one.
        wasyncore.close_all(self._map, ignore_all=True)
        if self._unix is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._unix)
        self.server.task_dispatcher.shutdown(timeout=STOP_TIMEOUT)

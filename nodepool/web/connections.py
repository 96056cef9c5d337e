"""Connections of the web server: nobody can occupy all of them (CLI-6)."""

from __future__ import annotations

import functools
import socket
import time
from collections import Counter
from typing import Any

from waitress.channel import ClientDisconnected
from waitress.server import BaseWSGIServer, TcpWSGIServer, UnixWSGIServer
from waitress.task import WSGITask

from nodepool.access.access import UID
from nodepool.base import unix_socket
from nodepool.web.access import HEADERS
from nodepool.web.actions import frames
from nodepool.web.actions.actions import Actions, Parked
from nodepool.web.actions.routes import Stream
from nodepool.web.http import ANSWER, Response, path_of
from nodepool.web.streams import StreamChannel, Streams

#: Maximum number of connections, and seconds without a byte after which one is closed.
CONNECTION_LIMIT, IDLE_TIMEOUT = 500, 30
#: Seconds in which a request must arrive, from its first byte.
REQUEST_TIMEOUT = 10.0
#: Seconds between two checks for connections that are too slow.
CHECK = 5.0
_RELAY_HEAD = ("HTTP/1.1 200 OK", f"Content-Type: {frames.CONTENT_TYPE}", "Cache-Control: no-store", "Connection: close")


class Task(WSGITask):
    """Adds the user of a Unix socket, and an answer that exists already, to the environment."""

    channel: Channel

    def get_environment(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environment()
        if self.channel.uid is not None:
            environ[UID] = self.channel.uid
        if self.channel.answer is not None:
            environ[ANSWER] = self.channel.answer
        return environ


class Channel(StreamChannel):
    """A connection that times incomplete requests, and may wait for a lease."""

    task_class = Task
    request: Any
    incomplete_since: float | None = None
    uid: int | None = None
    parked: Parked | None = None
    answer: Response | None = None

    def received(self, data: bytes) -> bool:
        taken = super().received(data)
        if self.request is None:
            self.incomplete_since = None
        elif self.incomplete_since is None:
            self.incomplete_since = time.monotonic()
        return taken

    def service(self) -> None:
        actions, request = self.server.actions, self.requests[0]
        if actions is not None and not request.error and self.connected:
            outcome: Response | Parked | Stream | None = None
            if self.parked is not None:
                outcome = actions.resume(self.parked)
            else:
                environ = Task(self, request).get_environment()
                if actions.serves(path_of(environ)):
                    outcome = actions.answer(environ)
            if isinstance(outcome, Parked):
                self.parked = outcome
                # The connection keeps its request, but no thread, until it is resumed.
                if actions.waiting.park(outcome.later, functools.partial(self.server.add_task, self)):
                    return
                outcome = actions.give_up(self.parked)
            if isinstance(outcome, Stream):
                # It carries the streams of a program, and nothing after them.
                self.hand_over()
                outcome.carry(functools.partial(self._run, outcome))
                return
            self.answer = outcome if isinstance(outcome, Response) else None
        self.parked = None
        super().service()
        self.answer = None

    def _run(self, relay: Stream) -> None:
        self._send("\r\n".join((*_RELAY_HEAD, *(f"{key}: {value}" for key, value in HEADERS), "", "")).encode())
        relay.run(self._send)
        self.close_when_flushed = True
        self.server.pull_trigger()

    def _send(self, data: bytes) -> bool:
        """Send data; wait while the client reads too slowly. Return False if it has disconnected."""
        if not self.connected:
            return False
        try:
            if data:
                self.write_soon(data)
        except (ClientDisconnected, OSError):
            return False
        return True


class _Limited(BaseWSGIServer):
    """Always accepts connections.

    If there are too many, the client with most of them loses its oldest idle one.
    """

    channel_class = Channel
    streams: Streams
    actions: Actions | None = None

    def handle_accept(self) -> None:
        super().handle_accept()
        if len(self.active_channels) > CONNECTION_LIMIT:
            idle = [channel for channel in self.active_channels.values() if not channel.requests and not channel.streaming]
            if idle:
                counts = Counter(channel.addr[0] for channel in self.active_channels.values())
                # An answer that is being sent is cut off only if its client has the most connections.
                min(idle, key=lambda c: (-counts[c.addr[0]], c.total_outbufs_len > 0, c.creation_time)).handle_close()

    def maintenance(self, now: float) -> None:
        super().maintenance(now)
        latest = time.monotonic() - REQUEST_TIMEOUT
        for channel in self.active_channels.values():
            if channel.incomplete_since is not None and channel.incomplete_since < latest:
                channel.will_close = True


class Server(_Limited, TcpWSGIServer):
    """Listens on an address."""


class UnixChannel(Channel):
    """A connection whose other end the kernel identifies."""

    def __init__(self, server: object, sock: socket.socket, addr: object, adj: object, map: object = None) -> None:
        self.uid = unix_socket.peer_uid(sock)
        super().__init__(server, sock, addr, adj, map)


class UnixServer(_Limited, UnixWSGIServer):
    """Listens on a Unix socket."""

    channel_class = UnixChannel

    def fix_addr(self, _addr: object) -> tuple[str, None]:
        return "unix", None

"""Connections of the web server: nobody can occupy all of them (CLI-6)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from typing import cast

from aiohttp import web

from nodepool.base import unix_socket

#: Maximum number of connections, and seconds without a byte after which one is closed.
CONNECTION_LIMIT, IDLE_TIMEOUT = 500, 30
#: Seconds in which a request must arrive, from its first byte.
REQUEST_TIMEOUT = 10.0
#: Seconds between two checks for connections that are too slow.
CHECK = 5.0
#: Bytes of a request: before its body, and in it.
MOST_HEAD, MOST_BODY = 16384, 65536


class Connections:
    """The open connections, from the oldest; used on the loop of the server only."""

    def __init__(self) -> None:
        self._open: dict[HttpConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: HttpConnection) -> None:
        """Add a connection.

        If there are too many, the client with most of them loses its oldest idle one; if there are
        twice as many, it loses one that is answered.
        """
        self._open[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK, self._check)
        if len(self._open) > CONNECTION_LIMIT:
            counts = Counter(each.address for each in self._open)
            most = max(counts.values())

            def is_kept(each: HttpConnection) -> bool:
                return each.answered or each is connection

            victim = min(
                (each for each in self._open if counts[each.address] == most),
                key=lambda each: (is_kept(each), each.answered, each.unsent > 0),
            )
            if not is_kept(victim) or len(self._open) > 2 * CONNECTION_LIMIT:
                victim.abort()

    def remove(self, connection: HttpConnection) -> None:
        self._open.pop(connection, None)

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()

    def _check(self) -> None:
        now = time.monotonic()
        for connection in list(self._open):
            connection.check(now)
        self._timer = (
            asyncio.get_running_loop().call_later(CHECK, self._check) if self._open else None
        )


class HttpConnection(asyncio.Protocol):
    """A connection that times what its client sends and reads.

    The protocol of the library does everything else.

    :ivar address: of the client.
    :ivar uid: of a Unix socket's other end.
    :ivar busy: the head of a request has arrived, its answer is not complete.
    """

    def __init__(self, others: Connections, protocol: web.RequestHandler) -> None:
        self._others = others
        self._protocol = protocol
        self.address = "unix"
        self.uid: int | None = None
        self.busy = False
        #: When the first byte of a request arrived that is not complete, and the bytes of it.
        self._begun: float | None = None
        self._arrived = 0
        #: When the client last read what is sent to it, and what it had not read at the last check.
        self._moved = time.monotonic()
        self._unread = 0

    @property
    def unsent(self) -> int:
        """Return the bytes that the client has not read."""
        return self._transport.get_write_buffer_size()

    @property
    def answered(self) -> bool:
        """Return whether a request has arrived completely, and its answer is not complete."""
        return self.busy and self._begun is None

    def abort(self) -> None:
        self._others.remove(self)
        self._transport.abort()

    def begin(self) -> None:
        """Note that the head of a request has arrived, maybe with the request before it."""
        self.busy, self._begun = True, self._begun or time.monotonic()

    def arrived(self) -> None:
        """Note that the request has arrived completely."""
        self._begun, self._arrived = None, 0

    def check(self, now: float) -> None:
        """Disconnect a client that sends its request, or reads its answer, too slowly."""
        unsent = self.unsent
        if unsent < self._unread or not (
            self._protocol.writing_paused or self._transport.is_closing()
        ):
            self._moved = now
        self._unread = unsent
        if now - self._moved > IDLE_TIMEOUT or (
            self._begun is not None and now - self._begun > REQUEST_TIMEOUT
        ):
            self.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        end = transport.get_extra_info("socket")
        if end.family == socket.AF_UNIX:
            self.uid = unix_socket.peer_uid(end)
        else:
            self.address = str((transport.get_extra_info("peername") or ("unknown",))[0])
        self._protocol.connection_made(transport)
        self._others.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.remove(self)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            if self._arrived > MOST_HEAD + MOST_BODY:  # a head without an end
                self.abort()
                return
            self._begun = self._begun or time.monotonic()
            self._arrived += len(data)
        self._protocol.data_received(data)

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._moved = time.monotonic()
        self._protocol.resume_writing()

"""A ZooKeeper client that shows every answer and event in its order, over sockets or in memory.

Requests are encoded by kazoo, so the codec of our own server is not tested against itself.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

from kazoo.protocol.serialization import Connect

from nodepool.lab.zkserver.core import Server

_LENGTH, _REPLY, _EVENT = struct.Struct("!i"), struct.Struct("!iqi"), struct.Struct("!ii")
PING = 11
EVENT_XID, PING_XID = -1, -2


class Ended(Exception):
    """The server has closed the connection."""


class Pipe(Protocol):
    def send(self, data: bytes) -> None: ...

    def receive(self, count: int) -> bytes:
        """:raises Ended:"""

    def close(self) -> None: ...


class SocketPipe:
    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=20)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self._socket.recv(count - len(found))
            if not part:
                raise Ended
            found += part
        return found

    def close(self) -> None:
        self._socket.close()


class MemoryPipe:
    """The server answers within :meth:`send`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._received = bytearray()
        self._connection = server.connect(
            self._received.extend, lambda: None, {("ip", "127.0.0.1")}
        )

    def send(self, data: bytes) -> None:
        if self._connection.open:
            self._server.receive(self._connection, data)

    def receive(self, count: int) -> bytes:
        if len(self._received) < count:
            raise Ended
        found = bytes(self._received[:count])
        del self._received[:count]
        return found

    def rest(self) -> bytes:
        return bytes(self._received)

    def close(self) -> None:
        self._server.lost(self._connection)


class RawClient:
    """One session; `events` has (type, path) of all events since they were last taken."""

    def __init__(self, open_pipe: Callable[[], Pipe], timeout: int = 10_000) -> None:
        self.open_pipe = open_pipe
        self.timeout = timeout
        self.session, self.password, self.zxid = 0, bytes(16), 0
        self.events: list[tuple[int, str]] = []
        self._xid = 0
        self.pipe: Pipe | None = None
        self.connect()

    def connect(self) -> bool:
        """Open a connection, of the present session if it still exists; return whether it does."""
        self.cut()
        self.pipe = self.open_pipe()
        known = self.session
        request = Connect(0, self.zxid, self.timeout, known, self.password, False).serialize()
        self.pipe.send(_LENGTH.pack(len(request)) + request)
        answer, _ = Connect.deserialize(self._frame(), 0)
        self.session, self.password = answer.session_id, answer.passwd
        if not self.session:
            self.cut()
            self.session, self.password = 0, bytes(16)
        return self.session == known != 0

    def cut(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def call(self, request: Any, xid: int | None = None) -> tuple[int, bytes]:
        """Send a request; return the error code and the body of its answer."""
        assert self.pipe is not None
        if xid is None:
            self._xid += 1
            xid = self._xid
        payload = _LENGTH.pack(xid) + _LENGTH.pack(request.type) + bytes(request.serialize())
        self.pipe.send(_LENGTH.pack(len(payload)) + payload)
        while True:
            frame = self._frame()
            got, zxid, code = _REPLY.unpack_from(frame)
            if got == EVENT_XID:
                kind, _state = _EVENT.unpack_from(frame, _REPLY.size)
                (length,) = _LENGTH.unpack_from(frame, _REPLY.size + _EVENT.size)
                self.events.append((kind, frame[-length:].decode()))
                continue
            assert got == xid, f"answer {got} to request {xid}"
            self.zxid = max(self.zxid, zxid)
            return code, frame[_REPLY.size :]

    def flush(self) -> list[tuple[int, str]]:
        """Return the events so far, including those that the server has sent before it answers
        this.
        """

        class Ping:
            type = PING

            @staticmethod
            def serialize() -> bytes:
                return b""

        self.call(Ping, PING_XID)
        events, self.events = self.events, []
        return events

    def _frame(self) -> bytes:
        assert self.pipe is not None
        (length,) = _LENGTH.unpack(self.pipe.receive(4))
        return self.pipe.receive(length)

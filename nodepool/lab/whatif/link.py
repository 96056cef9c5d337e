"""Connections to the server of a simulation without sockets: timers deliver the messages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from kazoo.protocol.states import KeeperState

from nodepool.lab.simulation.kernel import current
from nodepool.lab.simulation.sync import Lock
from nodepool.lab.zkserver.core import ServedConnection, Session
from nodepool.lab.zkserver.requests import StandaloneServer
from nodepool.zk.connection.protocol import SessionClient, SessionConnection

#: Seconds that a message takes.
LATENCY = 0.001
#: Timeout of sessions that need no signs of life, in ms.
_ENDLESS = 1 << 40
#: Bytes of the length before each message.
_LENGTH = 4


def connect(server: StandaloneServer, write: Callable[[bytes], None]) -> ServedConnection:
    """Return a new connection with a session that never ends.

    :param write: called with each message of the server.
    """
    connection = server.connect(write, lambda: None, {("ip", "127.0.0.1")})
    connection.session = server.open_session(_ENDLESS)
    return connection


class LinkedClient(SessionClient):
    """The client of the launcher."""

    server: ClassVar[StandaloneServer]

    def __init__(self, *args: object, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection = _Link(self, self._connection.retry_sleeper)

    def begin(self, session: Session) -> None:
        self._session_id, self._session_passwd = session.id, session.password
        self._session_callback(KeeperState.CONNECTED)


class _Link(SessionConnection):
    """Stands for its own socket, and for the pipe that wakes its thread."""

    client: LinkedClient

    def zk_loop(self) -> None:
        """Process what has arrived, forever."""
        self._arrived: deque[bytes] = deque()
        self._xid, self._last = 0, -1.0
        self._gate = Lock()
        self._server = self.client.server
        self._served = connect(self._server, self._answer)
        self._read_sock = self._write_sock = self
        self.client.begin(self._server.session_of(self._served))
        while self._gate.acquire():
            while self._arrived:
                self._message = self._arrived.popleft()
                super(SessionConnection, self)._read_socket(0.0)

    def send(self, _byte: bytes) -> None:
        """Send the waiting requests of the client."""
        kernel = current()
        kernel.call_at(kernel.now + LATENCY, lambda: self._send_request(math.inf, 0.0))

    def recv(self, _size: int) -> bytes:
        return b""

    def _write(self, message: bytearray, _timeout: float) -> None:
        self._server.receive(self._served, bytes(message))

    def _answer(self, message: bytes) -> None:
        kernel = current()
        self._arrived.append(message[_LENGTH:])
        if kernel.now > self._last:  # otherwise it arrives with the one before
            self._last = kernel.now
            kernel.call_at(kernel.now + LATENCY, self._wake)

    def _wake(self) -> None:
        if self._gate.locked():
            self._gate.release()

"""The server without I/O: bytes in, bytes out, and a clock that the caller advances.

A transport calls `Server.connect`, then `Server.receive` with whatever has arrived, and
`Server.lost` at the end. The server answers through the two functions that the transport has given.
All calls must come from one thread.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nodepool.lab.zkserver import codec
from nodepool.lab.zkserver.codec import Code, Reader, Refused
from nodepool.lab.zkserver.tree import READ, Event, Tree
from nodepool.lab.zkserver.watches import Watches

log = logging.getLogger("nodepool.zkserver")

#: Bytes of a request, as jute.maxbuffer of ZooKeeper.
MOST_BYTES = 0xFFFFF
#: Bounds of the timeout that a client may ask for, in ms.
SHORTEST, LONGEST = 1000, 120_000
_PASSWORD_SIZE = 16
EVENT_XID, PING_XID = -1, -2
CONNECTED = 3
_LETTERS = 4


#: Keeps zxid, time in ms and changes of a transaction; returns when they survive the end of the
#: process.
Keep = Callable[[int, int, list[list[Any]]], None]


@dataclass(slots=True)
class Session:
    """A session outlives connections, and ends if its client is silent for its timeout."""

    id: int
    password: bytes
    #: In ms.
    timeout: int
    #: When the client was last heard of, in seconds of the server's clock.
    heard: float
    connection: ServedConnection | None = None

    @property
    def ends(self) -> float:
        return self.heard + self.timeout / 1000


class ServedConnection:
    """One client, as long as it is connected."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        hang_up: Callable[[], None],
        identities: set[tuple[str, str]],
        peer: str,
    ) -> None:
        self.write = write
        self.hang_up = hang_up
        #: Pairs of scheme and id that the client has proven.
        self.identities = identities
        self.peer = peer
        self.session: Session | None = None
        self.open = True
        self.received = bytearray()


class Server:
    """
    :param clock: seconds that only increase; sessions end by it.
    :param wall: seconds since 1970; znodes are stamped with it.
    """

    #: By the type of the request; :mod:`nodepool.lab.zkserver.requests` has them.
    operations: ClassVar[Mapping[int, Callable[[Any, ServedConnection, Reader], bytes]]] = {}

    def __init__(
        self,
        keep: Keep = lambda _zxid, _time, _changes: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.tree = Tree()
        self.watches: Watches[ServedConnection] = Watches()
        self.sessions: dict[int, Session] = {}
        self._last_session = int(wall() * 1000) << 20
        self._random = random
        self.zxid = 0
        self.keep = keep
        self.clock = clock
        self._wall = wall
        self.connections: dict[ServedConnection, None] = {}
        self.requests = 0

    # -- transports

    def connect(
        self,
        write: Callable[[bytes], None],
        hang_up: Callable[[], None],
        identities: set[tuple[str, str]],
        peer: str = "",
    ) -> ServedConnection:
        """Add a connection.

        :param write: sends bytes to the client.
        :param hang_up: closes the connection after what was written.
        :param identities: what the transport knows about the client, such as its address.
        """
        connection = ServedConnection(write, hang_up, identities, peer)
        self.connections[connection] = None
        return connection

    def receive(self, connection: ServedConnection, data: bytes) -> None:
        """Handle what has arrived. A client that breaks the protocol is disconnected."""
        if connection.session is not None:
            connection.session.heard = self.clock()
        received = connection.received
        received += data
        if (
            connection.session is None
            and len(received) >= _LETTERS
            and received[:_LETTERS].isalpha()
        ):
            self._letters(connection, bytes(received[:_LETTERS]).decode())
            return
        while connection.open and len(received) >= _LETTERS:
            length = int.from_bytes(received[:_LETTERS], "big")
            if length > MOST_BYTES:
                log.warning(
                    "Disconnecting %s: a request of %s bytes is too large", connection.peer, length
                )
                self.drop(connection)
                return
            if len(received) < _LETTERS + length:
                return
            payload = bytes(received[_LETTERS : _LETTERS + length])
            del received[: _LETTERS + length]
            try:
                (self._request if connection.session is not None else self._greet)(
                    connection, Reader(payload)
                )
            except Refused as error:
                log.warning("Disconnecting %s: %s", connection.peer, error)
                self.drop(connection)

    def lost(self, connection: ServedConnection) -> None:
        """Note that the connection has ended; its session lasts until its timeout."""
        connection.open = False
        self.connections.pop(connection, None)
        self.watches.forget(connection)
        if connection.session is not None and connection.session.connection is connection:
            connection.session.connection = None

    def drop(self, connection: ServedConnection) -> None:
        if connection.open:
            self.lost(connection)
            connection.hang_up()

    def tick(self) -> float | None:
        """End the sessions whose time is over; return the seconds until the next one may end."""
        now = self.clock()
        for session in [session for session in self.sessions.values() if session.ends <= now]:
            log.info("Session 0x%x expired", session.id)
            self.end_session(session)
        return min((session.ends - now for session in self.sessions.values()), default=None)

    # -- sessions

    def _greet(self, connection: ServedConnection, reader: Reader) -> None:
        reader.integer()
        seen, timeout, session_id, password = (
            reader.long(),
            reader.integer(),
            reader.long(),
            reader.buffer() or b"",
        )
        with_read_only = reader.more
        if seen > self.zxid:
            log.warning(
                "Refusing session of %s: it has seen zxid 0x%x, our last one is 0x%x",
                connection.peer,
                seen,
                self.zxid,
            )
            self.drop(connection)
            return
        timeout = max(SHORTEST, min(LONGEST, timeout))
        session = self.sessions.get(session_id) if session_id else self.open_session(timeout)
        if session is None or (session_id and not hmac.compare_digest(session.password, password)):
            session = Session(0, bytes(_PASSWORD_SIZE), 0, 0.0)
        else:
            before, session.connection = session.connection, connection
            if before is not None:
                self.drop(before)
            session.heard, session.timeout, connection.session = self.clock(), timeout, session
        answer = (
            codec.int_(0)
            + codec.int_(session.timeout)
            + codec.long(session.id)
            + codec.buffer(session.password)
        )
        connection.write(codec.framed(answer + (b"\0" if with_read_only else b"")))
        if not session.id:
            self.drop(connection)

    def open_session(self, timeout: int) -> Session:
        """Return a new session.

        :param timeout: in ms.
        """
        self._last_session += 1
        session = Session(self._last_session, self._random(_PASSWORD_SIZE), timeout, self.clock())
        self.sessions[session.id] = session
        self.commit(
            [["session", session.id, session.timeout, session.password.hex()]], [], *self.begin()
        )
        return session

    @staticmethod
    def session_of(connection: ServedConnection) -> Session:
        assert connection.session is not None
        return connection.session

    def end_session(self, session: Session) -> None:
        """Remove the session with its ephemeral znodes."""
        zxid, time = self.begin()
        with self.tree.transaction() as events:
            self.tree.end_session(session.id, zxid)
        self.sessions.pop(session.id, None)
        self.commit([["close", session.id]], events, zxid, time)
        if session.connection is not None:
            self.drop(session.connection)

    # -- requests

    def _request(self, connection: ServedConnection, reader: Reader) -> None:
        xid, kind = reader.integer(), reader.integer()
        self.requests += 1
        operation = self.operations.get(kind)
        code, body = Code.OK, b""
        try:
            if operation is None:
                raise Refused(Code.UNIMPLEMENTED)
            body = operation(self, connection, reader)
        except Refused as error:
            if error.code == Code.MARSHALLING:
                raise
            code = error.code
        if connection.open:
            connection.write(codec.reply(xid, self.zxid, code, body))
            if code == Code.AUTH_FAILED or operation is None:
                self.drop(connection)
        elif kind == CLOSE:
            connection.write(codec.reply(xid, self.zxid, code, body))
            connection.hang_up()

    def begin(self) -> tuple[int, int]:
        """Return zxid and time in ms of the next transaction; failed ones also use up a zxid."""
        self.zxid += 1
        return self.zxid, int(self._wall() * 1000)

    def commit(self, changes: list[list[Any]], events: list[Event], zxid: int, time: int) -> None:
        """Keep the changes of a transaction, then notify clients of its events.

        Only clients that may read the znode are notified.
        """
        self.keep(zxid, time, changes)
        for what, path, acl in events:
            for client in self.watches.triggered(what, path):
                if self.tree.may(acl, READ, client.identities):
                    self.send_event(client, what, path)

    def send_event(self, client: ServedConnection, what: int, path: str) -> None:
        if client.open:
            body = codec.int_(what) + codec.int_(CONNECTED) + codec.string(path)
            client.write(codec.reply(EVENT_XID, -1, 0, body))

    # -- four-letter words

    def _letters(self, connection: ServedConnection, word: str) -> None:
        known: dict[str, Callable[[], str]] = {
            "ruok": lambda: "imok",
            "isro": lambda: "rw",
            "srvr": self._srvr,
            "stat": self._srvr,
            "envi": lambda: f"Environment:\nzookeeper.version={VERSION}\n",
        }
        answer = known.get(word)
        connection.write(
            (answer() if answer else f"{word} is not executed because it is not known.\n").encode()
        )
        self.drop(connection)

    def _srvr(self) -> str:
        return (
            f"Zookeeper version: {VERSION}\nReceived: {self.requests}\nConnections: "
            f"{len(self.connections)}\n"
            f"Zxid: 0x{self.zxid:x}\nMode: standalone\nNode count: {len(self.tree.nodes)}\n"
        )


#: What clients see; the second part says which server this is.
VERSION = "3.8.0-nodepool, built for development"
CLOSE = -11

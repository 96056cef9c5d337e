"""A kazoo client with persistent recursive watches and a leaner connection loop.

kazoo 2.11 has neither the AddWatch request (server 3.6) nor batching: it makes several system calls
and a new selector for each message. This module overrides the private parts needed for both; the
contract test tests/integration/zk/test_protocol.py checks whether a new kazoo still fits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    EXCEPTIONS,
    ConnectionClosedError,
    ConnectionDropped,
    ConnectionLoss,
    KazooException,
    OperationTimeoutError,
    SessionExpiredError,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.handlers.utils import AsyncResult
from kazoo.protocol import connection as kazoo_connection
from kazoo.protocol.serialization import Auth, ReplyHeader, Watch, write_string
from kazoo.protocol.states import KeeperState
from kazoo.retry import ForceRetryError

from nodepool.zk.connection.abandoned import AbandonedLocks
from nodepool.zk.connection.reply import Reply

log = logging.getLogger("nodepool.zk.protocol")

CREATED, DELETED, CHANGED = 1, 2, 3

_int = struct.Struct("!i")
_RECEIVE_SIZE = 256 * 1024
#: Received messages are processed once they exceed this size.
_HANDLE_SIZE = 1024 * 1024
#: Maximum number of bytes of requests in one send.
_SEND_SIZE = 256 * 1024

#: Least seconds for an attempt to connect to one server.
SHORTEST_ATTEMPT = 1.0
#: Seconds to wait for the end of an attempt that is interrupted.
INTERRUPTED_WITHIN = 1.0

#: The connection broke: the result is unknown.
BROKEN = (ConnectionLoss, SessionExpiredError, KazooTimeoutError)

EventCallback = Callable[[int, str], None]
ThreadEnd = Callable[[BaseException | None], Any]
"""Called with the error, or None, when the thread of the connection has ended and will not be
restarted.
"""


class AddWatch:
    """The AddWatch request, mode persistent recursive."""

    type = 106
    PERSISTENT_RECURSIVE = 1

    def __init__(self, path: str) -> None:
        self.path = path

    def serialize(self) -> bytes:
        return bytes(write_string(self.path)) + _int.pack(self.PERSISTENT_RECURSIVE)

    @staticmethod
    def deserialize(_data: bytes, _offset: int) -> bool:
        return True


class NoAnswer(KazooTimeoutError, OperationTimeoutError):
    """``get(timeout=...)`` of an answer timed out.

    kazoo would raise an exception that is not a KazooException, which callers expect.
    """

    def __str__(self) -> str:
        return "ZooKeeper gave no answer in time"


class Handler(SequentialThreadingHandler):
    """kazoo's thread handler with named threads and a select without a descriptor per call."""

    def __init__(self, name: str = "zookeeper") -> None:
        super().__init__()
        self._thread_name = name
        self._count = 0
        #: The number of servers that are tried before the session times out.
        self.servers = 1

    def attempt(self, session: float) -> float:
        """Return the seconds for one server, so that the session outlives some that hang."""
        return max(SHORTEST_ATTEMPT, session / self.servers)

    def create_connection(self, *args: object, timeout: float, **kwargs: object) -> Any:
        return super().create_connection(*args, timeout=self.attempt(timeout), **kwargs)

    def async_result(self) -> AsyncResult:
        return AsyncResult(self, threading.Condition, NoAnswer)

    def spawn(self, func: Callable[..., Any], *args: object, **kwargs: object) -> threading.Thread:
        self._count += 1
        kind = (
            "connection" if getattr(func, "__name__", "") == "zk_loop" else f"worker {self._count}"
        )
        thread = threading.Thread(
            target=func,
            args=args,
            kwargs=kwargs,
            daemon=True,
            name=f"ThreadPoolExecutor {self._thread_name} {kind}",
        )
        thread.start()
        return thread

    def select(
        self,
        rlist: Collection[Any],
        wlist: Collection[Any],
        xlist: Collection[Any],
        timeout: float | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        files = {
            item if isinstance(item, int) else item.fileno(): item for item in (*rlist, *wlist)
        }
        if any(fd < 0 for fd in files):
            raise ConnectionDropped("socket closed")
        poll = select.poll()
        for fd, item in files.items():
            poll.register(
                fd,
                (select.POLLIN if item in rlist else 0) | (select.POLLOUT if item in wlist else 0),
            )
        ready = [
            (files[fd], event)
            for fd, event in poll.poll(
                None if timeout is None else max(0, math.ceil(timeout * 1000))
            )
        ]
        readable = [item for item, event in ready if event & ~select.POLLOUT and item in rlist]
        writable = [
            item
            for item, event in ready
            if event & (select.POLLOUT | select.POLLERR | select.POLLHUP) and item in wlist
        ]
        return readable, writable, []


class SessionConnection(kazoo_connection.ConnectionHandler):
    """Reads and writes many messages per system call, and dispatches persistent watch events."""

    client: SessionClient
    _xid: int

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._received = bytearray()
        #: The message that is processed.
        self._message: bytes | None = None
        #: Since when answers are due and none has arrived.
        self._silent_since = 0.0
        #: Since when servers refuse our session; None while one accepts it.
        self._refused_since: float | None = None
        self._closed = False

    def _connect_loop(self, retry: object) -> Any:
        """Reconnect with the same session after any error; kazoo would end forever."""
        try:
            return super()._connect_loop(retry)
        except ForceRetryError:
            raise
        except Exception as error:
            log.exception("Error on the connection to ZooKeeper; reconnecting:")
            if self.client._state != KeeperState.CONNECTING:
                self.client._session_callback(KeeperState.CONNECTING)
            raise ForceRetryError("reconnecting") from error

    def zk_loop(self) -> None:
        error: BaseException | None = None
        try:
            super().zk_loop()
        except BaseException as problem:
            log.exception("The thread of the connection to ZooKeeper has ended:")
            error = problem
        if self._closed:
            super().close()
        if not self.client._stopped.is_set():
            self.client._on_loop_end(error)

    def stop(self, timeout: float | None = None) -> bool:
        """End the connection; interrupt an attempt to establish one.

        kazoo would wait for it: for a silent server or a resolver that does not answer.
        """
        if self.client._state not in (KeeperState.CONNECTED, KeeperState.CONNECTED_RO):
            if (attempt := self._socket) is not None:
                with contextlib.suppress(OSError):  # closed by its thread
                    # Not that of a TLS socket: its thread would continue without encryption.
                    socket.socket.shutdown(attempt, socket.SHUT_RDWR)
            if not self.connection_stopped.wait(INTERRUPTED_WITHIN):
                return True
        return bool(super().stop(timeout))

    def close(self) -> None:
        """Release the sockets; the thread does so at its end if it still uses them."""
        self._closed = True
        if self.connection_stopped.is_set():
            super().close()

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        self._received = bytearray()
        self._message = None
        client, since = self.client, self._refused_since
        if (
            client.last_zxid
            and since is not None
            and time.monotonic() - since > client._session_timeout / 1000
        ):
            # A server refuses a client that has seen more than the server has: forever, if it was
            # restored from a backup. A server that lags behind has caught up by now.
            log.warning(
                "Servers refused our session for longer than its time-out; accepting restored "
                "servers, too"
            )
            client.last_zxid = 0
        result = super()._connect(host, hostip, port)
        self._refused_since = None
        return result

    def _expand_client_hosts(self) -> list[Any]:
        found: list[Any] = super()._expand_client_hosts()
        self.handler.servers = max(1, len(found))
        return found

    def _invoke(self, timeout: float, *args: object, **kwargs: object) -> Any:
        try:
            return super()._invoke(
                min(timeout, self.handler.attempt(self.client._session_timeout / 1000)),
                *args,
                **kwargs,
            )
        except ConnectionDropped:
            # Servers close the connection of a client that they refuse; one that is not reached
            # refuses nothing.
            self._refused_since = self._refused_since or time.monotonic()
            raise

    def _read_socket(self, read_timeout: float) -> Any:
        """Read available data; process every complete message."""
        sock = self._socket
        received = self._received
        ended = False
        while True:
            try:
                chunk = sock.recv(_RECEIVE_SIZE)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            if not chunk:
                ended = True
                break
            received += chunk
            if len(received) > _HANDLE_SIZE and not (hasattr(sock, "pending") and sock.pending()):
                break  # a TLS socket may hold decrypted data that select does not see
        offset, size = 0, len(received)
        result = None
        data = bytes(received)
        while size - offset >= 4:
            (length,) = _int.unpack_from(data, offset)
            if size - offset - 4 < length:
                break
            start = offset + 4
            offset = start + length
            # Each message has a separate buffer: kazoo's deserializers slice from an offset.
            self._message = data[start:offset]
            result = super()._read_socket(read_timeout)
            if result is kazoo_connection.CLOSE_RESPONSE:
                self.client.session_closed = True
                break
        if size:
            self._silent_since = time.monotonic()
        if offset:
            del received[:offset]
        if ended and result is not kazoo_connection.CLOSE_RESPONSE:
            raise ConnectionDropped("socket connection broken")
        return result

    def _read_header(self, timeout: float) -> tuple[Any, bytes, int]:
        message = self._message
        if message is None:  # while connecting
            found: tuple[Any, bytes, int] = super()._read_header(timeout)
            return found
        header, offset = ReplyHeader.deserialize(message, 0)
        return header, message, offset

    def _read_response(self, header: ReplyHeader, message: bytes, offset: int) -> Any:
        reply = self.client._pending[0][1]
        if type(reply) is Reply:
            reply.zxid = header.zxid
        if header.err not in EXCEPTIONS:  # kazoo would end the connection
            EXCEPTIONS[header.err] = functools.partial(
                KazooException, f"ZooKeeper error {header.err}"
            )
        return super()._read_response(header, message, offset)

    def _read_watch_event(self, message: bytes, offset: int) -> None:
        client = self.client
        if client._stopped.is_set():
            return
        if client._data_watchers or client._child_watchers:
            super()._read_watch_event(message, offset)
        watch, _ = Watch.deserialize(message, offset)
        path = client.unchroot(watch.path)
        for root, callback in client.persistent_watches:
            if path.startswith(root) and (
                len(path) == len(root) or root == "/" or path[len(root)] == "/"
            ):
                try:
                    callback(watch.type, path)
                except Exception:
                    log.exception("Error in the watch callback of %s for %s", root, path)

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        """Send everything that waits, in as few system calls as possible."""
        client = self.client
        # In this order nothing is lost: a byte is in the pipe whenever the flag is set, and
        # requests appended while it was set are sent below.
        try:
            self._read_sock.recv(4096)
        except OSError:
            pass
        client.wake_sent = False
        queue, pending = client._queue, client._pending
        # kazoo sends no heartbeat while it sends requests: their answers serve as such.
        now = time.monotonic()
        if not pending:
            self._silent_since = now
        elif now - self._silent_since > read_timeout:
            raise ConnectionDropped(f"no answer for {now - self._silent_since:.1f} s")
        out = bytearray()
        while queue:
            request, reply = queue[0]
            if request is kazoo_connection._SESSION_EXPIRED:
                raise SessionExpiredError("Session expired: Testing")
            if request is kazoo_connection._CONNECTION_DROP:
                raise ConnectionDropped("Connection dropped: Testing")
            if request.type == Auth.type:
                xid = kazoo_connection.AUTH_XID
            else:
                self._xid = (self._xid % 2147483647) + 1
                xid = self._xid
            try:
                body = request.serialize()
            except (
                Exception
            ) as error:  # a request that cannot be written must not end the connection
                queue.popleft()
                if reply is not None:
                    reply.set_exception(error)
                continue
            kind = request.type
            header = _int.pack(xid) + (_int.pack(kind) if kind else b"")
            out += _int.pack(len(header) + len(body)) + header + body
            # Pending before it is sent: a reply can only come afterwards, and a lost connection
            # clears both queues.
            pending.append((request, reply, xid))
            queue.popleft()
            if len(out) >= _SEND_SIZE:
                self._write(out, connect_timeout)
                out = bytearray()
        if out:
            self._write(out, connect_timeout)


class SessionClient(KazooClient):
    """kazoo's client on our connection."""

    _connection: Any
    chroot: str

    def __init__(
        self, *args: object, on_loop_end: ThreadEnd = lambda _error: None, **kwargs: object
    ) -> None:
        kwargs.setdefault("handler", Handler())
        self._on_loop_end = on_loop_end
        self.wake_sent = False
        #: Whether the server has confirmed the end of the session.
        self.session_closed = False
        #: (root, callback) of persistent watches; the server forgets them with each connection.
        self.persistent_watches: list[tuple[str, EventCallback]] = []
        super().__init__(*args, **kwargs)
        self.abandoned = AbandonedLocks(self)
        old = self._connection
        self._connection = SessionConnection(
            self, old.retry_sleeper, logger=old.logger, sasl_options=old.sasl_options
        )

    def submit(self, request: Any, reply: object) -> None:
        """Send a request; ``reply`` is a :class:`Reply` or a kazoo AsyncResult."""
        self._call(request, reply)

    def _call(self, request: Any, async_object: Any) -> bool | None:
        state = self._state
        if state in (KeeperState.AUTH_FAILED, KeeperState.CLOSED, KeeperState.EXPIRED_SESSION):
            super()._call(request, async_object)
            return False
        self._queue.append((request, async_object))
        if self.wake_sent:
            return None
        self.wake_sent = True
        write_sock = self._connection._write_sock
        try:
            if write_sock is None:
                raise OSError("closed")
            write_sock.send(b"\0")
        except OSError:
            self.wake_sent = False
            error = ConnectionClosedError("Connection has been closed")
            if async_object is not None:
                async_object.set_exception(error)
        return None

    def _session_callback(self, state: str) -> None:
        # A new connection reads its wake socket from the start; a stale flag would block requests.
        self.wake_sent = False
        super()._session_callback(state)
        if self._queue and not self._stopped.is_set():
            try:
                self._connection._write_sock.send(b"\0")
            except (OSError, AttributeError):
                pass

    def expire(self) -> None:
        """Give up the session, which ends by its time-out, and start another one."""
        self._call(kazoo_connection._SESSION_EXPIRED, None)

    def add_persistent_watch(self, root: str, callback: EventCallback) -> None:
        """Store the callback; :meth:`arm_persistent_watch` makes the server send events.

        The callback runs on the connection thread with the type of event and the path without
        chroot.
        """
        self.persistent_watches.append((root, callback))

    def remove_persistent_watch(self, root: str, callback: EventCallback) -> None:
        self.persistent_watches = [
            entry for entry in self.persistent_watches if entry != (root, callback)
        ]

    def arm_persistent_watch(self, root: str, reply: Reply) -> None:
        self.submit(AddWatch(self.full_path(root)), reply)

    def full_path(self, path: str) -> str:
        """Return the path with the chroot prepended."""
        if not self.chroot:
            return path
        return self.chroot if path == "/" else self.chroot + path

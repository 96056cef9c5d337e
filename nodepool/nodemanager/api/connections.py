"""Connections of the API: one thread does all I/O, others serve full requests (C.5).

No peer gets a thread for being slow, for waiting, or for having many connections; see :mod:`shares`
for the limits of each.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any

from nodepool.nodemanager.api.exchange import (
    LINGER_BYTES,
    LINGER_TIME,
    PIECE_TIMEOUT,
    REQUEST_TIMEOUT,
    Desk,
    Refused,
    Request,
    refusal,
)
from nodepool.nodemanager.api.forward import FORWARD_HEADER
from nodepool.nodemanager.api.handshakes import Handshakes
from nodepool.nodemanager.api.listener import Listener, Peer
from nodepool.nodemanager.api.methods import OTHER, SLIVER, Caller, Parked, Program
from nodepool.nodemanager.api.shares import CONCURRENCY, MAX_PER_CALLER, PLACES, Share, Shares
from nodepool.nodemanager.eventloop import IN, OUT, SILENCE, EventLoop, Waiter, Workers

log = logging.getLogger("nodepool.nodemanager.server")

PIECE = 65536

READING, WAITING, ANSWERING, PARKED, SENDING, LINGERING = (
    "reading",
    "waiting",
    "answering",
    "parked",
    "sending",
    "lingering",
)
_WANTED = {READING: IN, LINGERING: IN, SENDING: OUT, WAITING: 0, PARKED: 0}
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ApiConnection(Waiter):
    """A connection from its request to the end of its answer."""

    def __init__(self, stream: socket.socket, peer: Peer, owner: Connections) -> None:
        super().__init__()
        self.stream = stream
        self.number = stream.fileno()
        self.peer = peer
        self.owner = owner
        self.share: Share | None = None
        self.rank = 2 if peer.kind == OTHER else 1
        self.state = READING
        self.request = Request(peer.kind != OTHER)
        #: The caller it speaks for, of several behind one user id; and whether it is that one's
        #: turn.
        self.speaker = ""
        self.speaking = False
        self.caller = Caller(OTHER)
        self.parked: Parked | None = None
        #: Deadline for the answer to the parked call.
        self.last = 0.0
        #: The sliver has changed since the last check.
        self.again = False
        self.output = memoryview(b"")
        self.linger = 0
        #: Its peer does not exist any more.
        self.dead = False

    def result(self, desk: Desk) -> bytes | Parked | Program | None:
        """Return the answer, in a thread; None: there is none, or it has been sent."""
        if self.parked is not None:
            found = self.parked.check()
            return self.parked if found is None else desk.encode(self.caller, found)
        self.caller = self.peer.resolve()
        if self.dead:  # its ids may belong to another caller now
            return None
        try:
            if self.request.is_image:
                self.stream.settimeout(PIECE_TIMEOUT)  # for each piece: a large image may take long
                try:
                    return desk.image(self.stream, self.request, self.caller)
                finally:
                    self.stream.setblocking(False)
            return desk.call(self.request, self.caller)
        except Refused as refused:
            return refusal(refused)

    def ready(self) -> None:
        self.owner.event(self)

    def late(self) -> None:
        self.owner.late(self)


class Connections:
    """All connections and the threads that serve them.

    :param who: returns the peer of a verified certificate, or None.
    :param run: starts a program, which then owns the connection.
    """

    def __init__(
        self,
        desk: Desk,
        who: Callable[[ssl.SSLSocket], Peer | None],
        run: Callable[[socket.socket, Program], None],
    ) -> None:
        self._desk = desk
        self._run = run
        self.loop = EventLoop("Thread-nm-connections", self._dispatch)
        self.handshakes: Handshakes[Peer] = Handshakes(self.loop, who, self.enter)
        self._workers = Workers("Thread-nm-api", sum(CONCURRENCY.values()))
        self.shares = Shares(self._time_again)
        self._busy: Counter[str] = Counter()
        self._parked: dict[str, set[ApiConnection]] = {}
        self._ready: dict[str, deque[Share]] = {kind: deque() for kind in CONCURRENCY}

    # -- from any thread

    def start(self) -> None:
        self._workers.start()
        self.handshakes.start()
        self.loop.start()

    def stop(self, timeout: float) -> None:
        """Close all; calls that wait are cut off."""
        deadline = time.monotonic() + timeout
        ended = self.loop.stop(timeout)
        found = self.shares.connections()
        for connection in found:
            _shut(connection)
        answered = self._workers.stop(deadline - time.monotonic())
        if ended:
            self.handshakes.stop(deadline - time.monotonic())
            for connection in found:
                if answered or connection.state != ANSWERING:
                    self._close(connection)
            self.loop.close()

    def add(self, listener: Listener) -> None:
        """Accept connections of the listener."""
        self.loop.post(lambda: listener.begin(self.handshakes, self.enter, self.shares.charge))

    def remove(self, listener: Listener) -> None:
        """Remove the listener and close it."""
        self.loop.post(listener.end)

    def cut_off(self, key: Hashable) -> None:
        """Cancel everything that this caller has started to request."""
        with self.shares.lock:
            share = self.shares.known.get(key)
            for connection in share.connections if share is not None else ():
                connection.dead = True
                _shut(connection)

    def recheck_now(self, sliver: str) -> None:
        """Recheck calls that wait for a change of the sliver: they may have their answer."""
        if sliver in self._parked:
            self.loop.post(lambda: self._recheck_parked(sliver))

    # -- admission

    def enter(self, stream: socket.socket, peer: Peer) -> None:
        """Admit the connection and start reading, or close it."""
        oldest = None
        connection = ApiConnection(stream, peer, self)
        with self.shares.lock:
            share = self.shares.of(peer.key, peer.kind)
            have = len(share.connections)
            full = self.shares.open[share.kind] >= PLACES[share.kind]
            if full and share.kind == OTHER:
                # The peer with most connections loses one to a peer with fewer.
                most = max(
                    self.shares.known.values(),
                    key=lambda other: len(other.connections) if other.kind == OTHER else 0,
                )
                if len(most.connections) > have + 1:
                    oldest = next((c for c in most.connections if c.state != ANSWERING), None)
                    full = oldest is None
            refused = full or (share.kind == OTHER and have >= MAX_PER_CALLER)
            if not refused:
                share.connections[connection] = None
                self.shares.open[share.kind] += 1
                connection.share = share
        if refused:
            stream.close()
            if time.monotonic() - share.told > SILENCE:
                share.told = time.monotonic()
                log.warning("Refusing connections of %s: too many are open", share)
            return
        if oldest is not None:
            self._close(oldest)
        self.loop.at(connection, time.monotonic() + REQUEST_TIMEOUT)
        try:
            self.loop.watch(connection, IN)
        except OSError:
            self._close(connection)
            raise
        if peer.kind != OTHER or isinstance(stream, ssl.SSLSocket):
            # Data may have arrived already; data received with the last message of a handshake
            # causes no event.
            self.event(connection)

    def _close(self, connection: ApiConnection, stream: bool = True) -> None:
        """Forget the connection and close its stream. Idempotent; not while a thread answers it."""
        with self.shares.lock:
            share, connection.share = connection.share, None
            if share is None:
                return
            del share.connections[connection]
            self.shares.open[share.kind] -= 1
        with contextlib.suppress(OSError, ValueError):
            self.loop.watch(connection, None)
        self.loop.at(connection, None)
        if stream:
            with contextlib.suppress(OSError):
                connection.stream.close()
        parked, connection.parked = connection.parked, None
        if parked is not None and (others := self._parked.get(parked.sliver)) is not None:
            others.discard(connection)
            if not others:
                del self._parked[parked.sliver]
        if connection.state == WAITING:
            share.requests.remove(connection)
        self._let_others_speak(connection, share)

    # -- events

    def event(self, connection: ApiConnection) -> None:
        share = connection.share
        if share is None or connection.dead:
            self._close(connection)
            return
        if share.wait(self.shares.everybody) and connection.state != SENDING:
            # Read nothing more until its caller has processor time again.
            self.loop.watch(connection, None)
            share.held.append(connection)
            self._wait_for_time(share)
            return
        begun = time.thread_time()
        try:
            if connection.state in (READING, LINGERING):
                self._read(connection, share)
            elif connection.state == SENDING:
                self._send(connection)
            else:  # not waiting for data: the other end has closed
                self._close(connection)
        except OSError as error:
            log.debug("Connection of %s: %s", share, error)
            self._close(connection)
        except BaseException:
            self._close(connection)
            raise
        finally:
            share.use(time.thread_time() - begun, self.shares.everybody)

    def late(self, connection: ApiConnection) -> None:
        if connection.state == PARKED and connection.parked is not None:
            self._answer(connection, self._desk.encode(connection.caller, connection.parked.late))
        elif connection.state == READING:
            self._answer(connection, refusal(Refused(408, "the request took too long")))
        else:
            self._close(connection)

    def _wait_for_time(self, share: Share) -> None:
        if share.due is None:
            self.loop.at(share, time.monotonic() + share.wait(self.shares.everybody))

    def _time_again(self, share: Share) -> None:
        if share.wait(self.shares.everybody):
            self._wait_for_time(share)
            return
        held, share.held = share.held, []
        for connection in held:
            if connection.share is share and connection.state in _WANTED:
                self.loop.watch(connection, _WANTED[connection.state])
        self._queue(share)

    # -- reading

    def _read(self, connection: ApiConnection, share: Share) -> None:
        while True:
            try:
                piece = connection.stream.recv(PIECE)
            except _LATER:
                return
            if connection.state == LINGERING:
                connection.linger -= len(piece)
                if not piece or connection.linger < 0:
                    self._close(connection)
                    return
            elif self._take(connection, share, piece):
                return
            # Data that TLS has read ahead causes no event.
            if not isinstance(connection.stream, ssl.SSLSocket) or not connection.stream.pending():
                return

    def _take(self, connection: ApiConnection, share: Share, piece: bytes) -> bool:
        """Read what has arrived; return whether no more is to be read."""
        request = connection.request
        try:
            if not piece:
                early = request.ended()
                if early is None:
                    self._close(connection)
                    return True
                raise early
            if not request.feed(piece):
                return False
        except Refused as refused:
            self._answer(connection, refusal(refused), LINGER_BYTES)
            return True
        if not (isinstance(share.key, tuple) and share.key[0] == SLIVER):
            connection.speaker = request.headers.get(FORWARD_HEADER, "")
        self._ask(connection, share)
        return True

    # -- answering

    def _ask(self, connection: ApiConnection, share: Share) -> None:
        connection.state = WAITING
        self.loop.at(connection, None)
        self.loop.watch(connection, 0)
        share.requests.append(connection)
        self._queue(share)

    def _queue(self, share: Share) -> None:
        if share.requests and not share.queued:
            share.queued = True
            self._ready[share.kind].append(share)

    def _dispatch(self) -> None:
        for kind, ready in self._ready.items():
            while ready and self._busy[kind] < CONCURRENCY[kind]:
                share = ready.popleft()
                share.queued = False
                if share.wait(self.shares.everybody):
                    self._wait_for_time(share)
                    continue
                if (connection := share.next()) is not None:
                    self._busy[kind] += 1
                    connection.state = ANSWERING
                    self.loop.watch(connection, None)
                    self._workers.do(lambda connection=connection: self._job(connection))  # type: ignore[misc]
                    self._queue(share)

    def _job(self, connection: ApiConnection) -> None:
        """Answer a request, in a thread."""
        begun = time.thread_time()
        answer: bytes | Parked | Program | None = None
        try:
            answer = connection.result(self._desk)
        except OSError as error:
            log.debug("Connection of %s: %s", connection.caller, error)
        except Exception:
            log.exception("Error in a connection of %s:", connection.caller)
        finally:
            used = time.thread_time() - begun
            self.loop.post(lambda: self._done(connection, answer, used))

    def _done(
        self, connection: ApiConnection, answer: bytes | Parked | Program | None, used: float
    ) -> None:
        share = connection.share
        assert share is not None, "closed while a thread answered it"
        self._busy[share.kind] -= 1
        share.use(used, self.shares.everybody)
        if answer is None or connection.dead:
            self._close(connection)
        elif isinstance(answer, Parked):
            self._park(connection, share, answer)
        elif isinstance(answer, Program):
            self._close(connection, stream=False)
            self._run(connection.stream, answer)
        else:
            # The rest of a refused image may still be arriving.
            self._answer(connection, answer, LINGER_BYTES if connection.request.is_image else 0)

    def _let_others_speak(self, connection: ApiConnection, share: Share) -> None:
        if connection.speaking:
            connection.speaking = False
            share.speaking.discard(connection.speaker)
        self._queue(share)

    def _park(self, connection: ApiConnection, share: Share, parked: Parked) -> None:
        first = connection.parked is None
        connection.parked = parked
        connection.state = PARKED
        self._let_others_speak(connection, share)
        if first:
            connection.request.data.clear()
            connection.last = time.monotonic() + parked.timeout
            self._parked.setdefault(parked.sliver, set()).add(connection)
        if first or connection.again:
            # The sliver may have changed between the check and now.
            connection.again = False
            self._ask(connection, share)
        else:
            self.loop.watch(connection, 0)
            self.loop.at(connection, connection.last)

    def _recheck_parked(self, sliver: str) -> None:
        for connection in list(self._parked.get(sliver, ())):
            if connection.state == PARKED and connection.share is not None:
                self._ask(connection, connection.share)
            else:
                connection.again = True

    def _answer(self, connection: ApiConnection, answer: bytes, linger: int = 0) -> None:
        """Send the answer; read up to ``linger`` more bytes, so that the client can receive it."""
        connection.state = SENDING
        connection.linger = linger
        connection.output = memoryview(answer)
        self.loop.at(connection, time.monotonic() + REQUEST_TIMEOUT)
        try:
            self._send(connection)
        except OSError as error:
            log.debug("Connection of %s: %s", connection.caller, error)
            self._close(connection)

    def _send(self, connection: ApiConnection) -> None:
        while connection.output:
            try:
                sent = connection.stream.send(connection.output)
            except _LATER:
                self.loop.watch(connection, OUT)
                return
            connection.output = connection.output[sent:]
        if not connection.linger:
            self._close(connection)
            return
        connection.stream.shutdown(socket.SHUT_WR)
        connection.state = LINGERING
        self.loop.at(connection, time.monotonic() + LINGER_TIME)
        self.loop.watch(connection, IN)


def _shut(connection: Any) -> None:
    """Shut down from any thread: the plain socket, as the TLS object is another thread's."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection.stream, socket.SHUT_RDWR)

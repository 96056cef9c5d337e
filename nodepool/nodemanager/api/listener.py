"""Sockets that callers of the API connect to (C.5)."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from nodepool.nodemanager.api.handshakes import Handshakes
from nodepool.nodemanager.api.methods import Caller
from nodepool.nodemanager.eventloop import IN, EventLoop, Waiter

log = logging.getLogger("nodepool.nodemanager.server")

#: Connections that are accepted from one listener before it is the turn of others.
BATCH = 4
#: Seconds to wait when the process has no descriptor left.
SHORTAGE_WAIT = 0.1
#: Seconds until a listener that has been shut is opened again.
SHUT_WAIT = 1.0
#: Connections that wait to be accepted; the kernel has its own limit.
BACKLOG = 4096
#: Errors of accept(2) that concern one connection only.
_PASSING = frozenset(
    (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP,
     errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET)
)  # fmt: skip
#: Seconds between two log lines about the same problem.
SILENCE = 60.0


@dataclass(frozen=True)
class Peer:
    """What is known of a connected peer without asking anybody.

    :param key: all connections with the same key are one caller's.
    :param kind: root, controller, or other.
    :param resolve: returns the caller; may take long.
    """

    key: Hashable
    kind: str
    resolve: Callable[[], Caller]


class Listener(Waiter):
    """Accepts connections; used by the loop's thread only.

    :param identify: returns None when the peer is not known (any more); not used with a context, where the certificate
        identifies it.
    :param slivers: only slivers connect here: it waits when they have used up their time.
    :param whose: key of the only caller that can connect here; it waits when that one has used up its time.
    """

    _told = float("-inf")
    _shut = False

    def __init__(
        self,
        stream: socket.socket,
        identify: Callable[[socket.socket], Peer | None],
        context: ssl.SSLContext | None = None,
        slivers: bool = False,
        whose: Hashable = None,
    ) -> None:
        super().__init__()
        self.rank = 3 if slivers else 0
        self._slivers = slivers
        stream.setblocking(False)
        self.socket = stream
        self.number = stream.fileno()
        self._identify = identify
        self._context = context
        self._whose = whose
        self._loop: EventLoop | None = None

    def begin(
        self,
        loop: EventLoop,
        handshakes: Handshakes[Peer],
        enter: Callable[[socket.socket, Peer], None],
        charge: Callable[[Hashable, float], tuple[float, float]],
    ) -> None:
        """Start accepting; ``charge`` bills a caller and returns the waiting times."""
        self._loop, self._handshakes, self._enter, self._charge = loop, handshakes, enter, charge
        loop.watch(self, IN)

    def end(self) -> None:
        if self._loop is not None:
            self._loop.watch(self, None)
            self._loop.at(self, None)
        self.socket.close()

    def ready(self) -> None:
        for _ in range(BATCH):
            begun = time.thread_time()
            try:
                stream, address = self.socket.accept()
            except OSError as error:
                self._cannot_accept(error)
                return
            try:
                stream.setblocking(False)
                if self._context is not None:
                    self._handshakes.begin(stream, address[0], self._context)
                    continue
                peer = self._identify(stream)
                if peer is None:
                    stream.close()
                    continue
                self._enter(stream, peer)
            except OSError:
                stream.close()
            except Exception:
                log.exception("Identifying a new connection failed:")
                stream.close()
            else:
                own, everybody = self._charge(peer.key, time.thread_time() - begun)
                wait = max(everybody if self._slivers else 0.0, own if peer.key == self._whose else 0.0)
                if wait:
                    self._pause(wait)
                    return

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
            if time.monotonic() - Listener._told > SILENCE:
                Listener._told = time.monotonic()
                log.error("API connections are queued until descriptors are free: %s", error.strerror)
            # It stays ready: without a pause this would be a busy loop.
            self._pause(SHORTAGE_WAIT)
        elif error.errno not in _PASSING:
            # A sliver's root with network rights can destroy the socket, which is then always ready.
            self._shut = True
            self._pause(SHUT_WAIT)

    def _pause(self, seconds: float) -> None:
        assert self._loop is not None
        self._loop.watch(self, None)
        self._loop.at(self, time.monotonic() + seconds)

    def late(self) -> None:
        assert self._loop is not None
        if self._shut:
            try:
                self.socket.listen(BACKLOG)  # it is still bound
            except OSError:
                self._pause(SHUT_WAIT)
                return
            self._shut = False
        self._loop.watch(self, IN)

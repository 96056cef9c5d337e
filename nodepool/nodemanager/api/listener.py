"""Sockets that callers of the API connect to (C.5)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from nodepool.base.tls import TlsContext
from nodepool.nodemanager.api.handshakes import Handshakes
from nodepool.nodemanager.api.methods import Caller
from nodepool.nodemanager.eventloop import Acceptor, EventLoop


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


class Listener(Acceptor):
    """Accepts connections; used by the loop's thread only.

    :param identify: returns None when the peer is not known (any more); not used with a context,
        where the certificate identifies it.
    :param slivers: only slivers connect here: it waits when they have used up their time.
    :param whose: key of the only caller that can connect here; it waits when that one has used up
        its time.
    """

    what = "API connections"

    def __init__(
        self,
        stream: socket.socket,
        loop: EventLoop,
        identify: Callable[[socket.socket], Peer | None],
        context: TlsContext | None = None,
        slivers: bool = False,
        whose: Hashable = None,
    ) -> None:
        super().__init__(stream, loop)
        self.rank = 3 if slivers else 0
        self._slivers = slivers
        self._identify = identify
        self._context = context
        self._whose = whose

    def begin(
        self,
        handshakes: Handshakes[Peer],
        enter: Callable[[socket.socket, Peer], None],
        charge: Callable[[Hashable, float], tuple[float, float]],
    ) -> None:
        """Start accepting; ``charge`` bills a caller and returns the waiting times."""
        self._handshakes, self._enter, self._charge = handshakes, enter, charge
        self.start()

    def accepted(self, stream: socket.socket, address: tuple[str, int], begun: float) -> float:
        if self._context is not None:
            self._handshakes.begin(stream, address[0], self._context.current())
            return 0.0
        peer = self._identify(stream)
        if peer is None:
            stream.close()
            return 0.0
        self._enter(stream, peer)
        own, everybody = self._charge(peer.key, time.thread_time() - begun)
        return max(everybody if self._slivers else 0.0, own if peer.key == self._whose else 0.0)

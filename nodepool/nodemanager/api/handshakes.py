"""TLS connections of unknown peers, until their certificate is verified (C.5)."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from nodepool.nodemanager.eventloop import IN, OUT, EventLoop, Waiter, Workers

log = logging.getLogger("nodepool.nodemanager.server")

#: Maximum handshakes in parallel, in total and per address.
MAX_HANDSHAKES = 512
MAX_PER_ADDRESS = 128
HANDSHAKE_TIMEOUT = 10.0
#: Threads for cryptographic work.
THREADS = 2

P = TypeVar("P")


class _Handshake(Waiter):
    rank = 3

    def __init__(self, stream: ssl.SSLSocket, address: str, owner: Handshakes[P]) -> None:
        super().__init__()
        self.stream = stream
        self.number = stream.fileno()
        self.address = address
        self.owner = owner
        #: A thread works on it.
        self.away = False
        self.given_up = False

    def ready(self) -> None:
        self.owner.step(self)

    def late(self) -> None:
        self.owner.give_up(self)


class Handshakes(Generic[P]):
    """Runs handshakes without a thread per peer, so that slow peers do not block others.

    A new connection without a free slot replaces the oldest one of the peer with most connections.

    :param who: returns what is known of the owner of a certificate; None: nothing, and the
        connection ends.
    :param done: called by the loop's thread.
    """

    def __init__(
        self,
        loop: EventLoop,
        who: Callable[[ssl.SSLSocket], P | None],
        done: Callable[[ssl.SSLSocket, P], None],
    ) -> None:
        self._loop = loop
        self._who = who
        self._done = done
        self._workers = Workers("Thread-nm-tls", THREADS)
        self._lock = threading.Lock()
        #: Oldest first.
        self._open: dict[_Handshake, None] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def start(self) -> None:
        self._workers.start()

    def begin(self, stream: socket.socket, address: str, context: ssl.SSLContext) -> None:
        """Start a handshake. Called by the loop's thread.

        :raises OSError: the other end has closed.
        """
        # The first half of an IPv6 address: clients can choose the rest.
        address = ":".join(address.split(":")[:4]) if ":" in address else address
        counts = Counter(other.address for other in self._open)
        crowded = (
            address
            if counts[address] >= MAX_PER_ADDRESS
            else max(counts, key=lambda other: counts[other])
            if len(self._open) >= MAX_HANDSHAKES
            else None
        )
        oldest = next((other for other in self._open if other.address == crowded), None)
        if oldest is not None:
            self.give_up(oldest)
        handshake = _Handshake(
            context.wrap_socket(stream, server_side=True, do_handshake_on_connect=False),
            address,
            self,
        )
        with self._lock:
            self._open[handshake] = None
        self._loop.at(handshake, time.monotonic() + HANDSHAKE_TIMEOUT)
        self._loop.watch(handshake, IN)

    def step(self, handshake: _Handshake) -> None:
        self._loop.watch(handshake, None)
        handshake.away = True
        self._workers.do(lambda: self._calculate(handshake))

    def _calculate(self, handshake: _Handshake) -> None:
        mask: int | None = None
        peer: P | None = None
        try:
            handshake.stream.do_handshake()
            peer = self._who(handshake.stream)
        except ssl.SSLWantReadError:
            mask = IN
        except ssl.SSLWantWriteError:
            mask = OUT
        except (OSError, ValueError) as error:
            log.debug("Handshake with %s: %s", handshake.address, error)
        self._loop.post(lambda: self._stepped(handshake, mask, peer))

    def _stepped(self, handshake: _Handshake, mask: int | None, peer: P | None) -> None:
        handshake.away = False
        if handshake.given_up or (mask is None and peer is None):
            self.give_up(handshake)
        elif peer is None:
            self._loop.watch(handshake, mask)
        else:
            self._forget(handshake)
            try:
                self._done(handshake.stream, peer)
            except OSError as error:
                log.debug("Handshake with %s: %s", handshake.address, error)
                handshake.stream.close()

    def _forget(self, handshake: _Handshake) -> None:
        self._loop.at(handshake, None)
        with self._lock:
            self._open.pop(handshake, None)

    def give_up(self, handshake: _Handshake) -> None:
        """Close it, or have it closed by the thread that has it."""
        self._forget(handshake)
        handshake.given_up = True
        if not handshake.away:
            with contextlib.suppress(OSError, ValueError):
                self._loop.watch(handshake, None)
            handshake.stream.close()

    def stop(self, timeout: float) -> None:
        """Close all connections, after the loop's thread has ended."""
        self._workers.stop(timeout)
        for handshake in list(self._open):
            handshake.stream.close()

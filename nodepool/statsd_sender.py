"""Sends statsd lines over UDP from a thread of its own: bounded, never blocking its callers."""

from __future__ import annotations

import collections
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator

PACKET_SIZE = 512
QUEUE_LENGTH = 20000
LINGER = 0.02
RESOLVE_AGAIN = 60.0

log = logging.getLogger("nodepool.statsd")


def format_line(stat: str, value: float, kind: str) -> Iterator[str]:
    """The line(s) of one value in the classic format."""
    # A line break or a colon of a name would forge other lines.
    stat = stat.replace("\n", "_").replace("|", "_").replace(":", "_")
    if kind == "ms":
        yield f"{stat}:{value:.6f}|ms"
    elif kind == "g" and value < 0:
        # A signed gauge means a change, so a negative one is set in two steps.
        yield f"{stat}:0|g"
        yield f"{stat}:{value}|g"
    else:
        yield f"{stat}:{value}|{kind}"


def packets(lines: Iterable[str], limit: int = PACKET_SIZE) -> Iterator[bytes]:
    """Join lines to packets of at most ``limit`` bytes; a longer line goes alone."""
    packet = b""
    for line in lines:
        data = line.encode("utf-8", "replace")
        if packet and len(packet) + 1 + len(data) > limit:
            yield packet
            packet = data
        else:
            packet = packet + b"\n" + data if packet else data
    if packet:
        yield packet


class StatsdSender:
    """Queue and thread for one statsd server; the thread runs from the first value to :meth:`close`."""

    def __init__(self, address: tuple[str, int], queue_length: int = QUEUE_LENGTH) -> None:
        self.address = address
        self.dropped = 0
        self._queue: collections.deque[tuple[str, float, str]] = collections.deque()
        self._limit = queue_length
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._resolved_at = float("-inf")
        self._complained = False

    def put(self, stat: str, value: float, kind: str) -> None:
        """Queue one value; dropped and counted when the queue is full."""
        if len(self._queue) >= self._limit:
            self.dropped += 1
            return
        self._queue.append((stat, value, kind))
        if not self._wake.is_set():
            self._wake.set()
            if self._thread is None:
                self._start()

    def close(self, timeout: float = 1.0) -> None:
        """Send the rest and end the thread (``timeout`` in seconds)."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return
        self._stop.set()
        self._wake.set()
        thread.join(timeout)
        with self._lock:
            self._thread = None
            # The next value must start a thread again.
            self._wake.clear()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="ThreadPoolExecutor-statsd", daemon=True)
                self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        try:
            while True:
                self._wake.wait()
                # Values come in bursts; waiting a moment sends them in fewer packets.
                stop.wait(LINGER)
                self._wake.clear()
                self._send_queued()
                if stop.is_set():
                    return
        finally:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
                self._resolved_at = float("-inf")

    def _take(self) -> Iterator[str]:
        while self._queue:
            yield from format_line(*self._queue.popleft())

    def _send_queued(self) -> None:
        self._connect()
        for packet in packets(self._take()):
            if self._socket is None:
                continue
            try:
                self._socket.send(packet)
            except OSError as error:
                # Nobody listens, buffer full, network gone: the values are lost, the service goes on.
                self._complain(error)

    def _connect(self) -> None:
        """Resolve the name now and then, so that a moved server is found again."""
        now = time.monotonic()
        if now - self._resolved_at < RESOLVE_AGAIN:
            return
        self._resolved_at = now
        try:
            family, kind, proto, _, target = socket.getaddrinfo(*self.address, type=socket.SOCK_DGRAM)[0]
            sock = socket.socket(family, kind, proto)
            try:
                sock.setblocking(False)
                sock.connect(target)
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            self._complain(error)
            return
        if self._socket is not None:
            self._socket.close()
        self._socket = sock

    def _complain(self, error: OSError) -> None:
        level = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        if isinstance(error, ConnectionRefusedError):
            level = logging.DEBUG
        log.log(level, "Cannot send statistics to %s:%s: %s", *self.address, error)

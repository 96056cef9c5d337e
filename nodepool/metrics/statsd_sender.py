"""Sends values to statsd in a separate thread with a bounded queue.

Callers never wait for a name server or a socket.
"""

from __future__ import annotations

import collections
import logging
import socket
import threading
import time

from statsd import StatsClient

QUEUE_LENGTH = 20000
LINGER = 0.02
RESOLVE_AGAIN = 60.0
#: A newline or a colon in a name would create other values.
_FORGED = str.maketrans("\n|:", "___")

log = logging.getLogger("nodepool.statsd")


class StatsdSender:
    """Queue and thread for one statsd server; runs from the first value to :meth:`close`."""

    def __init__(self, address: tuple[str, int], queue_length: int = QUEUE_LENGTH) -> None:
        self.address = address
        self.dropped = 0
        self._queue: collections.deque[tuple[str, float, str]] = collections.deque()
        self._limit = queue_length
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._complained = False

    def put(self, stat: str, value: float, kind: str) -> None:
        """Queue one value; if the queue is full it is dropped and counted."""
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
            # The next value must start a new thread.
            self._wake.clear()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run,
                    args=(self._stop,),
                    name="ThreadPoolExecutor-statsd",
                    daemon=True,
                )
                self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        client: StatsClient | None = None
        resolved_at = float("-inf")
        try:
            while True:
                self._wake.wait()
                # Values arrive in bursts; a short delay sends them in fewer packets.
                stop.wait(LINGER)
                self._wake.clear()
                if (
                    time.monotonic() - resolved_at >= RESOLVE_AGAIN
                ):  # resolve again, in case the server has moved
                    resolved_at = time.monotonic()
                    client = self._resolve(client)
                self._send(client)
                if stop.is_set():
                    return
        finally:
            if client is not None:
                client.close()

    def _send(self, client: StatsClient | None) -> None:
        """Send queued values; they are lost if there is no server."""
        pipeline = client.pipeline() if client is not None else None
        while self._queue:
            stat, value, kind = self._queue.popleft()
            if pipeline is None:
                continue
            stat = stat.translate(_FORGED).encode("ascii", "replace").decode()
            if kind == "g":
                pipeline.gauge(stat, value)
            elif kind == "c":
                pipeline.incr(stat, value)
            else:
                pipeline.timing(stat, value)
        if pipeline is not None:
            pipeline.send()

    def _resolve(self, old: StatsClient | None) -> StatsClient | None:
        try:
            family = socket.getaddrinfo(*self.address, type=socket.SOCK_DGRAM)[0][0]
            client = StatsClient(*self.address, ipv6=family == socket.AF_INET6)
        except OSError as error:
            level = logging.DEBUG if self._complained else logging.WARNING
            self._complained = True
            log.log(level, "Cannot send statistics to %s:%s: %s", *self.address, error)
            return old
        if old is not None:
            old.close()
        return client

"""Connections of the web server: nobody can occupy all of them (CLI-6)."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from waitress.server import TcpWSGIServer

from nodepool.web.streams import StreamChannel, Streams

#: Maximum number of connections, and seconds without a byte after which one is closed.
CONNECTION_LIMIT, IDLE_TIMEOUT = 500, 30
#: Seconds in which a request must arrive, from its first byte.
REQUEST_TIMEOUT = 10.0
#: Seconds between two checks for connections that are too slow.
CHECK = 5.0


class Channel(StreamChannel):
    """A connection that knows since when a request has been incomplete."""

    request: Any
    incomplete_since: float | None = None

    def received(self, data: bytes) -> bool:
        taken = super().received(data)
        if self.request is None:
            self.incomplete_since = None
        elif self.incomplete_since is None:
            self.incomplete_since = time.monotonic()
        return taken


class Server(TcpWSGIServer):
    """Always accepts connections.

    If there are too many, the client with most of them loses its oldest idle one.
    """

    channel_class = Channel
    streams: Streams

    def handle_accept(self) -> None:
        super().handle_accept()
        if len(self.active_channels) > CONNECTION_LIMIT:
            idle = [channel for channel in self.active_channels.values() if not channel.requests and not channel.streaming]
            if idle:
                counts = Counter(channel.addr[0] for channel in self.active_channels.values())
                # An answer that is being sent is cut off only if its client has the most connections.
                min(idle, key=lambda c: (-counts[c.addr[0]], c.total_outbufs_len > 0, c.creation_time)).handle_close()

    def maintenance(self, now: float) -> None:
        super().maintenance(now)
        latest = time.monotonic() - REQUEST_TIMEOUT
        for channel in self.active_channels.values():
            if channel.incomplete_since is not None and channel.incomplete_since < latest:
                channel.will_close = True

"""A proxy in front of ZooKeeper that counts operations, pings apart.

It speaks TLS to the program under test, as 11.0.0 wants it, and plain text to the server. The
server's own counters do not separate pings from reads.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import threading
from collections import Counter
from typing import Any

#: Operation codes of ZooKeeper's protocol.
NAMES = {
    1: "create",
    2: "delete",
    3: "exists",
    4: "get",
    5: "set",
    6: "get_acl",
    8: "children",
    9: "sync",
    11: "ping",
    12: "children2",
    13: "check",
    14: "multi",
    15: "create2",
    100: "auth",
    101: "set_watches",
    105: "set_watches2",
    106: "add_watch",
    -11: "close",
}
READS = frozenset({"exists", "get", "get_acl", "children", "children2"})
PING = "ping"


class CountingProxy:
    """Listens on ``port`` of 127.0.0.1 until closed; ``counts`` has the requests by name."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.counts: Counter[str] = Counter()
        self.port = 0
        self._target = settings["plain_port"]
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(settings["cert"], settings["key"])
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="CountingProxy", daemon=True
        )
        self._thread.start()
        if not ready.wait(10):
            raise TimeoutError("the proxy does not listen")

    def _run(self, ready: threading.Event) -> None:
        async def listen() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        self._loop.run_until_complete(listen())
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        answers = asyncio.ensure_future(self._copy(server_reader, writer))
        try:
            await self._count(reader, server_writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            server_writer.close()
            answers.cancel()
            writer.close()

    async def _count(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = True
        while True:
            head = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack(">i", head)[0])
            if not first:  # the first one opens the session and has no header
                kind = struct.unpack_from(">i", body, 4)[0]
                self.counts[NAMES.get(kind, str(kind))] += 1
            first = False
            writer.write(head + body)
            await writer.drain()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


__all__ = ["PING", "READS", "CountingProxy"]

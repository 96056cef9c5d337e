"""The server on sockets: TCP, TLS with client certificates, and Unix.

Loopback addresses only, unless the caller insists: there is no quorum, and without TLS no
protection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import ssl
from pathlib import Path
from typing import Any

from nodepool.lab.zkserver.core import ServedConnection
from nodepool.lab.zkserver.journal import Journal
from nodepool.lab.zkserver.requests import StandaloneServer

log = logging.getLogger("nodepool.zkserver.serve")

#: Bytes that wait for a client that does not read; then it is disconnected.
MOST_UNREAD = 64 * 1024 * 1024
#: Seconds between two checks for ended sessions, at most: a session that is opened meanwhile lasts
#: at least as long.
LONGEST_TICK = 1.0


class AddressError(Exception):
    """The server does not listen there."""


def tls_context(certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    """Return a context that demands a certificate of the authority from clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Protocol(asyncio.Protocol):
    def __init__(self, server: ZooKeeperServer) -> None:
        self._server = server
        self._transport: Any = None
        self._connection: ServedConnection | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        identities = {("ip", peer[0])} if isinstance(peer, tuple) else set()
        self._connection = self._server.core.connect(
            self._write, transport.close, identities, str(peer or "a Unix socket")
        )

    def _write(self, data: bytes) -> None:
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MOST_UNREAD:
            log.warning("Disconnecting a client that does not read its answers")
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        assert self._connection is not None
        self._server.guarded(self._server.core.receive, self._connection, data)

    def connection_lost(self, _error: Exception | None) -> None:
        assert self._connection is not None
        self._server.core.lost(self._connection)


class ZooKeeperServer:
    """Serves until `stop` is called.

    :param directory: where data are kept; None: in memory only.
    :raises JournalError: the directory is damaged, or in use.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.core = StandaloneServer()
        self._journal = Journal(directory) if directory is not None else None
        if self._journal is not None:
            self._journal.load(self.core)
        self._listening: list[asyncio.Server] = []
        self._stopped = asyncio.Event()
        self._error: Exception | None = None

    async def listen_unix(self, path: Path) -> None:
        """Accept clients of our own user on a Unix socket, which replaces an existing file."""
        path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        self._listening.append(await loop.create_unix_server(lambda: _Protocol(self), path))
        path.chmod(0o600)

    async def listen(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, anywhere: bool = False
    ) -> int:
        """Accept clients; return the port.

        :param port: 0: any free one.
        :param anywhere: allow addresses that other machines can reach.
        :raises AddressError: it is not a loopback address.
        :raises OSError: the address is in use.
        """
        if not anywhere and not _is_loopback(host):
            raise AddressError(
                f"{host} can be reached from other machines; use 127.0.0.1, or allow it with "
                "--anywhere "
                "(this server has no quorum, and is not meant for production)"
            )
        listening = await asyncio.get_running_loop().create_server(
            lambda: _Protocol(self), host, port, ssl=tls
        )
        self._listening.append(listening)
        return int(listening.sockets[0].getsockname()[1])

    def guarded(self, function: Any, *arguments: object) -> Any:
        """Call the core.

        If a transaction cannot be kept, the server ends, because memory and disk differ.
        """
        if self._error is not None:
            return None
        try:
            return function(*arguments)
        except OSError as error:
            log.error("Stopping: a transaction cannot be written: %s", error)
            self._error = error
            self.stop()
            return None

    async def run(self) -> None:
        """Serve until `stop` is called.

        :raises OSError: a transaction could not be written.
        """
        while not self._stopped.is_set():
            wait = self.guarded(self.core.tick)
            try:
                async with asyncio.timeout(
                    min(LONGEST_TICK, LONGEST_TICK if wait is None else wait)
                ):
                    await self._stopped.wait()
            except TimeoutError:
                continue
        for listening in self._listening:
            listening.close()
        for connection in list(self.core.connections):
            self.core.drop(connection)
        await asyncio.sleep(0)
        if self._journal is not None:
            self._journal.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped.set()


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False

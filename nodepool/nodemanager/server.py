"""The API over Unix socket, loopback, slivers' own networks and TLS (nodemanager.md A.8, C.5)."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager import records
from nodepool.nodemanager.api import SLIVER, Api, Caller
from nodepool.nodemanager.config import API_SERVER_PORT, NodeManagerConfig
from nodepool.nodemanager.http_exchange import Exchange
from nodepool.nodemanager.identity import Identity

log = logging.getLogger("nodepool.nodemanager.server")

#: Calls at one time, over all transports; WaitSliver keeps its place while it waits.
MAX_CONNECTIONS = 256
#: Of these for one sliver or other user of the host, so that none can shut the others out.
MAX_PER_CALLER = 32
BACKLOG = 128
HANDSHAKE_TIMEOUT = 10.0
STOP_TIMEOUT = 5.0

Identify = Callable[[socket.socket], "Caller | None"]


class Servers:
    """Listening sockets, one thread that accepts, a bounded pool that answers."""

    def __init__(self, api: Api, config: NodeManagerConfig, manager: Any) -> None:
        self._api = api
        self._config = config
        self._manager = manager
        self.identity = Identity(manager.sliver_of_uid, self._is_delegate)
        self._lock = threading.Lock()
        self._listeners: dict[int, tuple[socket.socket, Identify, ssl.SSLContext | None]] = {}
        self._slivers: dict[str, socket.socket] = {}
        self._open: dict[str, int] = {}
        self._connections: set[socket.socket] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pool = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="Thread-nm-api")
        self._thread = threading.Thread(target=self._run, name="Thread-nm-accept", daemon=True)
        self._running = False
        #: Port of the TLS server, when it was to be any.
        self.tls_port = 0
        self.tcp_port = 0

    def _is_delegate(self, name: str) -> bool:
        return self._manager.database.get(records.record_key(records.DELEGATE, name)) is not None

    # -- life

    def start(self) -> None:
        """Listen everywhere.

        :raises ConfigurationError: a place cannot be had; the text names it and the remedy.
        """
        config = self._config
        try:
            if config.unix_socket:
                self._add(self._unix(config.unix_socket), self.identity.of_unix)
            if config.old_unix_socket and config.unix_socket:
                self._link(config.unix_socket, config.old_unix_socket)
            if config.tcp_port >= 0:
                listener = self._tcp("127.0.0.1", config.tcp_port, "api.tcp")
                self.tcp_port = listener.getsockname()[1]
                self._add(listener, self.identity.of_tcp)
            if config.tls is not None:
                listener = self._tcp(config.tls.address, config.tls.port, "api.tls.port")
                self.tls_port = listener.getsockname()[1]
                self._add(listener, lambda connection: None, self._context())
        except BaseException:
            self._close_all()
            raise
        self._running = True
        self._thread.start()

    def stop(self) -> None:
        """Close all; calls that wait are cut off."""
        self._running = False
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT)
        self._close_all()
        with self._lock:
            open_now = list(self._connections)
        for connection in open_now:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown(wait=False, cancel_futures=True)
        os.close(self._wake_write)
        if self._config.unix_socket:
            with contextlib.suppress(OSError):
                os.unlink(self._config.unix_socket)

    def _close_all(self) -> None:
        with self._lock:
            listeners, self._listeners = list(self._listeners.values()), {}
            self._slivers.clear()
        for listener, _, _ in listeners:
            listener.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    # -- places

    def _add(self, listener: socket.socket, identify: Identify, context: ssl.SSLContext | None = None) -> None:
        listener.setblocking(False)
        with self._lock:
            self._listeners[listener.fileno()] = listener, identify, context
        self._wake()

    @staticmethod
    def _unix(path: str) -> socket.socket:
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                probe.settimeout(1)
                try:
                    probe.connect(path)
                except OSError:
                    os.unlink(path)  # of a node manager that is gone
                else:
                    raise ConfigurationError(f"api.unix: another node manager answers at {path}; stop it, or give this one "
                                             "another run-dir")
                finally:
                    probe.close()
            else:
                raise ConfigurationError(f"api.unix: {path} exists and is no socket; remove it")
        except FileNotFoundError:
            pass
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            # Everybody may connect: the kernel says who it is.
            os.chmod(path, 0o666)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigurationError(f"api.unix: cannot listen at {path}: {error.strerror}") from error
        return listener

    @staticmethod
    def _link(path: str, old: str) -> None:
        """The place where programs of the original look."""
        try:
            if os.path.islink(old) or not os.path.lexists(old):
                temporary = f"{old}.new"
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                os.symlink(path, temporary)
                os.replace(temporary, old)
            else:
                log.warning("api.old-unix: %s exists and is no link; it is left alone", old)
        except OSError as error:
            log.warning("api.old-unix: cannot make the link %s: %s", old, error.strerror)

    @staticmethod
    def _tcp(address: str, port: int, option: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigurationError(f"{option}: cannot listen on {address} port {port}: {error.strerror}; choose another port, "
                                     "or false for none" if option == "api.tcp" else
                                     f"{option}: cannot listen on {address} port {port}: {error.strerror}") from error
        return listener

    def _context(self) -> ssl.SSLContext:
        tls = self._config.tls
        assert tls is not None
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(tls.cert, tls.key)
            context.load_verify_locations(tls.ca)
        except OSError as error:
            raise ConfigurationError(f"api.tls: cannot use {tls.cert}, {tls.key} and {tls.ca}: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    # -- slivers

    def sliver_changed(self, name: str, handle: Any) -> None:
        """A sliver runs, or not: the API in its own network is there, or not."""
        with self._lock:
            known = self._slivers.get(name)
        if handle is None:
            if known is not None:
                self._remove(known)
                with self._lock:
                    self._slivers.pop(name, None)
            return
        if known is not None or self._config.tcp_port < 0:
            return
        listen = getattr(self._manager.backend, "listen", None)
        if listen is None:
            return
        try:
            listener = socket.socket(fileno=listen(handle, API_SERVER_PORT))
        except Exception as error:
            log.warning("Sliver %s has no API on port %s: %s", name, API_SERVER_PORT, error)
            return
        with self._lock:
            self._slivers[name] = listener
        # The network namespace is the identity: nobody else is in it.
        self._add(listener, lambda _connection: Caller(SLIVER, name))

    def _remove(self, listener: socket.socket) -> None:
        with self._lock:
            self._listeners.pop(listener.fileno(), None)
        listener.close()
        self._wake()

    # -- connections

    def _run(self) -> None:
        while self._running:
            with self._lock:
                numbers = list(self._listeners)
            poll = select.poll()
            poll.register(self._wake_read, select.POLLIN)
            for number in numbers:
                poll.register(number, select.POLLIN)
            for number, _ in poll.poll():
                if number == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    self._accept(number)
        os.close(self._wake_read)

    def _accept(self, number: int) -> None:
        with self._lock:
            entry = self._listeners.get(number)
        if entry is None:
            return
        listener, identify, context = entry
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(True)
        caller: Caller | None = None
        if context is None:
            try:
                caller = identify(connection)
            except OSError:
                caller = None
            if caller is None:
                connection.close()
                return
        key = str(caller) if caller is not None else "tls"
        with self._lock:
            total = sum(self._open.values())
            limit = MAX_CONNECTIONS if caller is None or caller.kind == "root" else MAX_PER_CALLER
            if not self._running or total >= MAX_CONNECTIONS or self._open.get(key, 0) >= limit:
                full = True
            else:
                full = False
                self._open[key] = self._open.get(key, 0) + 1
                self._connections.add(connection)
        if full:
            log.warning("Connection of %s refused: too many", key)
            connection.close()
            return
        try:
            self._pool.submit(self._serve, connection, caller, context, key)
        except RuntimeError:  # stopping
            self._done(connection, key)

    def _serve(self, connection: socket.socket, caller: Caller | None, context: ssl.SSLContext | None, key: str) -> None:
        stream: socket.socket = connection
        try:
            if context is not None:
                connection.settimeout(HANDSHAKE_TIMEOUT)
                stream = context.wrap_socket(connection, server_side=True)
                tls = self._config.tls
                assert tls is not None and isinstance(stream, ssl.SSLSocket)
                caller = self.identity.of_certificate(stream.getpeercert(), tls.controllers)
            if caller is not None:
                Exchange(stream, caller, self._api, self._manager.images, self.identity).run()
        except (OSError, ssl.SSLError) as error:
            log.debug("Connection of %s: %s", key, error)
        except Exception:
            log.exception("Error in a connection of %s:", key)
        finally:
            with contextlib.suppress(OSError):
                stream.close()
            self._done(connection, key)

    def _done(self, connection: socket.socket, key: str) -> None:
        with self._lock:
            self._connections.discard(connection)
            left = self._open.get(key, 1) - 1
            if left > 0:
                self._open[key] = left
            else:
                self._open.pop(key, None)
        connection.close()

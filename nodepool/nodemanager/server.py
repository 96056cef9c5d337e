"""The API over Unix socket, loopback, slivers' own networks and TLS (nodemanager.md A.8, C.5)."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager import records
from nodepool.nodemanager.api import CONTROLLER, ROOT, SLIVER, Api, Caller
from nodepool.nodemanager.config import API_SERVER_PORT, NodeManagerConfig
from nodepool.nodemanager.http_exchange import Exchange
from nodepool.nodemanager.identity import Identity

log = logging.getLogger("nodepool.nodemanager.server")

#: Calls at one time, over all transports; WaitSliver keeps its place while it waits.
MAX_CONNECTIONS = 512
#: Of these kept for root, who must get in when all others are taken.
RESERVED = 32
#: Of these for one sliver or other user of the host, so that none can shut the others out; and for all launchers.
MAX_PER_CALLER = 32
MAX_CONTROLLERS = 384
#: TLS connections that have not shown their certificate yet: anybody in the network can make them.
MAX_HANDSHAKES = 64
#: Seconds to wait when the process has no descriptor left.
SHORTAGE_WAIT = 0.1
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
        self.identity = Identity(manager.sliver_of_uid, self._delegate_methods, controllers=config.controller_uids)
        self._lock = threading.Lock()
        self._listeners: dict[int, tuple[socket.socket, Identify, ssl.SSLContext | None]] = {}
        #: Listener inside, and which process 1 it belongs to.
        self._slivers: dict[str, tuple[socket.socket, tuple[Any, ...]]] = {}
        self._open: dict[str, int] = {}
        #: When a refusal was last told in the log, by caller.
        self._told: dict[str, float] = {}
        self._connections: set[socket.socket] = set()
        #: Those whose caller is a sliver, by its name.
        self._of_slivers: dict[str, set[socket.socket]] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._threads: set[threading.Thread] = set()
        self._socket_file: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="Thread-nm-accept", daemon=True)
        self._running = False
        #: Port of the TLS server, when it was to be any.
        self.tls_port = 0
        self.tcp_port = 0

    def _delegate_methods(self, name: str) -> Collection[str] | None:
        record = self._manager.database.get(records.record_key(records.DELEGATE, name))
        return None if record is None else record.content.get("methods") or ()

    # -- life

    def start(self) -> None:
        """Listen everywhere.

        :raises ConfigurationError: a place cannot be had; the text names it and the remedy.
        """
        config = self._config
        try:
            if config.unix_socket:
                self._add(self._unix(config.unix_socket), self.identity.of_unix)
                status = os.stat(config.unix_socket)
                self._socket_file = status.st_dev, status.st_ino
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
            self._unlink()
            raise
        with self._lock:
            self._running = True
        self._thread.start()

    def stop(self) -> None:
        """Close all; calls that wait are cut off."""
        with self._lock:
            if self._wake_write < 0:
                return
            self._running = False
            write, self._wake_write = self._wake_write, -1
            os.write(write, b"x")
        deadline = time.monotonic() + STOP_TIMEOUT
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT)
        self._close_all()
        with self._lock:
            open_now, threads = list(self._connections), list(self._threads)
        for connection in open_now:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        os.close(write)
        if not self._thread.is_alive():
            os.close(self._wake_read)
        self._unlink()

    def _unlink(self) -> None:
        """Remove the socket, unless another node manager has put its own there meanwhile."""
        path = self._config.unix_socket
        if not path or self._socket_file is None:
            return
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if (status.st_dev, status.st_ino) == self._socket_file:
                os.unlink(path)
        old = self._config.old_unix_socket
        with contextlib.suppress(OSError):
            if old and os.readlink(old) == path:
                os.unlink(old)

    def _close_all(self) -> None:
        with self._lock:
            listeners, self._listeners = list(self._listeners.values()), {}
            self._slivers.clear()
        for listener, _, _ in listeners:
            listener.close()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_write >= 0:
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
                except ConnectionRefusedError:
                    os.unlink(path)  # of a node manager that is gone
                except OSError as error:
                    raise ConfigurationError(f"api.unix: {path} is there and cannot be tried: {error.strerror}") from error
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
            raise ConfigurationError(f"api.unix: cannot listen at {path}: {error.strerror or error}") from error
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
        life = (handle.get("pid"), handle.get("start_time")) if handle is not None else ()
        with self._lock:
            known = self._slivers.get(name)
            if known is not None and known[1] == life:
                return
            self._slivers.pop(name, None)
        if known is not None:
            self._remove(known[0])  # its network is gone, or will be
        if handle is None or self._config.tcp_port < 0:
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
            self._slivers[name] = listener, life
        # The network namespace is the identity: nobody else is in it.
        self._add(listener, lambda _connection: Caller(SLIVER, name))

    def cut_off(self, name: str) -> None:
        """Nothing that a sliver has begun to ask counts any more: it has ended, and its name and ids may be given to another."""
        with self._lock:
            for connection in self._of_slivers.get(name, ()):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

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

    def _accept(self, number: int) -> None:
        with self._lock:
            entry = self._listeners.get(number)
        if entry is None:
            return
        listener, identify, context = entry
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                log.error("Connections wait: %s", error.strerror)
                self._wait_for_descriptors()
            return
        connection.setblocking(True)
        caller: Caller | None = None
        if context is None:
            try:
                caller = identify(connection)
            except OSError:
                caller = None
            except Exception:
                log.exception("Cannot tell who connects:")
            if caller is None:
                connection.close()
                return
        key = self._enter(caller)
        if key is None:
            connection.close()
            return
        thread = threading.Thread(target=self._serve, args=(connection, caller, context, key), name="Thread-nm-api", daemon=True)
        with self._lock:
            self._connections.add(connection)
            self._threads.add(thread)
            if caller is not None and caller.kind == SLIVER:
                self._of_slivers.setdefault(caller.name, set()).add(connection)
        try:
            thread.start()
        except RuntimeError as error:
            log.error("Connection of %s refused: %s", key, error)
            with self._lock:
                self._forget(connection, caller)
                self._threads.discard(thread)
            self._leave(key)
            connection.close()

    def _forget(self, connection: socket.socket, caller: Caller | None) -> None:
        """With the lock."""
        self._connections.discard(connection)
        if caller is not None and caller.kind == SLIVER and (known := self._of_slivers.get(caller.name)) is not None:
            known.discard(connection)
            if not known:
                del self._of_slivers[caller.name]

    def _wait_for_descriptors(self) -> None:
        """The listener stays ready: without a pause it would be asked at once again.  A stop ends it at once."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.poll(SHORTAGE_WAIT * 1000)  # what woke us is left to the loop

    def _enter(self, caller: Caller | None) -> str | None:
        """A place; None when there is none for this caller (None: not known yet)."""
        key = str(caller) if caller is not None else "TLS clients before their certificate"
        if caller is not None and caller.kind == CONTROLLER:
            key = "controllers"
        limit = (MAX_HANDSHAKES if caller is None else MAX_CONNECTIONS if caller.kind == ROOT
                 else MAX_CONTROLLERS if caller.kind == CONTROLLER else MAX_PER_CALLER)
        places = MAX_CONNECTIONS - (0 if caller is not None and caller.kind == ROOT else RESERVED)
        with self._lock:
            if not self._running:
                return None
            if sum(self._open.values()) < places and self._open.get(key, 0) < limit:
                self._open[key] = self._open.get(key, 0) + 1
                return key
            known = time.monotonic() - self._told.get(key, -1e9) < 60
            self._told[key] = time.monotonic()
        if not known:
            log.warning("Connections of %s are refused: too many at one time", key)
        return None

    def _leave(self, key: str) -> None:
        with self._lock:
            left = self._open.get(key, 1) - 1
            if left > 0:
                self._open[key] = left
            else:
                self._open.pop(key, None)

    def _serve(self, connection: socket.socket, caller: Caller | None, context: ssl.SSLContext | None, key: str | None) -> None:
        stream: socket.socket = connection
        try:
            if context is not None:
                connection.settimeout(HANDSHAKE_TIMEOUT)
                stream = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    self._connections.discard(connection)
                    self._connections.add(stream)
                assert isinstance(stream, ssl.SSLSocket)
                stream.do_handshake()
                tls = self._config.tls
                assert tls is not None
                caller = self.identity.of_certificate(stream.getpeercert(), tls.controllers)
                if key is not None:
                    self._leave(key)
                key = self._enter(caller) if caller is not None else None
            if caller is not None and key is not None:
                Exchange(stream, caller, self._api, self._manager.images, self.identity).run()
        except (OSError, ssl.SSLError) as error:
            log.debug("Connection of %s: %s", key, error)
        except Exception:
            log.exception("Error in a connection of %s:", key)
        finally:
            with contextlib.suppress(OSError):
                stream.close()
            if key is not None:
                self._leave(key)
            with self._lock:
                self._forget(connection, caller)
                self._connections.discard(stream)
                self._threads.discard(threading.current_thread())

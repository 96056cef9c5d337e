"""The API over Unix socket, loopback, slivers' own networks and TLS (NM-A.8, NM-C.5)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from nodepool.base import unix_socket
from nodepool.base.tls import TlsContext
from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager.api import delegates
from nodepool.nodemanager.api.connections import Connections
from nodepool.nodemanager.api.exchange import Desk
from nodepool.nodemanager.api.identity import Identity
from nodepool.nodemanager.api.listener import Listener, Peer
from nodepool.nodemanager.api.methods import CONTROLLER, OTHER, SLIVER, Api, Caller
from nodepool.nodemanager.api.programs import Programs
from nodepool.nodemanager.backends.base import Backend
from nodepool.nodemanager.config import API_SERVER_PORT, NodeManagerConfig
from nodepool.nodemanager.eventloop import listen
from nodepool.nodemanager.records import records
from nodepool.nodemanager.records.database import Database
from nodepool.nodemanager.rootfs.uploaded import Images

log = logging.getLogger("nodepool.nodemanager.server")

STOP_TIMEOUT = 5.0
SOCKET_NAME = "nodemanager.api"


class Servers:
    """Listening sockets, and the owners of their connections.

    :param sliver_of_uid: returns the sliver that a user id of the host belongs to.
    :param programs: runs the programs of calls; started and stopped here.
    """

    def __init__(
        self,
        api: Api,
        config: NodeManagerConfig,
        backend: Backend,
        database: Database,
        images: Images,
        sliver_of_uid: Callable[[int], str | None],
        programs: Programs,
    ) -> None:
        self._config = config
        self._backend = backend
        self._database = database
        self.identity = Identity(
            sliver_of_uid,
            self._delegate_methods,
            controllers=config.api.controller_uids,
            delegate_shell=delegates.forward_program()
            if config.delegate_accounts == "unix"
            else None,
        )
        self.programs = programs
        self.connections = Connections(
            Desk(api, images, self.identity), self._of_certificate, self.programs.begin
        )
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        #: Listener inside, and the process 1 that it belongs to.
        self._slivers: dict[str, tuple[Listener, tuple[Any, ...]]] = {}
        #: Listener of the sliver's own socket, and the directory of the socket.
        self._own: dict[str, tuple[Listener, str]] = {}
        self._socket_files: dict[str, tuple[int, int]] = {}
        #: Port of the TLS server if any free one was to be used.
        self.tls_port = 0
        self.tcp_port = 0

    def _delegate_methods(self, name: str) -> Collection[str] | None:
        record = self._database.get(records.record_key(records.DELEGATE, name))
        return None if record is None else record.content.get("methods") or ()

    # -- life

    def start(self) -> None:
        """Listen on all configured addresses.

        :raises ConfigurationError: an address cannot be used; the text names it and the remedy.
        """
        config, loop = self._config, self.connections.loop
        try:
            if config.api.unix:
                self._add(Listener(self._unix(config.api.unix), loop, self._of_unix))
            if config.api.old_unix and config.api.unix:
                self._link(config.api.unix, config.api.old_unix)
            if config.api.tcp >= 0:
                listener = self._tcp("127.0.0.1", config.api.tcp, "api.tcp")
                self.tcp_port = listener.getsockname()[1]
                self._add(Listener(listener, loop, self._of_tcp))
            if config.api.tls is not None:
                context = self._context()
                listener = self._tcp(config.api.tls.address, config.api.tls.port, "api.tls.port")
                self.tls_port = listener.getsockname()[1]
                self._add(Listener(listener, loop, lambda connection: None, context))
        except BaseException:
            for place in self._listeners:
                place.socket.close()
            self._listeners.clear()
            self._unlink()
            raise
        self.programs.start()
        self.connections.start()
        try:
            self.tidy()
        except OSError as error:
            log.warning("Unused sockets cannot be removed, retrying in a minute: %s", error)

    def stop(self) -> None:
        """Close all; calls that wait are cut off."""
        self.connections.stop(STOP_TIMEOUT)
        self.programs.stop(STOP_TIMEOUT)
        with self._lock:
            places = self._listeners + [
                listener for listener, _ in (*self._slivers.values(), *self._own.values())
            ]
            self._listeners, self._slivers, self._own = [], {}, {}
        for place in places:
            place.socket.close()
        self._unlink()

    def _add(self, listener: Listener) -> None:
        self._listeners.append(listener)
        self.connections.add(listener)

    def _unlink(self) -> None:
        """Remove the sockets, unless another node manager has put its own there meanwhile."""
        for path, known in self._socket_files.items():
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if (status.st_dev, status.st_ino) == known:
                    os.unlink(path)
        old = self._config.api.old_unix
        with contextlib.suppress(OSError):
            if old and self._socket_files and os.readlink(old) == self._config.api.unix:
                os.unlink(old)

    # -- identity

    def _peer(self, uid: int, trust: bool) -> Peer:
        found = self.identity.trusted(uid) if trust else None
        if found is not None:
            return Peer(str(found), found.kind, lambda: found)
        number = (uid - self._config.id_base) // 65536
        key = (SLIVER, number) if 0 < number <= self._config.max_slivers else ("uid", uid)
        return Peer(key, OTHER, lambda: self.identity.of_uid(uid, trust))

    def _of_unix(self, connection: socket.socket, trust: bool = True) -> Peer:
        return self._peer(unix_socket.peer_uid(connection), trust)

    def _of_tcp(self, connection: socket.socket) -> Peer | None:
        uid = self.identity.tcp_uid(connection)
        return None if uid is None else self._peer(uid, trust=False)

    def _of_certificate(self, connection: ssl.SSLSocket) -> Peer | None:
        assert self._config.api.tls is not None
        caller = self.identity.of_certificate(
            connection.getpeercert(), self._config.api.tls.controllers
        )
        kind = CONTROLLER if caller is not None and caller.kind == CONTROLLER else OTHER
        return None if caller is None else Peer(str(caller), kind, lambda: caller)

    # -- places

    def _unix(self, path: str) -> socket.socket:
        try:
            listener = unix_socket.listen(path, "node manager")
            status = os.lstat(path)
        except OSError as error:
            raise ConfigurationError(f"api.unix: {error}") from error
        self._socket_files[path] = status.st_dev, status.st_ino
        return listener

    @staticmethod
    def _link(path: str, old: str) -> None:
        """Create the link at the path that programs of the original use."""
        try:
            if not os.path.islink(old) and os.path.lexists(old):
                log.warning("api.old-unix: %s exists and is not a link; leaving it unchanged", old)
                return
            # Anybody may write to /tmp: use a new name that cannot be guessed.
            temporary = f"{old}.{secrets.token_hex(8)}"
            os.symlink(path, temporary)
            try:
                os.replace(temporary, old)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            log.warning("api.old-unix: cannot create the link %s: %s", old, error.strerror)

    @staticmethod
    def _tcp(address: str, port: int, option: str) -> socket.socket:
        try:
            return listen(address, port)
        except OSError as error:
            advice = "; choose another port, or false for none" if option == "api.tcp" else ""
            raise ConfigurationError(
                f"{option}: cannot listen on {address} port {port}: {error.strerror}{advice}"
            ) from error

    def _context(self) -> TlsContext:
        tls = self._config.api.tls
        assert tls is not None

        def load() -> ssl.SSLContext:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(tls.cert, tls.key)
            context.load_verify_locations(tls.ca)
            context.verify_mode = ssl.CERT_REQUIRED
            return context

        try:
            return TlsContext(load, tls.cert, tls.key, tls.ca)
        except OSError as error:
            raise ConfigurationError(
                f"api.tls: cannot use {tls.cert}, {tls.key} and {tls.ca}: {error}"
            ) from error

    # -- slivers

    def open_socket(self, name: str, index: int) -> str | None:
        """Return the directory with the sliver's own socket, creating it if needed.

        With its own socket no sliver can fill another's queue. It is created before the sliver,
        where it is mounted, and deleted after it.
        """
        if self._config.sliver_sockets is None:
            return None
        directory = os.path.join(self._config.sliver_sockets, str(index))
        with self._lock:
            if name in self._own:
                return directory
        path = os.path.join(directory, SOCKET_NAME)
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Slivers use it through their mount; others do not need it.
            os.makedirs(self._config.sliver_sockets, mode=0o700, exist_ok=True)
            os.makedirs(directory, mode=0o755, exist_ok=True)
            Path(path).unlink(missing_ok=True)  # of the last daemon
            unix_socket.bind(stream, path)
        except OSError as error:
            stream.close()
            log.warning(
                "Sliver %s has no socket of the API: %s: %s", name, path, error.strerror or error
            )
            return directory if os.path.isdir(directory) else None
        listener = Listener(
            stream,
            self.connections.loop,
            functools.partial(self._of_unix, trust=False),
            slivers=True,
            whose=(SLIVER, index),
        )
        with self._lock:
            self._own[name] = listener, directory
        self.connections.add(listener)
        return directory

    def close_socket(self, name: str) -> None:
        """Close the socket of a deleted sliver."""
        with self._lock:
            listener, directory = self._own.pop(name, (None, ""))
        if listener is not None:
            self.connections.remove(listener)
            self._remove_directory(directory)

    @staticmethod
    def _remove_directory(directory: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            Path(directory, SOCKET_NAME).unlink(missing_ok=True)
            os.rmdir(directory)

    def tidy(self) -> None:
        """Remove directories of sockets that a deletion has left because a crash cut it off.

        :raises OSError: one cannot be removed.
        """
        root = self._config.sliver_sockets
        if root is None or not os.path.isdir(root):
            return
        found = os.listdir(root)  # before reading the used ones: a new sliver has its number first
        with self._lock:
            used = {os.path.basename(directory) for _, directory in self._own.values()}
        used |= {str(local.get("index")) for local in self._database.locals().values()}
        for name in found:
            if name not in used:
                self._remove_directory(os.path.join(root, name))

    def sliver_changed(self, name: str, handle: dict[str, Any] | None) -> None:
        """Start or stop the API in the sliver's own network after it was started or stopped."""
        life = (handle.get("pid"), handle.get("start_time")) if handle is not None else ()
        with self._lock:
            known = self._slivers.get(name)
            if known is not None and known[1] == life:
                return
            self._slivers.pop(name, None)
        if known is not None:
            self.connections.remove(known[0])  # its network is deleted, or will be
        listen = getattr(self._backend, "listen", None)
        if handle is None or listen is None or self._config.api.tcp < 0:
            return
        try:
            stream = socket.socket(fileno=listen(handle, API_SERVER_PORT))
        except Exception as error:
            log.warning("Sliver %s has no API on port %s: %s", name, API_SERVER_PORT, error)
            return
        # The network namespace is the identity: only this sliver is in it.
        caller = Caller(SLIVER, name)
        peer = Peer((SLIVER, handle.get("index", name)), OTHER, lambda: caller)
        listener = Listener(
            stream, self.connections.loop, lambda _connection: peer, slivers=True, whose=peer.key
        )
        with self._lock:
            self._slivers[name] = listener, life
        self.connections.add(listener)

    def cut_off(self, name: str) -> None:
        """Cancel the requests of an ended sliver: its name and ids may be given to another."""
        local = self._database.local(records.record_key(records.SLIVER, name))
        self.connections.cut_off((SLIVER, local.get("index", name)))

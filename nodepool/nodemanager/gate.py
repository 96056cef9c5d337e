"""Lets SSH connections in: a port per sliver, a server inside the sliver for each connection (nodemanager.md C.4).

No server idles; what a connection costs is charged to its sliver.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from nodepool.nodemanager.backends.base import BackendError, Handle, Spawned

log = logging.getLogger("nodepool.nodemanager.gate")

BACKLOG = 64
SPAWNERS = 4
#: Connections waiting for their server, of all slivers; more are closed at once.
MAX_WAITING = 256

Serve = Callable[[Handle, int], Spawned]


@dataclass
class _Door:
    name: str
    listener: socket.socket
    handle: Handle
    #: Servers that run, by their pidfd.
    sessions: dict[int, Spawned] = field(default_factory=dict)
    starting: int = 0


class Gate:
    """One thread that accepts, a few that start servers.

    :param serve: starts the server of a connection (its descriptor) inside a sliver.
    :param limit: connections at one time per sliver.
    """

    def __init__(self, address: str, first_port: int, last_port: int, serve: Serve, limit: int) -> None:
        self._address = address
        self._ports = first_port, last_port
        self._serve = serve
        self._limit = limit
        self._lock = threading.Lock()
        self._doors: dict[str, _Door] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="Thread-nm-gate", daemon=True)
        self._spawners = ThreadPoolExecutor(SPAWNERS, thread_name_prefix="Thread-nm-ssh")
        self._waiting = 0
        self._running = True

    def port(self, index: int) -> int:
        """The port of the sliver with this number (from 1).

        :raises BackendError: the range is too small.
        """
        port = self._ports[0] + index - 1
        if port > self._ports[1]:
            raise BackendError(f"ssh.ports: the range {self._ports[0]}-{self._ports[1]} has no port for sliver number {index}")
        return port

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the doors; sessions go on."""
        self._running = False
        os.write(self._wake_write, b"x")
        self._thread.join(5)
        for name in list(self._doors):
            self.close(name)
        self._spawners.shutdown(wait=True, cancel_futures=True)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def open(self, name: str, index: int, handle: Handle) -> None:
        """Let connections in; repeated calls change the handle only.

        :raises BackendError: the port cannot be had.
        """
        with self._lock:
            door = self._doors.get(name)
            if door is not None:
                door.handle = handle
                return
            port = self.port(index)
            try:
                listener = self._listener(port)
            except OSError as error:
                raise BackendError(f"cannot listen on {self._address} port {port} for {name}: {error.strerror}", True) from error
            door = self._doors[name] = _Door(name, listener, handle)
            self._selector.register(listener, selectors.EVENT_READ, door)
        self._wake()

    def _listener(self, port: int) -> socket.socket:
        listener = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind((self._address, port))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def free(self, index: int) -> bool:
        """Whether the port of this number can be had; another program may have it."""
        try:
            self._listener(self.port(index)).close()
        except OSError as error:
            log.warning("Number %s is left out: port %s of %s is not free: %s", index, self.port(index), self._address,
                        error.strerror)
            return False
        return True

    def close(self, name: str) -> None:
        """Let nobody in any more."""
        with self._lock:
            door = self._doors.pop(name, None)
            if door is None:
                return
            self._selector.unregister(door.listener)
            door.listener.close()
            for pidfd, session in door.sessions.items():
                self._selector.unregister(pidfd)
                session.close()
            door.sessions.clear()

    def sessions(self, name: str) -> int:
        with self._lock:
            door = self._doors.get(name)
            return len(door.sessions) if door is not None else 0

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass

    def _run(self) -> None:
        while self._running:
            for key, _ in self._selector.select():
                if key.data is None:
                    try:
                        os.read(self._wake_read, 4096)
                    except BlockingIOError:
                        pass
                elif key.fileobj is key.data.listener:
                    self._accept(key.data)
                else:
                    self._ended(key.data, key.fd)

    def _accept(self, door: _Door) -> None:
        try:
            connection, peer = door.listener.accept()
        except OSError:
            return  # gone again, or the door was closed
        with self._lock:
            full = len(door.sessions) + door.starting >= self._limit or self._waiting >= MAX_WAITING
            if not full:
                door.starting += 1
                self._waiting += 1
        if full:
            log.warning("Connection of %s to %s refused: %s sessions", peer[0], door.name, self._limit)
            connection.close()
            return
        try:
            self._spawners.submit(self._begin, door, connection)
        except RuntimeError:  # stopping
            connection.close()

    def _begin(self, door: _Door, connection: socket.socket) -> None:
        session: Spawned | None = None
        try:
            connection.setblocking(True)
            session = self._serve(door.handle, connection.fileno())
        except (BackendError, OSError) as error:
            log.error("Cannot serve a connection to %s: %s", door.name, error)
        except Exception:
            log.exception("Cannot serve a connection to %s:", door.name)
        finally:
            connection.close()
            with self._lock:
                self._waiting -= 1
                door.starting -= 1
                if session is not None:
                    if self._doors.get(door.name) is door:
                        door.sessions[session.pidfd] = session
                        self._selector.register(session.pidfd, selectors.EVENT_READ, door)
                    else:
                        session.close()
        self._wake()

    def _ended(self, door: _Door, pidfd: int) -> None:
        with self._lock:
            session = door.sessions.pop(pidfd, None)
            if session is None:
                return
            self._selector.unregister(pidfd)
        try:
            session.wait(0)
        finally:
            session.close()




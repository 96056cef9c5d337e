"""Accepts SSH connections: a port per sliver, an sshd inside per connection (NM-C.4).

No idle servers; the cost of a connection is charged to its sliver.  One thread does all of the work and never blocks: a sliver
whose servers start slowly, because it is busy or hostile, delays only its own connections.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nodepool.nodemanager.backends.base import Handle
from nodepool.nodemanager.bucket import Bucket
from nodepool.nodemanager.helper.zygote import Pending, SpawnedProcess
from nodepool.nodemanager.outcomes import BackendError

log = logging.getLogger("nodepool.nodemanager.gate")

BACKLOG = 64
#: Servers of one sliver that are started in parallel: the host pays for the workers that start them.
MAX_STARTING = 2
#: Connections to one sliver that are accepted per second, also those that are then refused, and how many may be saved up; more
#: wait in the kernel.
PACE, SAVED = 10.0, 20.0
#: Seconds to wait when the process has no descriptor left.
SHORTAGE_WAIT = 0.1
#: Seconds between two log lines about refused connections to the same sliver.
TELL_INTERVAL = 60.0

Serve = Callable[[Handle, int], Pending]


@dataclass
class _Door:
    name: str
    listener: socket.socket
    handle: Handle
    #: Accepted connections in the order of arrival; no server is being started for them yet.
    waiting: deque[socket.socket] = field(default_factory=deque)
    #: By descriptor.
    starting: dict[int, Pending] = field(default_factory=dict)
    #: Servers that run, by their pidfd.
    sessions: dict[int, SpawnedProcess] = field(default_factory=dict)
    told: float = -TELL_INTERVAL
    pace: Bucket = field(default_factory=lambda: Bucket(PACE, SAVED))
    #: Time by the monotonic clock until which no connection is accepted.
    closed_until: float | None = None

    @property
    def due(self) -> float | None:
        """Time of the next action by the monotonic clock; None: never."""
        times = [each.deadline for each in self.starting.values()]
        if self.closed_until is not None:
            times.append(self.closed_until)
        return min(times, default=None)

    @property
    def connections(self) -> int:
        return len(self.waiting) + len(self.starting) + len(self.sessions)


class Gate:
    """The SSH listeners of all slivers, served by one thread.

    :param serve: starts the server of a connection (its descriptor) inside a sliver.
    :param limit: simultaneous connections per sliver.
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
        self._running = True

    def port(self, index: int) -> int:
        """Return the port of the sliver with this number (from 1).

        :raises BackendError: the range is too small.
        """
        port = self._ports[0] + index - 1
        if port > self._ports[1]:
            raise BackendError(f"ssh.ports: the range {self._ports[0]}-{self._ports[1]} has no port for sliver number {index}")
        return port

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the listeners; sessions continue."""
        self._running = False
        os.write(self._wake_write, b"x")
        self._thread.join(5)
        for name in list(self._doors):
            self.close(name)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def open(self, name: str, index: int, handle: Handle) -> None:
        """Let connections in; repeated calls change the handle only.

        :raises BackendError: the port is not available.
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
        """Return whether the port of this number is available; another program may use it."""
        try:
            self._listener(self.port(index)).close()
        except OSError as error:
            log.warning(
                "Sliver index %s is skipped: SSH port %s of %s is in use: %s",
                index,
                self.port(index),
                self._address,
                error.strerror,
            )
            return False
        return True

    def close(self, name: str) -> None:
        """Accept no more logins."""
        with self._lock:
            door = self._doors.pop(name, None)
            if door is None:
                return
            if door.closed_until is None:
                self._selector.unregister(door.listener)
            door.listener.close()
            for connection in door.waiting:
                connection.close()
            for held in (door.starting, door.sessions):
                for descriptor, process in held.items():
                    self._selector.unregister(descriptor)
                    process.close()
                held.clear()

    def sessions(self, name: str) -> int:
        with self._lock:
            door = self._doors.get(name)
            return len(door.sessions) if door is not None else 0

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._running:
            for key, _ in self._selector.select(self._patience()):
                try:
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    else:
                        self._look_at(key.data, key.fd)
                except Exception:
                    log.exception("Error about a connection to a sliver:")
            try:
                self._on_time()
            except Exception:
                log.exception("Error about connections to slivers:")

    def _patience(self) -> float | None:
        """Return seconds until a starting server is late, or a door opens again."""
        with self._lock:
            times = [due for door in self._doors.values() if (due := door.due) is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _on_time(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [
                (door, descriptor)
                for door in self._doors.values()
                for descriptor, each in door.starting.items()
                if each.deadline <= now
            ]
            for door in self._doors.values():
                if door.closed_until is not None and door.closed_until <= now:
                    door.closed_until = None
                    self._selector.register(door.listener, selectors.EVENT_READ, door)
        for door, descriptor in late:
            self._look_at(door, descriptor)

    def _look_at(self, door: _Door, descriptor: int) -> None:
        with self._lock:
            if self._doors.get(door.name) is not door:
                return
            if descriptor in door.starting:
                self._started(door, descriptor)
            elif descriptor in door.sessions:
                self._selector.unregister(descriptor)
                session = door.sessions.pop(descriptor)
                session.wait(0)
                session.close()
            elif descriptor == door.listener.fileno() and door.closed_until is None:
                self._accept(door)
            while door.waiting and len(door.starting) < MAX_STARTING:
                self._begin(door, door.waiting.popleft())

    def _accept(self, door: _Door) -> None:
        try:
            connection, peer = door.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                # The listener stays ready: without a pause this would be a busy loop.
                log.error("Connections to slivers are delayed: %s", error.strerror)
                poll = select.poll()
                poll.register(self._wake_read, select.POLLIN)
                poll.poll(SHORTAGE_WAIT * 1000)
            return  # or the client is gone
        door.pace.use(1)
        if wait := door.pace.wait():
            door.closed_until = time.monotonic() + wait
            self._selector.unregister(door.listener)
        if door.connections < self._limit:
            door.waiting.append(connection)
            return
        connection.close()
        if time.monotonic() >= door.told + TELL_INTERVAL:
            door.told = time.monotonic()
            log.warning("Connection of %s to %s refused: %s sessions", peer[0], door.name, self._limit)

    def _begin(self, door: _Door, connection: socket.socket) -> None:
        with connection:
            try:
                starting = self._serve(door.handle, connection.fileno())
            except (BackendError, OSError) as error:
                log.error("Cannot serve a connection to %s: %s", door.name, error)
                return
        door.starting[starting.fileno()] = starting
        self._selector.register(starting.fileno(), selectors.EVENT_READ, door)

    def _started(self, door: _Door, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        try:
            session = door.starting.pop(descriptor).process()
        except BackendError as error:
            log.error("Cannot serve a connection to %s: %s", door.name, error)
            return
        door.sessions[session.pidfd] = session
        self._selector.register(session.pidfd, selectors.EVENT_READ, door)

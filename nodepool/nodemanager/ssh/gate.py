"""Accepts SSH connections: a port per sliver, an sshd inside per connection (NM-C.4).

No idle servers; the cost of a connection is charged to its sliver.  One thread does all of the work
and never blocks: a sliver whose servers start slowly, because it is busy or hostile, delays only
its own connections.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from nodepool.nodemanager.backends.base import Handle
from nodepool.nodemanager.bucket import Bucket
from nodepool.nodemanager.eventloop import IN, SILENCE, Acceptor, EventLoop, Watched, listen
from nodepool.nodemanager.helper.zygote import Pending, SpawnedProcess
from nodepool.nodemanager.outcomes import BackendError

log = logging.getLogger("nodepool.nodemanager.gate")

BACKLOG = 64
#: Servers of one sliver that are started in parallel: the host pays for the workers that start
#: them.
MAX_STARTING = 2
#: Connections to one sliver that are accepted per second, also those that are then refused, and how
#: many may be saved up; more wait in the kernel.
PACE, SAVED = 10.0, 20.0
#: Seconds for the thread to close a listener or to end.
CLOSE_TIMEOUT = 5.0

Serve = Callable[[Handle, int], Pending]


class _Door(Acceptor):
    """The listener of one sliver and its connections; used by the loop's thread only."""

    backlog = BACKLOG
    what = "Connections to slivers"

    def __init__(
        self,
        name: str,
        stream: socket.socket,
        loop: EventLoop,
        handle: Handle,
        serve: Serve,
        limit: int,
    ) -> None:
        super().__init__(stream, loop)
        self._name = name
        self.handle = handle
        self._serve = serve
        self._limit = limit
        #: Accepted connections in the order of arrival; no server is being started for them yet.
        self._waiting: deque[socket.socket] = deque()
        #: By descriptor.
        self._starting: dict[int, tuple[Watched, Pending]] = {}
        #: Servers that run, by their pidfd.
        self.sessions: dict[int, tuple[Watched, SpawnedProcess]] = {}
        self._refused = -SILENCE
        self._pace = Bucket(PACE, SAVED)

    def accepted(self, stream: socket.socket, address: tuple[str, int], begun: float) -> float:
        if len(self._waiting) + len(self._starting) + len(self.sessions) < self._limit:
            self._waiting.append(stream)
            self._begin()
        else:
            stream.close()
            if time.monotonic() >= self._refused + SILENCE:
                self._refused = time.monotonic()
                log.warning(
                    "Connection of %s to %s refused: %s sessions",
                    address[0],
                    self._name,
                    self._limit,
                )
        self._pace.use(1)
        return self._pace.wait()

    def _begin(self) -> None:
        """Start servers for waiting connections."""
        while self._waiting and len(self._starting) < MAX_STARTING:
            with self._waiting.popleft() as connection:
                try:
                    pending = self._serve(self.handle, connection.fileno())
                except (BackendError, OSError) as error:
                    log.error("Cannot serve a connection to %s: %s", self._name, error)
                    continue
            started = functools.partial(self._started, pending.fileno())
            watched = Watched(pending.fileno(), started, started)
            self._starting[watched.number] = watched, pending
            self._loop.watch(watched, IN)
            self._loop.at(watched, pending.deadline)

    def _started(self, number: int) -> None:
        watched, pending = self._starting.pop(number)
        self._forget(watched)
        try:
            session = pending.process()
        except BackendError as error:
            log.error("Cannot serve a connection to %s: %s", self._name, error)
        else:
            watched = Watched(session.pidfd, functools.partial(self._ended, session.pidfd))
            self.sessions[watched.number] = watched, session
            self._loop.watch(watched, IN)
        self._begin()

    def _ended(self, number: int) -> None:
        watched, session = self.sessions.pop(number)
        self._forget(watched)
        session.wait(0)
        session.close()

    def _forget(self, watched: Watched) -> None:
        self._loop.watch(watched, None)
        self._loop.at(watched, None)

    def end(self) -> None:
        """Accept no more, and drop what is waiting; sessions continue."""
        super().end()
        for connection in self._waiting:
            connection.close()
        self._waiting.clear()
        for held in (self._starting, self.sessions):
            for watched, process in held.values():
                self._forget(watched)
                process.close()
            held.clear()


class Gate:
    """The SSH listeners of all slivers, served by one thread.

    :param serve: starts the server of a connection (its descriptor) inside a sliver.
    :param limit: simultaneous connections per sliver.
    """

    def __init__(
        self, address: str, first_port: int, last_port: int, serve: Serve, limit: int
    ) -> None:
        self._address = address
        self._ports = first_port, last_port
        self._serve = serve
        self._limit = limit
        self._doors: dict[str, _Door] = {}
        self._loop = EventLoop("Thread-nm-gate")

    def port(self, index: int) -> int:
        """Return the port of the sliver with this number (from 1).

        :raises BackendError: the range is too small.
        """
        port = self._ports[0] + index - 1
        if port > self._ports[1]:
            raise BackendError(
                f"ssh.ports: the range {self._ports[0]}-{self._ports[1]} has no port for sliver "
                f"number {index}"
            )
        return port

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        """Close the listeners; sessions continue."""
        if self._loop.stop(CLOSE_TIMEOUT):
            for name in list(self._doors):
                self._doors.pop(name).end()
            self._loop.close()

    def open(self, name: str, index: int, handle: Handle) -> None:
        """Let connections in; repeated calls change the handle only.

        :raises BackendError: the port is not available.
        """
        door = self._doors.get(name)
        if door is not None:
            door.handle = handle
            return
        port = self.port(index)
        try:
            listener = listen(self._address, port, BACKLOG)
        except OSError as error:
            raise BackendError(
                f"cannot listen on {self._address} port {port} for {name}: {error.strerror}",
                retry=True,
            ) from error
        door = self._doors[name] = _Door(
            name, listener, self._loop, handle, self._serve, self._limit
        )
        self._loop.post(door.start)

    def free(self, index: int) -> bool:
        """Return whether the port of this number is available; another program may use it."""
        try:
            listen(self._address, self.port(index), BACKLOG).close()
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
        """Accept no more logins; return when the port is free for another sliver."""
        door = self._doors.pop(name, None)
        if door is None:
            return
        closed = threading.Event()

        def end() -> None:
            try:
                door.end()
            finally:
                closed.set()

        self._loop.post(end)
        closed.wait(CLOSE_TIMEOUT)

    def sessions(self, name: str) -> int:
        door = self._doors.get(name)
        return len(door.sessions) if door is not None else 0

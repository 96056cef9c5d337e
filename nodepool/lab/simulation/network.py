"""Sockets, pipes and ``poll`` on a simulated network.

A connection has two ends. Bytes arrive in order after the latency of the network. Faults are
applied to a connection: it can be cut, stalled (nothing arrives until it is resumed) and muted (one
direction is silent for good).
"""

from __future__ import annotations

import errno
import io
import itertools
import select
import socket
from collections.abc import Callable, Iterable
from typing import Any

from nodepool.lab.simulation.kernel import Kernel, Process, Task, current

#: Descriptors of simulated files start here, far above those of real ones.
FIRST_DESCRIPTOR = 1_000_000

Address = tuple[str, int]


class File:
    """What `poll` can wait for."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.descriptor = files.add(self)
        self.received = bytearray()
        #: The other side sends nothing more.
        self.ended = False
        #: What reading raises once everything has been read.
        self.broken: OSError | None = None
        self.closed = False
        self.watchers: dict[Task, None] = {}

    def events(self) -> int:
        if self.broken is not None:
            return int(select.POLLIN | select.POLLOUT | select.POLLERR | select.POLLHUP)
        return int(select.POLLOUT | (select.POLLIN if self.received or self.ended else 0))

    def changed(self) -> None:
        kernel = current()
        for task in list(self.watchers):
            kernel.wake(task)

    def deliver(self, data: bytes | bytearray) -> None:
        if not self.closed:
            self.received += data
            self.changed()

    def end(self, error: OSError | None = None) -> None:
        self.ended, self.broken = True, error
        self.changed()

    def read(self, size: int) -> bytes:
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self.received:
            data = bytes(self.received[:size])
            del self.received[:size]
            return data
        if self.broken is not None:
            raise self.broken
        if self.ended:
            return b""
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._files.remove(self)
            self.changed()


def wait_for(files: Iterable[tuple[File, int]], deadline: float | None) -> list[tuple[int, int]]:
    """Wait until a file has an event of its mask; return descriptors with their events."""
    kernel = current()
    kernel.point()
    files = list(files)
    while True:
        found = [
            (file.descriptor, file.events() & (mask | select.POLLERR | select.POLLHUP))
            for file, mask in files
        ]
        found = [(descriptor, events) for descriptor, events in found if events]
        if found or (deadline is not None and deadline <= kernel.now):
            return found
        task = kernel.task
        assert task is not None
        for file, _mask in files:
            file.watchers[task] = None
        woken = kernel.park(deadline)
        for file, _mask in files:
            file.watchers.pop(task, None)
        if not woken and deadline is None:
            return []


class Files:
    """The open files of the simulation by descriptor."""

    def __init__(self) -> None:
        self._numbers = itertools.count(FIRST_DESCRIPTOR)
        self.open: dict[int, File] = {}

    def add(self, file: File) -> int:
        number = next(self._numbers)
        self.open[number] = file
        return number

    def remove(self, file: File) -> None:
        self.open.pop(file.descriptor, None)

    def socket(self, descriptor: int) -> Socket:
        """Return the socket of a descriptor.

        :raises OSError: it is closed.
        """
        found = self.open.get(descriptor)
        if not isinstance(found, Socket):
            raise OSError(errno.EBADF, "Bad file descriptor")
        return found


class Socket(File):
    """The client's end of a connection, or either end of a pair."""

    def __init__(
        self, files: Files, send: Callable[[bytes], None], hang_up: Callable[[], None]
    ) -> None:
        super().__init__(files)
        self._send = send
        self._hang_up = hang_up
        self._timeout: float | None = None
        self._process = current().running_process
        self._process.at_exit[self.close] = None

    def fileno(self) -> int:
        return -1 if self.closed else self.descriptor

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setsockopt(self, *_arguments: object) -> None:
        pass

    def recv(self, size: int, _flags: int = 0) -> bytes:
        if self._timeout != 0:
            deadline = None if self._timeout is None else current().now + self._timeout
            if not wait_for([(self, select.POLLIN)], deadline):
                raise TimeoutError("timed out")
        return self.read(size)

    def makefile(self, _mode: str = "rb") -> io.BufferedReader:
        return io.BufferedReader(_Reader(self))

    def shutdown(self, _how: int) -> None:
        self.end()

    def sendall(self, data: bytes, _flags: int = 0) -> None:
        self.send(data)

    def send(self, data: bytes, _flags: int = 0) -> int:
        current().point()
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self.broken is not None:
            raise self.broken
        self._send(bytes(data))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._process.at_exit.pop(self.close, None)
            self._hang_up()


class _Reader(io.RawIOBase):
    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        data = self._socket.recv(len(target))
        target[: len(data)] = data
        return len(data)


class SimulatedConnection:
    """Between a client and a service.

    :param receive: called with data that have arrived at the service.
    :param lost: called when the service's end has broken.
    """

    def __init__(self, network: Network, client: Process, address: Address) -> None:
        self.network = network
        self.client = client
        self.address = address
        self.receive: Callable[[bytes], None] = lambda _data: None
        self.lost: Callable[[], None] = lambda: None
        self.socket = Socket(network.files, self._to_service, self._client_closed)
        self.open = True
        self._last = {"service": 0.0, "client": 0.0}
        #: Bytes that arrive next, at the time of ``_last``; more may be added.
        self._joined: dict[str, bytearray | None] = {"service": None, "client": None}

    # -- delivery

    def _later(self, side: str, what: Any) -> None:
        """Deliver in order, after the latency; what arrives at the same time arrives together."""
        kernel = self.network.kernel
        when = max(self._last[side], kernel.now + self.network.latency())
        joined = self._joined[side]
        if isinstance(what, bytes):
            if joined is not None and when == self._last[side]:
                joined += what
                return
            what = joined = bytearray(what)
        else:
            joined = None
        self._joined[side] = joined
        self._last[side] = when
        kernel.call_at(when, lambda: self._arrive(side, what))

    def _arrive(self, side: str, what: Any) -> None:
        if what is self._joined[side]:
            self._joined[side] = None
        if side == "service":
            if what is None:
                self._service_lost()
            elif self.open:
                self.receive(bytes(what))
        elif isinstance(what, bytearray):
            self.socket.deliver(what)
        else:
            self.socket.end(what)

    def _to_service(self, data: bytes) -> None:
        self._later("service", data)

    def _client_closed(self) -> None:
        self._later("service", None)

    def _service_lost(self) -> None:
        if self.open:
            self.open = False
            self.network.connections.pop(self, None)
            self.lost()

    # -- what the service does

    def write(self, data: bytes) -> None:
        self._later("client", bytes(data))

    def hang_up(self) -> None:
        self.open = False
        self.network.connections.pop(self, None)
        self._later("client", None)


class Network:
    """All connections between processes.

    :param shortest: seconds that a message takes at least.
    :param mean: seconds that it takes longer, on average.
    """

    connection_class = SimulatedConnection

    def __init__(self, kernel: Kernel, shortest: float = 0.0002, mean: float = 0.001) -> None:
        self.kernel = kernel
        self.files = Files()
        self._shortest = shortest
        self._mean = mean
        self._services: dict[Address, Callable[[SimulatedConnection], None]] = {}
        self.connections: dict[SimulatedConnection, None] = {}

    def latency(self) -> float:
        return self._shortest + (
            self.kernel.random.expovariate(1 / self._mean) if self._mean else 0.0
        )

    def serve(self, address: Address, accept: Callable[[SimulatedConnection], None]) -> None:
        self._services[address] = accept

    # -- the functions of the standard library

    def create_connection(
        self, address: Address, timeout: float | None = None, *_more: object, **_named: object
    ) -> Socket:
        kernel, process = self.kernel, self.kernel.running_process
        kernel.sleep(2 * self.latency())
        accept = self._services.get((address[0], address[1]))
        if accept is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        connection = self.connection_class(self, process, address)
        self.connections[connection] = None
        accept(connection)
        return connection.socket

    def socketpair(self, *_arguments: object) -> tuple[Socket, Socket]:
        ends: list[Socket] = []
        ends.append(Socket(self.files, lambda data: ends[1].deliver(data), lambda: ends[1].end()))
        ends.append(Socket(self.files, lambda data: ends[0].deliver(data), lambda: ends[0].end()))
        return ends[0], ends[1]

    def pipe(self) -> tuple[int, int]:
        reading, writing = self.socketpair()
        return reading.descriptor, writing.descriptor

    @staticmethod
    def getaddrinfo(
        host: str, port: int, *_arguments: object, **_named: object
    ) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]


class Poll:
    """As ``select.poll``.

    Real descriptors never have events: nothing outside of the simulation happens in it.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._registered: dict[int, int] = {}

    def register(
        self, file: Any, mask: int = select.POLLIN | select.POLLOUT | select.POLLPRI
    ) -> None:
        self._registered[file if isinstance(file, int) else file.fileno()] = mask

    def unregister(self, file: Any) -> None:
        del self._registered[file if isinstance(file, int) else file.fileno()]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """Wait for events.

        :param timeout: in ms.
        """
        deadline = None if timeout is None or timeout < 0 else current().now + timeout / 1000
        opened = self._network.files.open
        gone = [
            (number, select.POLLNVAL)
            for number in self._registered
            if number >= FIRST_DESCRIPTOR and number not in opened
        ]
        if gone:
            return gone
        return wait_for(
            [
                (opened[number], mask)
                for number, mask in self._registered.items()
                if number in opened
            ],
            deadline,
        )

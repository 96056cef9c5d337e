"""The SSH gate: listeners of slivers, without slivers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.outcomes import BackendError
from nodepool.nodemanager.ssh import gate as ssh_gate
from nodepool.nodemanager.ssh.gate import MAX_STARTING, Gate
from tests.conftest import wait_for
from tests.support.ports import reserve

LIMIT = 5


class Server:
    """A server that starts when its pipe is written to, and ends when its other pipe is."""

    def __init__(self, connection: int, patience: float) -> None:
        self.connection = socket.socket(fileno=os.dup(connection))
        self.starting, self.start = os.pipe()
        self.pidfd, self.stop = os.pipe()
        self.deadline = time.monotonic() + patience
        self.closed = False

    def fileno(self) -> int:
        return self.starting

    def process(self) -> Server:
        return self

    def wait(self, timeout: float) -> None:
        """Nobody asks how it ended."""

    def close(self) -> None:
        self.closed = True
        self.connection.close()


class Bench:
    def __init__(self) -> None:
        self.port = reserve(1)
        self.clients: list[socket.socket] = []
        self.servers: list[Server] = []
        self.patience = 60.0
        self.gate = Gate("127.0.0.1", self.port, self.port, self.serve, LIMIT)

    def serve(self, handle: dict[str, Any], connection: int) -> Server:
        if "broken" in handle:
            raise BackendError("broken")
        self.servers.append(Server(connection, self.patience))
        return self.servers[-1]

    def connect(self) -> socket.socket:
        self.clients.append(socket.create_connection(("127.0.0.1", self.port), 5))
        return self.clients[-1]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.gate.start()
    made.gate.open("s1", 1, {})
    yield made
    made.gate.stop()
    for client in made.clients:
        client.close()
    for server in made.servers:
        assert server.closed
        for descriptor in (server.starting, server.start, server.pidfd, server.stop):
            os.close(descriptor)


def begun(bench: Bench, number: int) -> list[Server]:
    wait_for(lambda: len(bench.servers) == number, 5, f"{number} servers are being started")
    return bench.servers


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_few_servers_of_a_sliver_start_in_parallel(bench: Bench) -> None:
    clients = [bench.connect() for _ in range(LIMIT + 1)]
    assert closed(clients[-1]), "the gate has seen all others"
    assert len(bench.servers) == MAX_STARTING
    os.write(bench.servers[0].start, b"x")
    begun(bench, MAX_STARTING + 1)
    wait_for(lambda: bench.gate.sessions("s1") == 1, 5, "a session")
    os.write(bench.servers[0].stop, b"x")
    wait_for(lambda: bench.gate.sessions("s1") == 0 and bench.servers[0].closed, 5, "its end")


def test_connections_above_the_limit_are_refused(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [bench.connect() for _ in range(LIMIT + 1)]
    assert closed(clients[-1])
    wait_for(lambda: f"refused: {LIMIT} sessions" in caplog.text, 5, "the reason")


def test_frequent_connections_wait_in_the_kernel(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.gate.close("s1")
    monkeypatch.setattr(ssh_gate, "PACE", 0.01)
    monkeypatch.setattr(ssh_gate, "SAVED", 2.0)
    bench.gate.open("s1", 1, {"broken": True})
    clients = [bench.connect() for _ in range(4)]
    assert closed(clients[0]) and closed(clients[1])
    clients[3].settimeout(0.3)
    with pytest.raises(TimeoutError):
        clients[3].recv(1)


def test_server_that_does_not_start_in_time_frees_its_slot(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def late(_server: Server) -> Server:
        raise BackendError("no answer")

    bench.patience = 0.2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "process", late)
        bench.connect()
        server = begun(bench, 1)[0]
        wait_for(lambda: "Cannot serve a connection to s1: no answer" in caplog.text, 5)
    server.close()
    assert bench.gate.sessions("s1") == 0


def test_closed_door_frees_port_and_connections(bench: Bench) -> None:
    for _ in range(3):
        bench.connect()
    os.write(begun(bench, MAX_STARTING)[0].start, b"x")
    wait_for(lambda: bench.gate.sessions("s1") == 1, 5, "a session")
    bench.gate.close("s1")
    assert all(server.closed for server in bench.servers)
    with pytest.raises(OSError):
        bench.connect()
    assert bench.gate.free(1)
    bench.gate.open("s2", 1, {})
    assert not bench.gate.free(1)
    assert bench.gate.sessions("s1") == 0

"""Scans of a real sshd, and of peers that misbehave."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool import exceptions, nodeutils
from nodepool.nodescan import NodescanRequest, NodescanWorker
from nodepool.nodescan.request import RETRY_DELAYS
from nodepool.nodescan.ssh import group_by_type, offered_algorithms
from nodepool.nodeutils import Attributes
from tests import REPOSITORY
from tests.support.deadline import limit
from tests.support.ports import reserve
from tests.support.sshd import SSHServer, ssh_server


@pytest.fixture(scope="module")
def sshd() -> Iterator[SSHServer]:
    with ssh_server() as server:
        yield server


@pytest.fixture
def worker() -> Iterator[NodescanWorker]:
    worker = NodescanWorker("test")
    worker.start()
    yield worker
    worker.stop()
    worker.join()
    assert worker.length() == 0


class Peer:
    """A TCP server whose behaviour is one function per connection."""

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        self.behave = behave
        self.count = 0
        self.times: list[float] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.server.getsockname()[1]
        self.open: list[socket.socket] = []
        self.thread = threading.Thread(target=self.run, name="test-peer", daemon=True)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                sock, _ = self.server.accept()
            except OSError:
                return
            self.count += 1
            self.times.append(time.monotonic())
            self.open.append(sock)
            with contextlib.suppress(OSError):
                self.behave(sock)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.thread.join(10)
        for sock in self.open:
            sock.close()


@pytest.fixture
def peer() -> Iterator[Callable[[Callable[[socket.socket], None]], Peer]]:
    peers: list[Peer] = []

    def make(behave: Callable[[socket.socket], None]) -> Peer:
        peers.append(Peer(behave))
        return peers[-1]

    yield make
    for each in peers:
        each.stop()


def target(port: int, kind: str = "ssh", ip: str = "127.0.0.1") -> Attributes:
    return Attributes(interface_ip=ip, connection_port=port, connection_type=kind)


def scan(
    worker: NodescanWorker, node: Attributes, timeout: float = 20, checking: bool = True
) -> NodescanRequest:
    done = threading.Event()
    request = NodescanRequest(node, checking, timeout, on_complete=lambda request: done.set())
    worker.addRequest(request)
    assert done.wait(timeout + 10)
    assert request.complete
    assert request.state == "complete"
    return request


@pytest.mark.spec("LAU-21.189: one key per algorithm offered by the host")
@pytest.mark.spec("DRV-14.30: nodescan success")
@pytest.mark.parametrize("kind", ["ssh", "network_cli"])
def test_every_key_once_with_one_connection_each(
    worker: NodescanWorker, sshd: SSHServer, kind: str
) -> None:
    before = sshd.connections()
    keys = scan(worker, target(sshd.port, kind)).result()
    assert sorted(keys) == sorted(sshd.host_keys)
    assert [key.split()[0] for key in keys] == [
        "ssh-ed25519",
        "ecdsa-sha2-nistp256",
        "ecdsa-sha2-nistp384",
        "ecdsa-sha2-nistp521",
        "ssh-rsa",
    ]
    assert sshd.connections() - before == 5


def test_only_the_types_the_host_has_are_asked_for(worker: NodescanWorker) -> None:
    with ssh_server(kinds=["rsa", "ecdsa384"]) as server:
        before = server.connections()
        assert sorted(scan(worker, target(server.port)).result()) == sorted(server.host_keys)
        assert server.connections() - before == 2


@pytest.mark.spec("DRV-14.22: winrm nodes have no host keys")
def test_other_connection_types_only_connect(worker: NodescanWorker, peer: Any) -> None:
    silent = peer(lambda sock: None)
    assert scan(worker, target(silent.port, "winrm")).result() == []
    _wait(lambda: silent.count == 1)


@pytest.mark.spec("DRV-7.8: host_key_checking false: complete immediately, no connection, no keys")
def test_no_checking_no_connection(peer: Any) -> None:
    silent = peer(lambda sock: None)
    worker = NodescanWorker()
    worker.start()
    request = NodescanRequest(target(silent.port), False, 10, None)
    worker.addRequest(request)
    assert request.complete
    assert request.result() == []
    assert silent.count == 0
    assert worker._thread is None, "no thread for scans that need no network"
    worker.stop()
    worker.join()


@pytest.mark.spec("DRV-7.8: an address containing fake, or FAKE, completes without network")
def test_fake_addresses_are_not_scanned(
    worker: NodescanWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scan(worker, target(22, ip="fake_v6")).result() == ["ssh-rsa FAKEKEY"]
    assert scan(worker, target(5986, "winrm", ip="fake")).result() == []
    assert nodeutils.nodescan("fake-host-1") == ["ssh-rsa FAKEKEY"]
    assert nodeutils.nodescan("fake-host-1", gather_hostkeys=False) == []
    monkeypatch.setattr(NodescanRequest, "FAKE", True)
    assert scan(worker, target(22, "network_cli", ip="192.0.2.1")).result() == ["ssh-rsa FAKEKEY"]


@pytest.mark.spec("LAU-21.194: no connect -> connection-timeout error")
def test_refused_until_timeout(worker: NodescanWorker) -> None:
    started = time.monotonic()
    request = scan(worker, target(reserve()), timeout=1)
    with pytest.raises(exceptions.ConnectionTimeoutException, match="refused"):
        request.result()
    assert 0.9 < time.monotonic() - started < limit(5)


@pytest.mark.spec("LAU-21.195: hanging handshake -> connection-timeout error")
def test_hanging_handshake_times_out(worker: NodescanWorker, peer: Any) -> None:
    silent = peer(lambda sock: None)
    with pytest.raises(exceptions.ConnectionTimeoutException):
        scan(worker, target(silent.port), timeout=1).result()
    # the connection was closed, and its thread ended
    silent.open[0].settimeout(5)
    while silent.open[0].recv(1000):
        pass
    _wait(lambda: not any(t.name.startswith("keyscan-ssh") for t in threading.enumerate()))


@pytest.mark.spec("LAU-21.196: repeated until the limit -> connection-timeout error")
@pytest.mark.spec("LAU-16: pace retries, about one a second")
def test_handshake_errors_are_retried_until_the_limit(worker: NodescanWorker, peer: Any) -> None:
    def garbage(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)

    bad = peer(garbage)
    with pytest.raises(exceptions.ConnectionTimeoutException, match="banner"):
        scan(worker, target(bad.port), timeout=3).result()
    assert 3 <= bad.count <= 8


def test_host_that_comes_up_later(worker: NodescanWorker) -> None:
    with ssh_server(kinds=["ed25519"]) as server:
        server.pause()
        done = threading.Event()
        request = NodescanRequest(
            target(server.port), True, 30, on_complete=lambda request: done.set()
        )
        worker.addRequest(request)
        _wait(lambda: request._failures > 0)
        server.restart()
        assert done.wait(10)
        assert request.result() == server.host_keys


def test_dropped_connections_do_not_lose_keys(
    worker: NodescanWorker, peer: Any, sshd: SSHServer
) -> None:
    """Busy servers (MaxStartups) drop some connections before the banner."""
    dropped = [0]

    def flaky(sock: socket.socket) -> None:
        if relay.count in (1, 3, 4):
            dropped[0] += 1
            sock.close()
            return
        threading.Thread(
            target=_relay, args=(sock, sshd.port), name="test-relay", daemon=True
        ).start()

    relay = peer(flaky)
    assert sorted(scan(worker, target(relay.port)).result()) == sorted(sshd.host_keys)
    assert dropped == [3]


@pytest.mark.spec("LAU-21.197: with the parallel limit 1 two scans both complete")
def test_waiting_scan_starts_when_another_one_ends(
    worker: NodescanWorker, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodescanWorker, "MAX_REQUESTS", 1)
    requests = [NodescanRequest(target(sshd.port), True, 20, None) for _ in range(2)]
    for request in requests:
        worker.addRequest(request)
    _wait(lambda: all(request.complete for request in requests), 20)
    for request in requests:
        assert len(request.result()) == 5


@pytest.mark.spec("LAU-16: start the clock when scanning starts")
def test_waiting_in_the_queue_is_not_on_the_clock(
    worker: NodescanWorker, peer: Any, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodescanWorker, "MAX_REQUESTS", 1)
    silent, skipped = peer(lambda sock: None), 0.0

    def clock() -> float:
        return time.monotonic() + skipped

    worker.clock = clock
    slow, queued, waking = (
        NodescanRequest(target(port), True, 60, None, clock=clock)
        for port in (silent.port, sshd.port, sshd.port)
    )
    worker.addRequest(slow)
    worker.addRequest(queued)
    _wait(lambda: slow.start_time is not None, 20)
    skipped = 61.0
    worker.addRequest(waking)
    _wait(lambda: waking.complete, 60)
    assert slow.complete
    assert len(queued.result()) == 5


@pytest.mark.spec(
    "LAU-16: at most 100 scans at a time; readiness of one scan must never depend on others"
)
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_parallel_scans_all_complete_soon(
    worker: NodescanWorker, count: int, record_property: Any
) -> None:
    with ssh_server(kinds=["ed25519", "ecdsa256"]) as server:
        started = time.monotonic()
        times: list[float] = []
        requests = [
            NodescanRequest(
                target(server.port),
                True,
                60,
                None,
                lambda request: times.append(time.monotonic() - started),
            )
            for _ in range(count)
        ]
        for request in requests:
            worker.addRequest(request)
        _wait(lambda: len(times) == count, 60)
        for request in requests:
            assert sorted(request.result()) == sorted(server.host_keys)
        record_property("slowest_seconds", max(times))
        # two connections each, about 10 ms of sshd's time per connection on a small machine
        assert max(times) < 5 + count * 0.1


def test_one_dead_host_delays_nobody(worker: NodescanWorker, peer: Any, sshd: SSHServer) -> None:
    silent = peer(lambda sock: None)
    dead = [NodescanRequest(target(silent.port), True, 30, None) for _ in range(20)]
    for request in dead:
        worker.addRequest(request)
    started = time.monotonic()
    assert len(scan(worker, target(sshd.port)).result()) == 5
    assert time.monotonic() - started < limit(5)
    for request in dead:
        worker.removeRequest(request)
    _wait(lambda: worker.length() == 0)
    assert not any(request.complete for request in dead)
    worker.removeRequest(None)


def test_event_during_a_pause_does_not_shorten_it() -> None:
    now = [0.0]
    request = NodescanRequest(target(reserve()), True, 10, clock=lambda: now[0])
    request.advance(False)
    _wait(lambda: request.advance(False) or request._failures == 1)
    for _ in range(3):
        request.advance(True)
    assert (request._failures, request.state) == (1, "connecting")
    assert request.wake_at <= RETRY_DELAYS[0]
    now[0] = RETRY_DELAYS[0]
    _wait(lambda: request.advance(False) or request._failures == 2)


def test_several_addresses_are_used_in_turn(
    worker: NodescanWorker, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        for port in (reserve(), sshd.port)
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args: both)
    assert len(scan(worker, target(sshd.port)).result()) == 5


@pytest.mark.spec("LAU-16: an empty list for SSH should count as failure")
def test_no_keys_is_a_failure(worker: NodescanWorker) -> None:
    request = NodescanRequest(target(22, ip="192.0.2.1"), True, 10, None)
    request._finish()
    with pytest.raises(exceptions.LaunchKeyscanException, match="No host keys"):
        request.result()


def test_name_resolution_does_not_block(
    worker: NodescanWorker, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = socket.getaddrinfo

    def slow(
        host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        if host == "slow.example" and not flags:
            assert release.wait(20)
            host = "127.0.0.1"
        return real(host, port, family, type, proto, flags)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    done = threading.Event()
    named = NodescanRequest(
        target(sshd.port, ip="slow.example"), True, 20, None, lambda request: done.set()
    )
    worker.addRequest(named)
    assert len(scan(worker, target(sshd.port)).result()) == 5
    assert not named.complete
    release.set()
    assert done.wait(10)
    assert len(named.result()) == 5


def test_unresolvable_name_fails_the_scan(
    worker: NodescanWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(host: str, *args: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(exceptions.ConnectionTimeoutException, match="Name or service not known"):
        scan(worker, target(22, ip="nowhere.example"), timeout=1).result()
    with pytest.raises(exceptions.ConnectionTimeoutException, match="Name or service not known"):
        nodeutils.nodescan("nowhere.example", timeout=1)


@pytest.mark.parametrize(
    ("address", "port"),
    [("a" * 300, 22), ("\ud800", 22), ("a..b", 22), ("127.0.0.1", None), ("127.0.0.1", 1 << 16)],
    ids=["long", "no text", "empty label", "no port", "huge port"],
)
def test_address_that_cannot_exist_fails_immediately_and_without_a_traceback(
    worker: NodescanWorker, caplog: pytest.LogCaptureFixture, address: str, port: int | None
) -> None:
    given = Attributes(interface_ip=address, connection_port=port, connection_type="ssh")
    with pytest.raises(exceptions.LaunchNetworkException, match="cannot be an address"):
        scan(worker, given, timeout=60).result()
    (record,) = [each for each in caplog.records if each.name == "nodepool.NodescanWorker"]
    assert record.exc_info is None and record.getMessage().isprintable()


def test_a_patched_advance_that_raises_fails_the_scan(
    worker: NodescanWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: NodescanRequest, socket_ready: bool) -> None:
        raise ValueError("patched")

    monkeypatch.setattr(NodescanRequest, "advance", broken)
    for ip in ("fake", "192.0.2.1"):
        with pytest.raises(ValueError, match="patched"):
            scan(worker, target(22, ip=ip)).result()


def test_a_patched_advance_that_does_nothing_times_out(
    worker: NodescanWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodescanRequest, "advance", lambda self, socket_ready: None)
    with pytest.raises(exceptions.ConnectionTimeoutException):
        scan(worker, target(22, ip="192.0.2.1"), timeout=0.3).result()


def test_bad_port_fails_only_its_own_scan(worker: NodescanWorker, sshd: SSHServer) -> None:
    request = scan(
        worker,
        Attributes(interface_ip="127.0.0.1", connection_port={"host": "x"}, connection_type="ssh"),
    )
    with pytest.raises(exceptions.LaunchNetworkException, match="cannot be an address"):
        request.result()
    assert len(scan(worker, target(sshd.port)).result()) == 5


def test_stop_fails_what_is_under_way(peer: Any) -> None:
    silent = peer(lambda sock: None)
    worker = NodescanWorker("stopping")
    worker.start()
    request = NodescanRequest(target(silent.port), True, 30, None)
    worker.addRequest(request)
    _wait(lambda: silent.count == 1)
    worker.stop()
    worker.join()
    late = NodescanRequest(target(silent.port), True, 30, None)
    worker.addRequest(late)
    for each in (request, late):
        with pytest.raises(exceptions.LaunchKeyscanException, match="stopped"):
            each.result()


@pytest.mark.spec("LAU-16: blocking variant: same two phases, raising the connection-timeout error")
def test_blocking_scan_raises_on_time_out(sshd: SSHServer) -> None:
    assert sorted(nodeutils.nodescan("127.0.0.1", sshd.port, 20)) == sorted(sshd.host_keys)
    assert nodeutils.nodescan("localhost", sshd.port, 20, gather_hostkeys=False) == []
    with pytest.raises(exceptions.ConnectionTimeoutException):
        nodeutils.nodescan("127.0.0.1", reserve(), 0.5, gather_hostkeys=False)


def test_ssh_library_is_loaded_only_when_an_ssh_port_answers() -> None:
    code = (
        "import sys; from nodepool import nodeutils; from nodepool.nodescan import "
        "NodescanRequest\n"
        "nodeutils.nodescan('fake'); assert 'paramiko' not in sys.modules"
    )
    root = REPOSITORY
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)


def _kexinit(names: bytes, banner: bytes = b"SSH-2.0-x\r\n") -> bytes:
    payload = (
        bytes([20])
        + b"c" * 16
        + struct.pack(">I", 3)
        + b"kex"
        + struct.pack(">I", len(names))
        + names
    )
    return banner + struct.pack(">IB", len(payload) + 1 + 4, 4) + payload + b"\0" * 4


def test_offered_algorithms_are_read_from_the_first_message() -> None:
    message = _kexinit(b"rsa-sha2-512,ssh-ed25519")
    assert offered_algorithms(message) == ["rsa-sha2-512", "ssh-ed25519"]
    assert offered_algorithms(b"Welcome to SSH-land\r\n" + message) == [
        "rsa-sha2-512",
        "ssh-ed25519",
    ]
    for length in range(len(message) - 4):
        assert offered_algorithms(message[:length]) is None
    assert offered_algorithms(b"SSH-2.0-x\n" + b"\xff" * 100) is None
    assert group_by_type(["ssh-ed25519", "rsa-sha2-512", "rsa-sha2-256"]) == {
        "ssh-ed25519": ["ssh-ed25519"],
        "ssh-rsa": ["rsa-sha2-512", "rsa-sha2-256"],
    }


def _relay(client: socket.socket, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as server, client:

        def pump(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    sink.sendall(data)
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

        back = threading.Thread(target=pump, args=(server, client), name="test-pump", daemon=True)
        back.start()
        pump(client, server)
        back.join(10)


def _wait(condition: Callable[[], bool], timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)


@pytest.mark.spec("DRV-7.8: test suites replace paramiko.transport.Transport")
def test_immediate_errors_of_the_library_are_retried(
    worker: NodescanWorker, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Broken:
        def __init__(self, sock: Any) -> None:
            made.append(1)
            raise ValueError("broken library")

    monkeypatch.setattr("paramiko.transport.Transport", Broken)
    silent = peer(lambda sock: None)
    with pytest.raises(
        exceptions.ConnectionTimeoutException, match="state: connecting, last error: broken library"
    ):
        scan(worker, target(silent.port), timeout=1).result()
    assert len(made) > 1

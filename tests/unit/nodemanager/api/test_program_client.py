"""Client of programs in slivers, with hosts that answer nonsense."""

from __future__ import annotations

import pathlib
import socket
import threading
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.client import frames, programs, xml_rpc
from nodepool.nodemanager.client.rpc import Client, RpcError, RpcFault

HEAD = f"HTTP/1.0 200 OK\r\nContent-Type: {frames.CONTENT_TYPE}\r\n\r\n".encode()


class Host:
    """Sends an answer to each call, and then nothing until the other end closes."""

    def __init__(self, path: pathlib.Path) -> None:
        self.answer = b""
        self.ends = True
        self.client = Client(f"unix:{path}")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="Thread-test-host", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            with connection:
                request = b""
                while b"</methodCall>" not in request:
                    request += connection.recv(65536)
                connection.sendall(self.answer)
                if not self.ends:
                    connection.recv(1)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()


@pytest.fixture
def host(tmp_path: pathlib.Path) -> Iterator[Host]:
    found = Host(tmp_path / "api")
    yield found
    found.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "the connection ended before the program did"),
        (b"\1\0\0\0\5abc", "the connection ended before the program did"),
        (
            b"\1\xff\0\0\0",
            "not an answer of a node manager: a frame of 4278190080 bytes is too long",
        ),
        (frames.pack(9, b"x"), "not an answer of a node manager: a frame of type 9"),
        (frames.pack(frames.EXIT, b"soon"), "not an answer of a node manager"),
    ],
)
def test_nonsense_instead_of_output_is_an_error(host: Host, answer: bytes, text: str) -> None:
    host.answer = HEAD + answer
    with programs.start(host.client, "a", ["id"]) as running, pytest.raises(RpcError, match=text):
        running.read(5)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.0 500 Problem\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\nContent-Type: text/xml\r\n\r\nx",
        b"SSH-2.0",
    ],
)
def test_nonsense_instead_of_the_start_is_an_error(host: Host, answer: bytes) -> None:
    host.answer = answer
    with pytest.raises(RpcError):
        programs.start(host.client, "a", ["id"])


def test_output_that_arrives_with_the_head_is_not_lost(host: Host) -> None:
    host.answer = HEAD + frames.pack(frames.STDERR, b"early") + frames.pack(frames.EXIT, b"")
    with programs.start(host.client, "a", ["id"]) as running:
        assert running.read(5) == (programs.STDERR, b"early")
        assert running.read(5) is None
        assert running.status is None


def test_host_that_does_not_proceed_is_an_error_in_time(host: Host) -> None:
    host.answer, host.ends = HEAD, False
    with programs.start(host.client, "a", ["id"]) as running, pytest.raises(TimeoutError):
        running.read(0.05)


def test_closing_ends_the_wait_of_another_thread(host: Host) -> None:
    host.answer, host.ends = HEAD, False
    running = programs.start(host.client, "a", ["id"])
    timer = threading.Timer(0.05, running.close)
    timer.start()
    with pytest.raises(RpcError):
        running.read(20)
    timer.join()


def test_closed_client_ends_its_programs(host: Host) -> None:
    host.answer, host.ends = HEAD, False
    with programs.start(host.client, "a", ["id"]) as running:
        host.client.close()
        with pytest.raises(RpcError):
            running.read(20)
    with pytest.raises(RpcError, match="closed"):
        programs.start(host.client, "a", ["id"])


def test_fault_is_raised_with_its_code(host: Host) -> None:
    body = xml_rpc.fault(108, "not you")
    host.answer = (
        b"HTTP/1.0 200 OK\r\nContent-Type: text/xml\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    with pytest.raises(RpcFault, match="not you") as caught:
        programs.start(host.client, "a", ["id"])
    assert caught.value.code == 108

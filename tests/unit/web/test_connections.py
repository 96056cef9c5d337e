"""A client that holds connections open does not keep others out."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest

from nodepool import metrics
from nodepool.web import connections, server, shares
from nodepool.web.server import WebApp
from tests.conftest import wait_for
from tests.support.fairness import assert_fair

#: Bytes of an answer that no buffer of the kernel holds.
LARGE = 20_000_000
HALF = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nX-Never-Ends: "
#: Its answer shows that the head has arrived.
EXPECT = b"Expect: 100-continue\r\n\r\nhalf"
HALF_A_BODY = b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n" + EXPECT
UNREAD = b"GET /ready?verbose HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connections, "CONNECTION_LIMIT", 20)
    monkeypatch.setattr(connections, "CHECK", 0.05)
    nodepool = SimpleNamespace(
        getReadiness=lambda: (True, ["x" * LARGE]), getZK=lambda: None, feed=None
    )
    app = WebApp(nodepool, port=0, listen_address="127.0.0.1", statistics=metrics.Metrics())
    app.start()
    yield app.server.socket.getsockname()[1]
    app.stop()
    app.join(5)


def ready(client: http.client.HTTPConnection) -> int:
    client.request("GET", "/metrics")
    answer = client.getresponse()
    answer.read()
    return answer.status


def connect(port: int, address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=(address, 0))


@pytest.mark.parametrize("sent", [b"", HALF], ids=["idle", "half a head"])
def test_client_with_most_connections_loses_its_oldest(port: int, sent: bytes) -> None:
    kept = connect(port, "127.0.0.3")
    assert ready(kept) == 200
    with contextlib.ExitStack() as stack:
        flood = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            for _ in range(60)
        ]
        for end in flood:
            with contextlib.suppress(OSError):  # it is closed already
                end.sendall(sent)
        for address in ("127.0.0.2", "127.0.0.1"):
            client = connect(port, address)
            assert ready(client) == 200
            client.close()
        assert ready(kept) == 200
        flood[0].settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert flood[0].recv(1) == b""
    kept.close()


@pytest.mark.parametrize(
    ("sent", "number", "addresses"),
    [
        (b"", 60, ["127.0.0.1", "127.0.0.2"]),
        (HALF, 60, ["127.0.0.1", "127.0.0.2"]),
        (HALF_A_BODY, 60, ["127.0.0.1", "127.0.0.2"]),
        (UNREAD, 30, ["127.0.0.1", "127.0.0.2"]),
        (UNREAD, 60, ["127.0.0.2"]),
    ],
    ids=["idle", "half a head", "half a body", "answers not read", "too many answers not read"],
)
def test_connections_of_one_client_leave_places_for_others(
    port: int, sent: bytes, number: int, addresses: list[str]
) -> None:
    """Others of the same address, which may be that of a proxy, connect while that is possible."""
    kept = connect(port, "127.0.0.3")
    assert ready(kept) == 200

    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        with contextlib.ExitStack() as stack:
            for _ in range(number):
                end = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                with contextlib.suppress(OSError):  # it is closed already
                    end.sendall(sent)
                    _ = end.recv(1) if sent in (HALF_A_BODY, UNREAD) else b""
            yield lambda: 15 <= len(opened()) <= 45

    def opened() -> list[object]:
        return [
            each
            for each in psutil.Process().net_connections("tcp4")
            if each.status == "ESTABLISHED" and each.laddr[1] == port
        ]

    def honest() -> None:
        for address in addresses:
            client = connect(port, address)
            assert ready(client) == 200
            client.close()
        assert ready(kept) == 200

    assert_fair(honest, greedy)
    kept.close()


def test_requests_that_are_worked_on_are_cut_off_beyond_twice_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CONNECTION_LIMIT", 5)
    free = threading.Event()
    nodepool = SimpleNamespace(
        getReadiness=lambda: (free.wait(60), []), getZK=lambda: None, feed=None
    )
    app = WebApp(nodepool, port=0, listen_address="127.0.0.1", statistics=metrics.Metrics())
    app.start()
    port = app.server.socket.getsockname()[1]
    ask = b"GET /ready HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n\r\n"
    try:
        with contextlib.ExitStack() as stack:
            ends = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                for _ in range(5)
            ]
            for number in range(10):
                if number >= 5:
                    new = socket.create_connection(("127.0.0.1", port), 20)
                    ends.append(stack.enter_context(new))
                ends[number].sendall(ask)
                assert ends[number].recv(1) == b"H", "more than the limit is allowed"
            honest = connect(port, "127.0.0.2")
            assert ready(honest) == 200
            honest.close()
            with contextlib.suppress(ConnectionResetError):
                while ends[0].recv(100):
                    pass
            free.set()
            assert ends[9].recv(1), "only the oldest is cut off"
    finally:
        free.set()
        app.stop()


def test_slow_reads_of_one_client_leave_threads_for_others() -> None:
    reading, free = threading.Semaphore(0), threading.Event()

    def readiness() -> tuple[bool, list[str]]:
        reading.release()
        free.wait(60)
        return True, []

    nodepool = SimpleNamespace(getReadiness=readiness, getZK=lambda: None, feed=None)
    app = WebApp(nodepool, port=0, listen_address="127.0.0.1", statistics=metrics.Metrics())
    app.start()
    port = app.server.socket.getsockname()[1]

    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        free.clear()
        slow = [connect(port, "127.0.0.1") for _ in range(8)]
        for client in slow:
            client.request("GET", "/ready")
        for _ in range(shares.AT_A_TIME):
            assert reading.acquire(timeout=20)
        yield lambda: not free.is_set()
        free.set()
        for client in slow:
            assert client.getresponse().read() == b"OK"
            client.close()
        while reading.acquire(blocking=False):
            pass

    def honest() -> None:
        client = connect(port, "127.0.0.2")
        assert ready(client) == 200
        client.close()

    try:
        assert_fair(honest, greedy)
    finally:
        free.set()
        app.stop()


def test_more_requests_of_one_client_than_may_wait_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "MOST", 3)
    free = threading.Event()
    nodepool = SimpleNamespace(
        getReadiness=lambda: (free.wait(60), []), getZK=lambda: None, feed=None
    )
    app = WebApp(nodepool, port=0, listen_address="127.0.0.1", statistics=metrics.Metrics())
    app.start()
    clients = [connect(app.server.socket.getsockname()[1], "127.0.0.1") for _ in range(5)]
    try:
        for client in clients:
            client.request("GET", "/ready")
        for client in clients[3:]:
            answer = client.getresponse()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            answer.read()
        free.set()
        for client in clients[:3]:
            assert client.getresponse().read() == b"OK"
    finally:
        free.set()
        for client in clients:
            client.close()
        app.stop()


def test_request_that_does_not_end_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT", 0.3)
    kept = connect(port, "127.0.0.3")
    assert ready(kept) == 200
    with socket.create_connection(("127.0.0.1", port), 20) as slow:
        slow.sendall(HALF)

        def closed() -> bool:
            """It never falls silent, so that IDLE_TIMEOUT would never end it."""
            try:
                slow.sendall(b"x")
            except OSError:
                return True
            return False

        wait_for(closed, 20, "the connection to be closed")
    assert ready(kept) == 200
    kept.close()


def test_second_request_that_does_not_end_is_cut_off(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT", 0.3)
    whole = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    half = b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx"
    with socket.create_connection(("127.0.0.1", port), 20) as end:
        end.sendall(whole + half)
        with contextlib.suppress(ConnectionResetError):
            while end.recv(65536):
                pass


def say(port: int, data: bytes, until: bytes = b"") -> bytes:
    """Return what the server answers until it says this, or closes the connection."""
    with (
        socket.create_connection(("127.0.0.1", port), 20) as end,
        contextlib.suppress(ConnectionResetError),
    ):
        end.sendall(data)
        found = b""
        while (not until or until not in found) and (part := end.recv(65536)):
            found += part
        return found
    return b""


def test_client_that_does_not_read_its_answer_is_disconnected(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_TIMEOUT", 0.5)
    with socket.create_connection(("127.0.0.1", port), 20) as greedy:
        greedy.sendall(b"GET /ready?verbose HTTP/1.1\r\nHost: localhost\r\n\r\n")
        own = greedy.getsockname()

        def closed() -> bool:
            return not any(each.raddr == own for each in psutil.Process().net_connections("tcp4"))

        wait_for(lambda: not closed(), 20, "the connection")
        wait_for(closed, 20, "the connection to be closed")
        found = 0
        with contextlib.suppress(ConnectionResetError):
            while part := greedy.recv(1 << 20):
                found += len(part)
        assert found < LARGE, "the rest is not sent"


def test_client_that_reads_slowly_gets_all(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_TIMEOUT", 2)
    slow = connect(port, "127.0.0.1")
    slow.request("GET", "/ready?verbose")
    answer = slow.getresponse()
    found = 0
    while part := answer.read(LARGE // 100):
        found += len(part)
        time.sleep(0.03)
    assert found == LARGE + len("OK\n")
    slow.close()


@pytest.mark.parametrize(
    "request_, status",
    [
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nA: " + b"x" * 20000 + b"\r\n\r\n", b"431"),
        (
            b"GET /metrics HTTP/1.1\r\nHost: a\r\n"
            + b"A: 12345678\r\n" * 90
            + b"B: "
            + b"x" * 16000
            + b"\r\n\r\n",
            b"431",
        ),
        (
            b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 65537\r\n\r\n" + b"x" * 65537,
            b"413",
        ),
        (
            b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 65536\r\n\r\n" + b"x" * 65536,
            b"200",
        ),
        (
            b"POST /metrics HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n8000\r\n"
            + b"x" * 0x8000
            + b"\r\n0\r\n\r\n",
            b"200",
        ),
        (
            b"POST /metrics HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
            b"400",
        ),
        (b"nonsense\r\n\r\n", b"400"),
    ],
    ids=[
        "long header",
        "long head",
        "long body",
        "longest body",
        "chunked body",
        "malformed body",
        "no HTTP",
    ],
)
def test_request_that_is_too_long_or_malformed_is_refused(
    port: int, caplog: pytest.LogCaptureFixture, request_: bytes, status: bytes
) -> None:
    assert say(port, request_, b"\r\n\r\n").split()[1] == status
    assert caplog.records == []


def test_client_that_still_sends_a_long_body_can_read_the_refusal(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 20) as end:
        head = b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
        end.sendall(head + b"x" * 200_000)
        answer = end.makefile("rb")
        assert answer.readline().split()[1] == b"413"
        end.sendall(b"x" * 800_000)
        assert b"Connection: close" in answer.read(), "and no reset"


def test_head_without_an_end_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT", 1000)
    assert say(port, b"GET / HTTP/1.1\r\n" + (b"X: " + b"x" * 60_000 + b"\r\n") * 20) == b""


def test_client_that_waits_for_permission_to_send_its_body_gets_it(port: int) -> None:
    head = b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n"
    assert say(port, head, b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")


def test_last_proxy_reports_the_client_also_on_its_own_line() -> None:
    raw = [(b"X-Forwarded-For", b"10.0.0.1"), (b"Host", b"a"), (b"x-forwarded-for", b"203.0.113.5")]
    assert server.joined(raw) == {"x-forwarded-for": "10.0.0.1, 203.0.113.5", "host": "a"}

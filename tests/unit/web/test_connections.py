"""A client that holds connections open does not keep others out."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nodepool import metrics
from nodepool.web import connections
from nodepool.web.server import WebApp
from tests.conftest import wait_for

HALF = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nX-Never-Ends: "


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connections, "CONNECTION_LIMIT", 20)
    monkeypatch.setattr(connections, "CHECK", 0.05)
    nodepool = SimpleNamespace(getReadiness=lambda: (True, []), getZK=lambda: None, feed=None)
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
        flood = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(60)]
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

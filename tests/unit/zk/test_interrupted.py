"""An attempt to connect can be interrupted, whatever it waits for."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import Any

import pytest
from kazoo.protocol import connection as kazoo_connection

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.connection.protocol import SessionClient
from tests.support.deadline import limit

#: Far longer than a test may take.
SESSION = 3600.0


def test_silent_server_delays_no_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ZooKeeperClient(
            f"127.0.0.1:{silent.getsockname()[1]}", timeout=SESSION, insecure=True
        )
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="No ZooKeeper server answers"):
            client.connect(0.5)
        assert time.monotonic() - began < limit(30)


def test_resolver_without_an_answer_delays_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def resolve(*_arguments: object) -> list[Any]:
        asked.set()
        answer.wait()
        return []

    monkeypatch.setattr(kazoo_connection.socket, "getaddrinfo", resolve)
    client = ZooKeeperClient("zookeeper.example.org", timeout=SESSION, insecure=True)
    try:
        with pytest.raises(TimeoutError, match="No ZooKeeper server answers"):
            client.connect(0.5)
        assert asked.is_set()
    finally:
        answer.set()


def test_interrupted_attempt_sends_nothing_without_encryption() -> None:
    one, other = socket.socketpair()
    with one, other:
        wrapped = ssl.create_default_context().wrap_socket(
            one, server_hostname="zookeeper.example.org", do_handshake_on_connect=False
        )
        with wrapped:
            connection = SessionClient()._connection
            connection._socket = wrapped
            connection.stop()
            assert other.recv(1) == b"", "it is interrupted"
            assert wrapped._sslobj is not None, "its thread may be about to send"

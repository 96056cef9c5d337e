"""An attempt to connect can be interrupted, whatever it waits for."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from kazoo.protocol import connection as kazoo_connection

from nodepool.zk.connection.client import ZooKeeperClient
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

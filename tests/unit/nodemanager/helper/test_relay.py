"""Relay between a client's connection and a program inside a sliver."""

from __future__ import annotations

import socket
import threading
import time

from nodepool.nodemanager.helper import relay

#: Seconds by which Linux delays an acknowledgment, at least.
DELAY = 0.04


def test_client_that_sends_two_small_packets_is_not_delayed() -> None:
    """SSH clients do that at a login, before they set TCP_NODELAY."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), 5)
        connection = listener.accept()[0]
    control, other = socket.socketpair()
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    relay.prepare(connection)
    carrier = threading.Thread(
        target=relay.carry, args=(connection, control), name="Thread-test-relay", daemon=True
    )
    carrier.start()
    socket.send_fds(other, [b"e"], [theirs.fileno()])
    theirs.close()
    took = []
    with client, ours, other:
        for _ in range(20):
            ours.sendall(b"answer")
            assert client.recv(64) == b"answer"
            started = time.monotonic()
            client.sendall(b"a")
            client.sendall(b"b")
            data = b""
            while len(data) < 2:
                data += ours.recv(64)
            took.append(time.monotonic() - started)
    carrier.join(5)
    assert not carrier.is_alive()
    assert sorted(took)[-5] < DELAY / 2, took

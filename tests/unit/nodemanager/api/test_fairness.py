"""One caller of the node manager's API takes all it gets; another one works as before."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.nodemanager.api import connections
from nodepool.nodemanager.api.connections import Connections
from nodepool.nodemanager.api.exchange import Request, xml_answer
from nodepool.nodemanager.api.listener import Listener, Peer
from nodepool.nodemanager.api.methods import OTHER, Caller
from tests.conftest import wait_for
from tests.support.fairness import assert_fair, in_threads

GREEDY, HONEST = "127.0.0.3", "127.0.0.2"


class Desk:
    """Answers the honest caller immediately, and the greedy one when it may."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.busy = 0

    def call(self, _request: Request, caller: Caller) -> bytes:
        if caller.name == GREEDY:
            self.busy += 1
            self.free.wait(60)
            self.busy -= 1
        return xml_answer(b"<answer/>")


class Node:
    """The connections of a node manager, whose callers are distinguished by address."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        given: Any = desk
        self.connections = Connections(given, lambda _stream: None, lambda *_: None)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.connections.start()
        self.connections.add(Listener(self.socket, self.connections.loop, self._identify))

    @staticmethod
    def _identify(stream: socket.socket) -> Peer:
        address = str(stream.getpeername()[0])
        return Peer(address, OTHER, lambda: Caller(OTHER, address))

    def ask(self, address: str) -> None:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=60, source_address=(address, 0)
        )
        with contextlib.closing(connection):
            connection.request("POST", "/", b"<call/>")
            answer: Any = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"<answer/>")

    def states(self) -> Counter[str]:
        return Counter(each.state for each in self.connections.shares.connections())

    def honest(self) -> None:
        self.ask(HONEST)


@pytest.fixture
def node() -> Iterator[Node]:
    found = Node(Desk())
    yield found
    found.desk.free.set()
    found.connections.stop(5)
    found.socket.close()


def test_requests_of_one_caller_leave_threads_for_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.CONCURRENCY, OTHER, 2)

    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        node.desk.free.clear()
        with in_threads(lambda: node.ask(GREEDY), 8) as threads:
            wait_for(
                lambda: sum(node.states()[state] for state in ("waiting", "answering")) == 8,
                what="all requests",
            )
            yield lambda: node.desk.busy == 1 and all(each.is_alive() for each in threads)
            node.desk.free.set()

    assert_fair(node.honest, greedy)


def test_connections_of_one_caller_leave_places_for_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.PLACES, OTHER, 8)

    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                end = socket.create_connection(
                    ("127.0.0.1", node.port), 20, source_address=(GREEDY, 0)
                )
                stack.enter_context(end)
            wait_for(lambda: node.states().total() >= 7, what="the connections")
            yield lambda: node.states().total() >= 4  # each honest call may end one
        wait_for(lambda: node.states().total() == 0, what="their end")

    assert_fair(node.honest, greedy)


def test_processor_time_of_one_caller_leaves_some_for_others(node: Node) -> None:
    @contextlib.contextmanager
    def greedy() -> Iterator[Callable[[], bool]]:
        node.desk.free.set()
        node.ask(GREEDY)
        own, everybody = node.connections.shares.charge(GREEDY, 0.55)
        assert own and not everybody
        yield lambda: bool(node.connections.shares.charge(GREEDY, 0.0)[0])
        # Its debt would last for the other series.
        node.connections.shares.charge(GREEDY, -0.55)

    assert_fair(node.honest, greedy)

"""Sessions, limits and ends of connections, over pipes in memory and a clock that is stepped."""

from __future__ import annotations

import struct

import pytest
from kazoo.protocol.serialization import Close, Create, Exists, GetData
from kazoo.security import ACL, Id

from nodepool.lab.zkserver.core import LONGEST, MOST_BYTES, SHORTEST
from nodepool.lab.zkserver.requests import StandaloneServer
from nodepool.lab.zkserver.tree import Znode
from tests.support.zkclient import Ended, MemoryPipe, RawClient

OPEN = [ACL(31, Id("world", "anyone"))]
DELETED = 2


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.server = StandaloneServer(clock=lambda: self.now)

    def client(self, timeout: int = 10_000) -> RawClient:
        return RawClient(lambda: MemoryPipe(self.server), timeout)

    def step(self, seconds: float) -> float | None:
        self.now += seconds
        return self.server.tick()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_number_of_changes_of_the_children_wraps_around() -> None:
    assert struct.unpack_from("!i", Znode(created=(1 << 30) + 3).stat(), 36)[0] == 6 - (1 << 31)


def test_session_ends_with_its_ephemeral_znodes_when_nothing_was_received_for_its_timeout(
    bench: Bench,
) -> None:
    holder, watcher = bench.client(2000), bench.client(60_000)
    holder.call(Create("/held", b"", OPEN, 1))
    watcher.call(Exists("/held", True))
    assert bench.step(1.9) == pytest.approx(0.1)
    holder.flush()
    bench.step(1.9)
    assert watcher.flush() == []
    bench.step(0.1)
    assert watcher.flush() == [(DELETED, "/held")]
    with pytest.raises(Ended):
        holder.flush()
    assert not holder.connect() and holder.session == 0


def test_session_survives_a_cut_and_is_attached_again_by_its_password_only(bench: Bench) -> None:
    client = bench.client()
    client.call(Create("/held", b"", OPEN, 1))
    session, password = client.session, client.password
    client.cut()
    client.password = bytes(16)
    assert not client.connect()
    client.session, client.password = session, password
    assert client.connect()
    assert client.call(Exists("/held", None))[0] == 0


def test_second_connection_of_a_session_ends_the_first_one(bench: Bench) -> None:
    client = bench.client()
    old = client.pipe
    client.pipe = None
    assert client.connect()
    assert old is not None
    with pytest.raises(Ended):
        old.receive(1)
    client.flush()


def test_client_that_saw_more_than_the_server_has_is_refused(bench: Bench) -> None:
    client = bench.client()
    client.cut()
    client.zxid = bench.server.zxid + 1
    with pytest.raises(Ended):
        client.connect()
    client.zxid = bench.server.zxid
    assert client.connect()


@pytest.mark.parametrize(("asked", "granted"), [(1, SHORTEST), (10**9, LONGEST), (5000, 5000)])
def test_timeouts_of_sessions_are_bounded(bench: Bench, asked: int, granted: int) -> None:
    client = bench.client(asked)
    assert bench.server.sessions[client.session].timeout == granted


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!i", MOST_BYTES + 1),
        struct.pack("!i", -5) + b"x" * 20,
        struct.pack("!iii", 8, 1, 4),
        struct.pack("!iiii", 12, 1, 1, -7),
        struct.pack("!iiiii", 16, 1, 101, 0, 0),
        struct.pack("!iiii", 12, 1, 4, 1 << 30),
    ],
    ids=[
        "too large",
        "negative length",
        "no path",
        "length of a string",
        "short list",
        "string longer than the request",
    ],
)
def test_malformed_request_ends_the_connection_and_harms_nobody_else(
    bench: Bench, data: bytes
) -> None:
    client, other = bench.client(), bench.client()
    assert client.pipe is not None
    client.pipe.send(data)
    with pytest.raises(Ended):
        client.pipe.receive(1)
    assert other.call(Create("/a", b"x", OPEN, 0))[0] == 0
    assert client.connect()
    assert client.call(GetData("/a", None))[0] == 0


def test_requests_may_arrive_in_any_pieces(bench: Bench) -> None:
    client = bench.client()
    payload = struct.pack("!ii", 1, 1) + bytes(Create("/a", b"x", OPEN, 0).serialize())
    assert client.pipe is not None
    for byte in struct.pack("!i", len(payload)) + payload:
        client.pipe.send(bytes([byte]))
    assert bench.server.tree.get("/a").data == b"x"


def test_unknown_operation_ends_the_connection_after_its_answer(bench: Bench) -> None:
    class Unknown:
        type = 77

        @staticmethod
        def serialize() -> bytes:
            return b""

    client = bench.client()
    assert client.call(Unknown)[0] == -6
    with pytest.raises(Ended):
        client.flush()


def test_closing_is_answered_before_the_connection_ends(bench: Bench) -> None:
    client = bench.client()
    assert client.call(Close) == (0, b"")
    assert bench.server.sessions == {} and not bench.server.connections


@pytest.mark.parametrize(
    ("word", "answer"), [("ruok", "imok"), ("srvr", "Mode: standalone"), ("nope", "not executed")]
)
def test_four_letter_words(bench: Bench, word: str, answer: str) -> None:
    pipe = MemoryPipe(bench.server)
    pipe.send(word.encode())
    assert answer in pipe.rest().decode()
    assert not bench.server.connections

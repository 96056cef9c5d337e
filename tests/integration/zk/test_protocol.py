"""Does our subclass still fit kazoo?  Persistent watches, batching, and everything kazoo itself
promises.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    SessionExpiredError,
)
from kazoo.protocol.connection import _CONNECTION_DROP, _SESSION_EXPIRED, ConnectionDropped
from kazoo.protocol.serialization import GetData
from kazoo.protocol.states import KazooState

from nodepool.zk.connection.protocol import CHANGED, CREATED, DELETED, SessionClient
from nodepool.zk.connection.reply import Reply
from tests.conftest import Chroot, wait_for
from tests.support.deadline import limit
from tests.support.faults.launcher import Proxy


@pytest.fixture
def client(zk_chroot: Chroot) -> Any:
    return zk_chroot.connect().client


def arm(client: Any, root: str, events: list[tuple[int, str]]) -> None:
    done = threading.Event()
    client.add_persistent_watch(root, lambda kind, path: events.append((kind, path)))
    client.arm_persistent_watch(
        root, Reply(lambda result, error, _zxid: done.set() if error is None else None)
    )
    assert done.wait(10)


def test_our_classes_are_in_use(client: Any) -> None:
    assert isinstance(client, SessionClient)
    assert type(client._connection).__module__ == "nodepool.zk.connection.protocol"


@pytest.mark.spec("ZK-2: persistent recursive watches")
def test_persistent_watch_events(client: Any, zk_chroot: Chroot) -> None:
    other = zk_chroot.connect().client
    other.ensure_path("/watched/old")
    events: list[tuple[int, str]] = []
    arm(client, "/watched", events)
    other.create("/watched/a", b"1")
    other.set("/watched/a", b"2")
    other.set("/watched/a", b"3")
    other.create("/watched/a/deep/er", b"", makepath=True)
    other.delete("/watched/a", recursive=True)
    other.set("/watched/old", b"x")
    other.create("/watched2", b"")
    other.create("/elsewhere", b"")
    txn = other.transaction()
    txn.create("/watched/t1")
    txn.create("/watched/t2", ephemeral=True)
    txn.delete("/watched/old")
    txn.commit()
    expected = [
        (CREATED, "/watched/a"),
        (CHANGED, "/watched/a"),
        (CHANGED, "/watched/a"),
        (CREATED, "/watched/a/deep"),
        (CREATED, "/watched/a/deep/er"),
        (DELETED, "/watched/a/deep/er"),
        (DELETED, "/watched/a/deep"),
        (DELETED, "/watched/a"),
        (CHANGED, "/watched/old"),
        (CREATED, "/watched/t1"),
        (CREATED, "/watched/t2"),
        (DELETED, "/watched/old"),
    ]
    wait_for(lambda: len(events) >= len(expected))
    client.exists("/watched")
    assert events == expected


def test_watches_of_several_roots_and_removal(client: Any, zk_chroot: Chroot) -> None:
    other = zk_chroot.connect().client
    first: list[tuple[int, str]] = []
    second: list[tuple[int, str]] = []
    everything: list[tuple[int, str]] = []
    other.ensure_path("/one")
    other.ensure_path("/two")
    arm(client, "/one", first)
    arm(client, "/two", second)
    arm(client, "/", everything)
    other.create("/one/a")
    other.create("/two/b")
    wait_for(lambda: len(everything) >= 2)
    assert (first, second) == ([(CREATED, "/one/a")], [(CREATED, "/two/b")])
    callback = client.persistent_watches[0][1]
    client.remove_persistent_watch("/one", callback)
    other.create("/one/c")
    wait_for(lambda: (CREATED, "/one/c") in everything)
    assert len(first) == 1


def test_an_error_in_a_callback_does_not_end_the_connection(client: Any) -> None:
    client.ensure_path("/w")
    calls: list[str] = []

    def broken(_kind: int, path: str) -> None:
        calls.append(path)
        raise RuntimeError("induced")

    client.add_persistent_watch("/w", broken)
    arm(client, "/w", [])
    client.create("/w/a")
    client.create("/w/b")
    wait_for(lambda: calls == ["/w/a", "/w/b"])
    assert client.connected


@pytest.mark.spec("an event comes before the answer to any later request")
def test_events_come_before_later_answers(client: Any, zk_chroot: Chroot) -> None:
    other = zk_chroot.connect().client
    client.ensure_path("/w")
    order: list[Any] = []
    client.add_persistent_watch("/w", lambda kind, path: order.append((kind, path)))
    arm(client, "/w", [])
    for number in range(20):
        path = f"/w/{number}"
        other.create(path, b"x")
        done = threading.Event()

        def answer(
            result: Any, error: Any, _zxid: int, number: int = number, done: Any = done
        ) -> None:
            order.append(number if error is None else error)
            done.set()

        client.submit(GetData(client.full_path(path), None), Reply(answer))
        assert done.wait(10)
        assert order.index((CREATED, path)) < order.index(number)


def test_batches_keep_their_order(client: Any) -> None:
    """Many requests from many threads: each thread's answers come in its order, none is lost."""
    client.ensure_path("/b")
    results: dict[int, list[str]] = {n: [] for n in range(4)}

    def work(number: int) -> None:
        answers = [client.create_async(f"/b/{number}-{i:04d}", b"v" * (i % 50)) for i in range(300)]
        results[number] = [answer.get(timeout=30) for answer in answers]

    threads = [threading.Thread(target=work, args=(n,)) for n in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, paths in results.items():
        assert paths == [f"/b/{number}-{i:04d}" for i in range(300)]
    assert len(client.get_children("/b")) == 1200


def test_many_large_messages_are_answered(client: Any) -> None:
    data = bytes(range(256)) * 3600  # close to the server's limit
    answers = [client.create_async(f"/big{i}", data) for i in range(8)]
    assert [a.get(timeout=30) for a in answers] == [f"/big{i}" for i in range(8)]
    reads = [client.get_async(f"/big{i}") for i in range(8)]
    assert all(r.get(timeout=30)[0] == data for r in reads)


def test_a_request_that_cannot_be_written_hurts_only_itself(client: Any) -> None:
    class Bad:
        type = 4

        def serialize(self) -> bytes:
            raise ValueError("induced")

    errors: list[Any] = []
    client.submit(Bad(), Reply(lambda _result, error, _zxid: errors.append(error)))
    assert client.exists("/") is not None
    wait_for(lambda: errors)
    assert isinstance(errors[0], ValueError) and client.connected


# -- what kazoo promises still holds


def test_errors_are_raised_as_kazoo_exceptions(client: Any) -> None:
    client.create("/e", b"1")
    with pytest.raises(NodeExistsError):
        client.create("/e", b"1")
    with pytest.raises(NoNodeError):
        client.get("/nothing")
    with pytest.raises(BadVersionError):
        client.set("/e", b"2", version=7)
    client.create("/e/child")
    with pytest.raises(NotEmptyError):
        client.delete("/e")
    assert client.exists("/nothing") is None
    assert (
        client.unchroot(client.full_path("/e")) == "/e" and client.full_path("/") == client.chroot
    )


def test_error_that_kazoo_does_not_know_ends_only_its_request(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client._connection
    read = connection._read_response
    monkeypatch.setattr(
        connection, "_read_response", lambda header, *rest: read(header._replace(err=-999), *rest)
    )
    with pytest.raises(KazooException, match="ZooKeeper error -999"):
        client.get("/")
    monkeypatch.undo()
    assert client.exists("/") is not None


def test_transactions_are_applied_as_a_whole(client: Any) -> None:
    client.create("/t", b"")
    txn = client.transaction()
    txn.check("/t", 0)
    txn.create("/t/a", b"x", sequence=True)
    txn.set_data("/t", b"y")
    results = txn.commit()
    assert results[0] is True and results[1] == "/t/a0000000000" and results[2].version == 1
    txn = client.transaction()
    txn.delete("/t/a0000000000")
    txn.create("/missing/a")
    results = txn.commit()
    assert isinstance(results[1], NoNodeError)
    assert client.exists("/t/a0000000000")


def test_one_shot_watches(client: Any) -> None:
    events: list[Any] = []
    client.create("/o", b"")
    client.get("/o", watch=events.append)
    client.exists("/later", watch=events.append)
    client.get_children("/o", watch=events.append)
    client.set("/o", b"1")
    client.set("/o", b"2")
    client.create("/later")
    client.create("/o/child")
    client.create("/o/child2")
    wait_for(lambda: len(events) == 3)
    assert sorted((e.type, e.path) for e in events) == [
        ("CHANGED", "/o"),
        ("CHILD", "/o"),
        ("CREATED", "/later"),
    ]


def test_one_shot_and_persistent_watches_side_by_side(client: Any) -> None:
    client.ensure_path("/s/x")
    persistent: list[tuple[int, str]] = []
    once: list[Any] = []
    arm(client, "/s", persistent)
    client.get("/s/x", watch=once.append)
    client.set("/s/x", b"1")
    client.set("/s/x", b"2")
    wait_for(lambda: len(persistent) == 2 and len(once) == 1)


def test_kazoo_recipes_work_on_our_connection(client: Any, zk_chroot: Chroot) -> None:
    other = zk_chroot.connect().client
    lock, theirs = client.Lock("/lock", "me"), other.Lock("/lock", "they")
    assert lock.acquire(timeout=5)
    assert not theirs.acquire(blocking=False)
    got: list[str] = []
    waiter = threading.Thread(target=lambda: (theirs.acquire(timeout=10), got.append("they")))
    waiter.start()
    wait_for(lambda: lock.contenders() == ["me", "they"])
    assert not got
    lock.release()
    waiter.join(5)
    assert got == ["they"]
    theirs.release()

    leaders: list[str] = []
    release = threading.Event()
    first, second = client.Election("/election", "one"), other.Election("/election", "two")
    threads = []
    for election, name in ((first, "one"), (second, "two")):

        def lead(name: str = name) -> None:
            leaders.append(name)
            release.wait(10)

        thread = threading.Thread(target=election.run, args=(lead,))
        threads.append(thread)
        thread.start()
        wait_for(lambda name=name: name in first.contenders())  # type: ignore[misc]
    wait_for(lambda: leaders)
    assert leaders == ["one"]
    release.set()
    for thread in threads:
        thread.join(5)
    assert leaders == ["one", "two"]

    seen: list[Any] = []
    client.ensure_path("/dw")
    client.DataWatch("/dw", lambda data, _stat: seen.append(data) if data is not None else None)
    client.ChildrenWatch("/dw", lambda names: seen.append(sorted(names)))
    other.set("/dw", b"1")
    other.create("/dw/a")
    wait_for(lambda: b"1" in seen and ["a"] in seen)


# -- connection trouble


def test_a_dropped_connection(client: Any, zk_chroot: Chroot) -> None:
    """Requests under way fail, the session (and its ephemeral znodes) lives on, later requests
    work.
    """
    states: list[str] = []
    client.add_listener(lambda state: states.append(state))
    client.create("/ephemeral", ephemeral=True)
    session = client.client_id[0]
    client._call(_CONNECTION_DROP, client.handler.async_result())
    wait_for(lambda: states[:2] == [KazooState.SUSPENDED, KazooState.CONNECTED])
    assert client.client_id[0] == session
    assert client.exists("/ephemeral").ephemeralOwner == session


@pytest.fixture
def tls_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the sockets of failed TLS handshakes, which kazoo leaves to the garbage collector."""
    made: list[ssl.SSLSocket] = []
    wrap = ssl.SSLContext.wrap_socket

    def wrapped(*args: Any, **options: Any) -> ssl.SSLSocket:
        made.append(wrap(*args, **options))
        return made[-1]

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", wrapped)
    yield
    for each in made:
        each.close()


@pytest.mark.usefixtures("tls_sockets")
def test_servers_that_hang_leave_the_session_time_for_the_others(
    zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        random, "shuffle", lambda hosts: hosts.sort(key=lambda entry: entry[2] == port)
    )  # ours comes last
    port = int(zk_chroot.hosts.rsplit(":", 1)[1])
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        silent = ",".join(f"127.0.0.1:{listener.getsockname()[1]}" for listener in (one, two))
        began = time.monotonic()
        connected = zk_chroot.connect(timeout=6.0, hosts=f"{silent},{zk_chroot.hosts}")
        assert time.monotonic() - began < limit(6)
        session, states = connected.session_id, []
        connected.state_listeners.append(states.append)
        connected.client._call(_CONNECTION_DROP, connected.client.handler.async_result())
        wait_for(lambda: connected.connected and states)
        assert (states, connected.session_id) == (
            [KazooState.SUSPENDED, KazooState.CONNECTED],
            session,
        )
        connected.disconnect()


@pytest.mark.usefixtures("tls_sockets")
def test_servers_that_are_not_reached_do_not_count_as_restored(
    zk_chroot: Chroot, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy(int(zk_chroot.hosts.rsplit(":", 1)[1]))
    try:
        connected = zk_chroot.connect(timeout=2.0, hosts=proxy.host)
        connected.client.ensure_path("/seen")
        assert connected.client.last_zxid
        proxy.set("close")
        began = time.monotonic()
        wait_for(lambda: time.monotonic() - began > 2.5, what="more than the session time-out")
        proxy.set("open")
        wait_for(lambda: connected.connected)
        connected.disconnect()
    finally:
        proxy.stop()
    assert "accepting restored servers" not in caplog.text


def test_server_that_owes_an_answer_for_too_long_is_left() -> None:
    client = SessionClient(hosts="127.0.0.1:1")
    connection = client._connection
    connection._read_sock, other = socket.socketpair()
    with connection._read_sock, other:
        connection._read_sock.setblocking(False)
        connection._silent_since = time.monotonic() - 60
        connection._send_request(1.0, 1.0)  # it owes nothing
        client._pending.append((GetData("/", None), None, 1))
        connection._silent_since = time.monotonic() - 60
        with pytest.raises(ConnectionDropped, match="no answer for"):
            connection._send_request(1.0, 1.0)


def test_server_that_was_restored_to_an_older_state_is_accepted_in_the_end(client: Any) -> None:
    client.last_zxid = 1 << 60
    client._connection._refused_since = time.monotonic() - 3600
    states: list[str] = []
    client.add_listener(states.append)
    client._call(_CONNECTION_DROP, client.handler.async_result())
    wait_for(lambda: KazooState.CONNECTED in states, what="a connection to the older server")
    assert client.get_children("/") is not None


def test_pending_requests_end_with_an_error(client: Any) -> None:
    answers: list[Any] = []
    client._call(_SESSION_EXPIRED, client.handler.async_result())
    for _ in range(50):
        try:
            client.submit(
                GetData(client.full_path("/"), None),
                Reply(lambda result, error, _zxid: answers.append((result, error))),
            )
        except (SessionExpiredError, ConnectionClosedError):
            answers.append((None, "refused"))
    wait_for(lambda: len(answers) == 50)
    for result, error in answers:
        assert (
            result is not None
            or error == "refused"
            or isinstance(error, (SessionExpiredError, ConnectionLoss, ConnectionClosedError))
        ), error
    wait_for(lambda: client.connected)
    assert client.exists("/") is not None


def test_the_mirror_arms_its_watches_again(zk: Any, zk_chroot: Chroot) -> None:
    """After a dropped connection, and after a lost session, each of the trees follows again."""
    other = zk_chroot.connect().client
    for number, kind in enumerate((_CONNECTION_DROP, _SESSION_EXPIRED, _CONNECTION_DROP)):
        synced: list[str] = []
        zk.node_tree.sync_listeners.append(lambda s=synced: s.append("nodes"))
        zk.request_tree.sync_listeners.append(lambda s=synced: s.append("requests"))
        zk.kazoo_client._call(kind, zk.kazoo_client.handler.async_result())
        wait_for(lambda s=synced: {"nodes", "requests"} <= set(s))  # type: ignore[misc]
        path = other.create("/nodepool/nodes/", b'{"state": "ready"}', sequence=True)
        name = other.create("/nodepool/requests/100-", b'{"state": "requested"}', sequence=True)
        wait_for(lambda p=path: zk.node_tree.get(p.rsplit("/", 1)[1]))  # type: ignore[misc]
        wait_for(lambda n=name: zk.request_tree.get(n.rsplit("/", 1)[1]))  # type: ignore[misc]
        other.set(path, b'{"state": "used"}')
        wait_for(lambda p=path: zk.node_tree.get(p.rsplit("/", 1)[1]).state == "used")  # type: ignore[misc]
        assert len(zk.node_tree.nodes) == number + 1


@pytest.mark.spec("LAU-21.154")
def test_a_tree_at_the_root(zk_chroot: Chroot) -> None:
    """The mirror's base works for any root, also ``/``."""
    client = zk_chroot.connect()
    assert client.client is not None
    events: list[tuple[int, str]] = []
    arm(client.client, "/", events)
    client.client.create("/top", b"x")
    client.client.set("/top", b"y")
    client.client.delete("/top")
    wait_for(lambda: events == [(CREATED, "/top"), (CHANGED, "/top"), (DELETED, "/top")])

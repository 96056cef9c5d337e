"""The connection breaks, or the server refuses, at the worst moment; nothing is taken for gone
that was only not read.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.exceptions import ConnectionDropped, ConnectionLoss, NoAuthError, OperationTimeoutError
from kazoo.protocol.connection import _CONNECTION_DROP, _SESSION_EXPIRED
from kazoo.protocol.serialization import Create, GetChildren2, GetData, Transaction

from nodepool.launcher import NodePool
from nodepool.web.server import WebApp
from nodepool.zk import ZooKeeperClient, paths
from nodepool.zk.components import LauncherComponent, PoolComponent
from nodepool.zk.connection.protocol import AddWatch
from nodepool.zk.connection.reply import Reply
from nodepool.zk.locks.turn import TurnLock
from nodepool.zk.writer import Txn
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for
from tests.integration.zk.test_mirror import make_node
from tests.support.faults.launcher import Proxy
from tests.support.launcher import LauncherBench, config, provider
from tests.world.directed.test_metastatic import backing_nodes, setup, slot


class Answers:
    """Between the server and our client: answers are lost with the connection, or become
    refusals.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kazoo: Any) -> None:
        self._connection = kazoo._connection
        self._real = self._connection._read_response
        self._match: Callable[[Any], bool] | None = None
        self._refusal: BaseException | None = None
        self._left = 0
        self.hit: list[Any] = []
        monkeypatch.setattr(self._connection, "_read_response", self._answer)

    def spoil(
        self, match: Callable[[Any], bool], times: int = 1, refusal: BaseException | None = None
    ) -> None:
        """The next answers to matching requests: the server has done its work, we do not hear of
        it (or of a refusal).
        """
        self._left, self._refusal, self._match = times, refusal, match

    def _answer(self, header: Any, message: bytes, offset: int) -> Any:
        request, reply, _xid = self._connection.client._pending[0]
        if self._match is None or self._left <= 0 or not self._match(request):
            return self._real(header, message, offset)
        self._connection.client._pending.popleft()
        self._left -= 1
        self.hit.append(request)
        if self._refusal is not None:
            reply.set_exception(self._refusal)
            return None
        # As kazoo does it: those who wait hear of it before the state changes.
        reply.set_exception(ConnectionLoss())
        raise ConnectionDropped("lost by the test")


def below(kind: type, path: str) -> Callable[[Any], bool]:
    return lambda request: isinstance(request, kind) and request.path.endswith(path)


@pytest.fixture
def answers(zk: Any, monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(monkeypatch, zk.kazoo_client)


@pytest.fixture
def wait_back(zk: Any) -> Callable[[], None]:
    """Waits until the connection has been lost and made again."""
    states: list[str] = []
    zk.client.state_listeners.append(states.append)
    return lambda: wait_for(
        lambda: states[-1:] == ["CONNECTED"] and zk.synced, what="the connection is back"
    )  # type: ignore[no-any-return]


def watch_nodes(zk: Any) -> tuple[list[str], list[bool]]:
    """Nodes announced as gone, and what the mirror was connected to at each completion."""
    gone: list[str] = []
    synced: list[bool] = []
    zk.node_tree.listeners.append(
        lambda node_id, old, new: gone.append(node_id) if new is None else None
    )
    zk.node_tree.sync_listeners.append(lambda: synced.append(len(zk.node_tree.nodes) == 8))
    return gone, synced


@pytest.mark.spec("issue 11, B2: the connection breaks during re-synchronisation")
@pytest.mark.parametrize("what", [AddWatch, GetChildren2, GetData])
def test_a_break_while_reading_empties_nothing(
    zk: Any, zk_chroot: Chroot, answers: Answers, what: type, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [make_node() for _ in range(8)]
    for node in nodes:
        zk.storeNode(node)
    gone, synced = watch_nodes(zk)
    answers.spoil(below(what, paths.node(nodes[3].id) if what is GetData else paths.NODES), times=2)
    zk.kazoo_client._call(_CONNECTION_DROP, None)
    wait_for(
        lambda: len(answers.hit) == 2 and zk.connected and zk.synced,
        what="synchronised at the third try",
    )
    assert (gone, synced) == ([], [True])
    assert [node.id for node in zk.node_tree.snapshot()] == [node.id for node in nodes]
    assert "3.6" not in caplog.text
    other = zk_chroot.connect().client
    other.delete(paths.node(nodes[0].id))
    wait_for(lambda: gone == [nodes[0].id], what="events are followed")


@pytest.mark.spec("issue 11, B2: any other error of a listing empties the mirror likewise")
@pytest.mark.parametrize("what", [AddWatch, GetChildren2, GetData])
def test_a_refused_reading_is_tried_again(
    zk: Any, answers: Answers, what: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.zk.mirror.tree.READ_AGAIN", 0.1)
    nodes = [make_node() for _ in range(8)]
    for node in nodes:
        zk.storeNode(node)
    gone, synced = watch_nodes(zk)
    answers.spoil(
        below(what, paths.node(nodes[3].id) if what is GetData else paths.NODES),
        times=2,
        refusal=OperationTimeoutError(),
    )
    zk.kazoo_client._call(_CONNECTION_DROP, None)
    wait_for(
        lambda: len(answers.hit) == 2 and zk.connected and zk.synced,
        what="synchronised at the third try",
    )
    assert (gone, synced) == ([], [True])


@pytest.mark.spec("issue 11, B2: a change whose reading fails is not forgotten")
def test_a_refused_reading_of_a_change_is_tried_again(
    zk: Any, zk_chroot: Chroot, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.zk.mirror.tree.READ_AGAIN", 0.1)
    other = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    node = make_node()
    zk.storeNode(node)
    answers.spoil(below(GetData, paths.node(node.id)), refusal=OperationTimeoutError())
    theirs = other.getNode(node.id)
    theirs.state = "hold"
    other.storeNode(theirs)
    wait_for(lambda: answers.hit and zk.synced and zk.getCachedNode(node.id).state == "hold")


def test_a_record_that_we_may_not_read_concerns_itself_only(zk: Any, answers: Answers) -> None:
    nodes = [make_node() for _ in range(3)]
    for node in nodes:
        zk.storeNode(node)
    path = paths.node(nodes[1].id)
    answers.spoil(below(GetData, path), refusal=NoAuthError())
    zk.kazoo_client._call(_CONNECTION_DROP, None)
    wait_for(lambda: answers.hit and zk.connected and zk.synced)
    assert [node.id for node in zk.node_tree.snapshot()] == [nodes[0].id, nodes[2].id]
    assert "may not read" in zk.node_tree.bad[path]


@pytest.mark.spec("issue 11, C11: what was bad and vanished while we were cut off leaves no trace")
@pytest.mark.parametrize(
    "tree, path",
    [
        ("node_tree", f"{paths.NODES}/0000000077"),
        ("request_tree", f"{paths.REQUESTS}/nonsense"),
        ("image_tree", f"{paths.IMAGES}/i/builds/b"),
        ("component_tree", f"{paths.COMPONENTS}/pool/bad"),
        ("progress_tree", "/nodepool/x-progress/builds/b"),
    ],
)
def test_bad_records_that_vanish_while_cut_off(
    zk: Any, zk_chroot: Chroot, tree: str, path: str
) -> None:
    mirror = getattr(zk, tree)
    if tree == "progress_tree":
        path = f"{mirror.root}/builds/b"
    other = zk_chroot.connect().client
    other.create(path, b"{broken", makepath=True)
    wait_for(lambda: set(mirror.bad) == {path})
    suspended = threading.Event()

    def removed(state: str) -> None:
        if state != "CONNECTED" and not suspended.is_set():
            other.delete(path)
            suspended.set()

    zk.client.state_listeners.append(removed)
    zk.kazoo_client._call(_CONNECTION_DROP, None)
    wait_for(lambda: suspended.is_set() and zk.connected and zk.synced)
    assert (mirror.bad, mirror._bad_versions) == ({}, {})


def create_of(part: str) -> Callable[[Any], bool]:
    """A transaction that creates something of this name."""
    return lambda request: (
        isinstance(request, Transaction)
        and any(isinstance(op, Create) and part in op.path for op in request.operations)
    )


@pytest.mark.spec(
    "issue 11, B12: the lock of a backing node outlives sessions, also when the answer to its "
    "taking is lost"
)
def test_the_lock_of_a_backing_node_is_not_thrown_away(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pool = bench.start(setup(slot()))
    answers = Answers(monkeypatch, pool.zk.kazoo_client)
    # The metastatic driver's contender is persistent.
    answers.spoil(
        lambda request: (
            isinstance(request, Transaction)
            and any(
                isinstance(op, Create) and "__lock__" in op.path and not op.flags & 1
                for op in request.operations
            )
        )
    )
    _request, (node,) = bench.fulfilled("user-label")
    assert answers.hit
    (backing,) = backing_nodes(bench)
    directory = paths.node_lock(backing.id)
    (contender,) = bench.zuul.client.get_children(directory)
    # Everything that follows the reconnect has been done once another write has been answered.
    wait_for(
        lambda: not pool.zk.kazoo_client.abandoned._paths,
        what="nothing is to be given back any more",
    )
    assert bench.zuul.client.get_children(directory) == [contender]
    assert bench.node(node.id).state == "ready"
    assert [n.id for n in backing_nodes(bench)] == [backing.id]
    assert "Releasing" not in caplog.text and "Deleting node" not in caplog.text, (
        "another one was made"
    )


@pytest.mark.spec("issue 11, B12: a persistent contender that was not obtained does not stay")
def test_a_persistent_contender_that_was_given_up_is_removed(
    zk: Any, answers: Answers, wait_back: Callable[[], None]
) -> None:
    node = make_node()
    zk.storeNode(node)
    zk.kazoo_client.create(paths.node_lock(node.id))
    answers.spoil(create_of("__lock__"))
    with pytest.raises(ConnectionLoss):
        zk.lockNode(zk.getNode(node.id), blocking=False, ephemeral=False, identifier="p")
    wait_back()
    wait_for(lambda: zk.kazoo_client.get_children(paths.node_lock(node.id)) == [])


@pytest.mark.spec("issue 11, C6: a mark is given back by its exact name, and only by its owner")
def test_marks_of_others_stay(
    zk: Any, zk_chroot: Chroot, answers: Answers, wait_back: Callable[[], None]
) -> None:
    other = zk_chroot.connect().client
    theirs = f"{paths.ELECTIONS}/min-ready-small"
    longer = [f"{theirs}-8g", f"{theirs}-8g-0000000001"]
    for path in [theirs, longer[0]]:
        other.create(path, ephemeral=True, makepath=True)
    zk.kazoo_client.create(longer[1], ephemeral=True)
    # Refused, as theirs is there; but we do not hear of it.
    answers.spoil(
        lambda request: isinstance(request, Create) and request.path.endswith("min-ready-small")
    )
    with pytest.raises(ConnectionLoss):
        TurnLock(zk.kazoo_client, "us", "min-ready", "small").take()
    wait_back()
    wait_for(lambda: not zk.kazoo_client.abandoned._paths)
    zk.kazoo_client.exists("/")  # all that was sent before is answered
    assert all(other.exists(path) for path in [theirs, *longer])


def test_a_mark_that_may_be_ours_is_released(
    zk: Any, answers: Answers, wait_back: Callable[[], None]
) -> None:
    mark = TurnLock(zk.kazoo_client, "us", "min-ready", "small")
    answers.spoil(
        lambda request: isinstance(request, Create) and request.path.endswith("min-ready-small")
    )
    with pytest.raises(ConnectionLoss):
        mark.take()
    wait_back()
    wait_for(lambda: zk.kazoo_client.exists(mark.path) is None)
    assert mark.take()


@pytest.mark.spec("issue 11, C3: after a refused batch its parts go in their order")
def test_parts_of_a_refused_batch_keep_their_order(zk: Any) -> None:
    kazoo, writer = zk.kazoo_client, zk.writer
    kazoo.create("/order")
    written: list[str] = []
    done = threading.Event()

    def part(name: str) -> Txn:
        txn = Txn(kazoo)
        txn.create(f"/order/{name}-", sequence=True)
        if name == "x":
            txn.check("/nowhere")
        return txn

    def answered(results: list[Any] | None, _error: BaseException | None) -> None:
        if results is not None:
            written.append(results[0])
        if len(written) == 3:
            done.set()

    with writer._lock:
        writer._in_flight += writer.MAX_IN_FLIGHT  # all are collected
    for name in "abxc":
        writer.submit(part(name), answered)
    with writer._lock:
        writer._in_flight -= writer.MAX_IN_FLIGHT
    writer._flush()
    assert done.wait(10)
    names = sorted(kazoo.get_children("/order"), key=lambda name: name[-10:])
    assert [name[0] for name in names] == ["a", "b", "c"]


def pool_entries(kazoo: Any, session: int | None = None) -> list[Any]:
    parent = f"{paths.COMPONENTS}/pool"
    read = [kazoo.get(f"{parent}/{name}") for name in kazoo.get_children(parent)]
    return [json.loads(data) for data, stat in read if session in (None, stat.ephemeralOwner)]


def pool_component(zk: Any, **content: Any) -> PoolComponent:
    component = PoolComponent(zk.client, "host")
    component.content.update(id="the-pool", **content)
    return component


REGISTRATION = "issue 11, B11: a registration whose answer is lost makes no second entry"


@pytest.mark.spec(REGISTRATION)
def test_a_doubtful_registration_is_found_again(
    zk: Any, zk_chroot: Chroot, answers: Answers, wait_back: Callable[[], None]
) -> None:
    other = zk_chroot.connect().client
    pool_component(zk, state="another pool").register()
    answers.spoil(
        lambda request: isinstance(request, Create) and request.path.endswith("/pool/host")
    )
    second = PoolComponent(zk.client, "host")
    second.content["id"] = "second"
    with pytest.raises(ConnectionLoss):
        second.register()
    wait_back()
    again = PoolComponent(zk.client, "host")  # as the pool worker does it
    again.content.update(id="second", paused=True)
    again.register()
    assert sorted((entry["id"], entry["paused"]) for entry in pool_entries(other)) == [
        ("second", True),
        ("the-pool", False),
    ]
    again.update(paused=False)
    assert not any(entry["paused"] for entry in pool_entries(other))
    again.unregister()
    assert [entry["id"] for entry in pool_entries(other)] == ["the-pool"]


@pytest.mark.spec(REGISTRATION)
def test_a_doubtful_registration_after_a_lost_session(
    zk: Any, zk_chroot: Chroot, answers: Answers
) -> None:
    other = zk_chroot.connect().client
    component = pool_component(zk)
    component.register()
    answers.spoil(
        lambda request: isinstance(request, Create) and request.path.endswith("/pool/host")
    )
    zk.kazoo_client._call(_SESSION_EXPIRED, None)
    wait_for(lambda: answers.hit and zk.connected and component._session == zk.client.session_id)
    component.update(paused=True)
    # (The server does not know that the old session is lost.)
    assert [entry["paused"] for entry in pool_entries(other, zk.client.session_id)] == [True]


def test_component_without_a_mirror_registers_again_in_a_new_session(
    zk: Any, zk_chroot: Chroot
) -> None:
    owner = ZooKeeper(
        zk_chroot.connect(), enable_cache=False
    )  # nobody reports that the entry no longer exists
    component = pool_component(owner)
    component.register()
    lost = owner.client.session_id
    owner.kazoo_client._call(_SESSION_EXPIRED, None)
    wait_for(lambda: owner.client.session_id not in (None, lost), what="a new session")
    wait_for(
        lambda: pool_entries(zk.kazoo_client, owner.client.session_id),
        what="an entry of the new session",
    )


@pytest.mark.spec(
    "issue 11, B10: a connection that breaks in the first seconds leaves no second client behind"
)
@pytest.mark.parametrize(
    "where",
    ["nodepool.zk.zookeeper.ZooKeeper.start", "nodepool.zk.components.LauncherComponent.register"],
)
def test_a_start_that_breaks_leaves_no_client_behind(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    clients: list[Any] = []
    begin = ZooKeeperClient.connect
    monkeypatch.setattr(
        ZooKeeperClient,
        "connect",
        lambda self, timeout=None: (clients.append(self), begin(self, timeout))[1],
    )
    module, _, name = where.rpartition(".")
    owner = {"ZooKeeper": ZooKeeper, "LauncherComponent": LauncherComponent}[
        module.rpartition(".")[2]
    ]
    real, tries = getattr(owner, name), []

    def breaks(self: Any) -> None:
        tries.append(self)
        real(self)
        if len(tries) == 1:
            raise ConnectionLoss

    monkeypatch.setattr(owner, name, breaks)
    pool = bench.start(config(provider()))
    first, second = clients
    assert first.client is None and second.connected and pool.zk.client is second
    assert first.state_listeners == []
    assert len(pool.zk.kazoo_client.get_children(f"{paths.COMPONENTS}/launcher")) == 1
    bench.fulfilled("fake-label")


@pytest.mark.spec(
    "issue 11, B7: dashboards do not silence /ready and /metrics while ZooKeeper is away"
)
def test_pages_during_an_outage(bench: LauncherBench) -> None:
    proxy = Proxy(int(bench.chroot.hosts.rpartition(":")[2]))
    pool = webapp = None

    def get(path: str) -> int:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{webapp.server.socket.getsockname()[1]}{path}", timeout=5
            ) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    try:
        path = bench.chroot.config(config(provider()), hosts=proxy.host, timeout=3.0)
        pool = NodePool(None, path)
        webapp = WebApp(pool, 0, "127.0.0.1")
        pool.start()
        webapp.start()
        bench.wait_ready(pool)
        assert [get(path) for path in ("/ready", "/node-list")] == [200, 200]
        proxy.set("hold")
        wait_for(lambda: not pool.zk.synced, what="the silence is noticed")
        lists = ["/node-list", "/image-list", "/request-list", "/label-list", "/problem-list"]
        assert [get(path) for path in lists] == [503] * len(lists)
        assert (get("/ready"), get("/metrics")) == (503, 200)
        proxy.set("open")
        wait_for(lambda: pool.zk.synced and get("/node-list") == 200)
    finally:
        proxy.set("open")
        for part in (webapp, pool):
            if part is not None:
                part.stop()
        proxy.stop()


@pytest.mark.spec("issue 11, C5: a silent partition is noticed although requests go on")
def test_silence_is_noticed_while_requests_are_sent(zk_chroot: Chroot) -> None:
    proxy = Proxy(int(zk_chroot.hosts.rpartition(":")[2]))
    try:
        client = zk_chroot.connect(timeout=3.0, hosts=proxy.host)
        states: list[str] = []
        client.state_listeners.append(states.append)
        read = GetData(client.client.full_path("/"), None)
        reader = threading.Event()

        def keep_reading() -> None:
            while not reader.wait(0.1):
                client.client.submit(read, Reply(lambda *_answer: None))

        thread = threading.Thread(target=keep_reading)
        thread.start()
        try:
            proxy.set("hold")
            wait_for(lambda: "SUSPENDED" in states, what="the silence is noticed")
        finally:
            proxy.set("open")
            reader.set()
            thread.join()
        wait_for(lambda: client.connected)
    finally:
        proxy.set("open")
        for client in zk_chroot.clients:
            client.disconnect()
        zk_chroot.clients.clear()
        proxy.stop()


@pytest.mark.spec(
    "issue 11, C12: a launcher that is stopped while its connection stands still ends with all its "
    "threads"
)
def test_stop_while_zookeeper_is_silent(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(int(bench.chroot.hosts.rpartition(":")[2]))
    reached = threading.Event()
    start = ZooKeeper.start

    def silent(self: Any) -> None:
        proxy.set("hold")
        reached.set()
        start(self)

    monkeypatch.setattr(ZooKeeper, "start", silent)
    pool = NodePool(None, bench.chroot.config(config(provider()), hosts=proxy.host, timeout=3.0))
    try:
        pool.start()
        assert reached.wait(10)
        pool.stop()
        pool.join(5)
        assert not pool.is_alive()
    finally:
        proxy.set("open")
        proxy.stop()


def entries_of(zk: Any) -> list[str]:
    return list(zk.kazoo_client.get_children(f"{paths.COMPONENTS}/pool"))


@pytest.mark.parametrize(
    "mirrored", [True, False], ids=["noticed by the mirror", "noticed at the next update"]
)
def test_removed_component_registers_again(zk: Any, zk_chroot: Chroot, mirrored: bool) -> None:
    owner = zk if mirrored else ZooKeeper(zk_chroot.connect(), enable_cache=False)
    component = pool_component(owner)
    component.register()
    for round_number in range(2):  # it works more than once
        (name,) = entries_of(zk)
        zk.kazoo_client.delete(f"{paths.COMPONENTS}/pool/{name}")
        if not mirrored:
            component.update(priority=round_number)
        wait_for(lambda: entries_of(zk) not in ([], [name]), what="the entry created again")  # noqa: B023
        assert len(entries_of(zk)) == 1
    component.unregister()
    assert entries_of(zk) == []


def test_component_that_is_removed_before_the_mirror_has_read_it_registers_again(zk: Any) -> None:
    component = pool_component(zk)
    component.register()
    (name,) = entries_of(zk)
    wait_for(lambda: zk.component_tree.components)
    zk.component_tree.components.clear()
    zk.kazoo_client.delete(f"{paths.COMPONENTS}/pool/{name}")
    wait_for(lambda: entries_of(zk) not in ([], [name]), what="the entry created again")
    component.unregister()


def test_component_that_is_removed_before_it_knows_its_entry_registers_again(
    zk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = zk.kazoo_client.create, []

    def create(path: str, *args: Any, **options: Any) -> str:
        made = str(real(path, *args, **options))
        if not removed:
            removed.append(made)
            told = threading.Event()
            zk.client.component_listeners.append(lambda _path: told.set())
            zk.kazoo_client.delete(made)
            assert told.wait(20)
        return made

    monkeypatch.setattr(zk.kazoo_client, "create", create)
    component = pool_component(zk)
    component.register()
    wait_for(lambda: len(entries_of(zk)) == 1, what="the entry created again")
    assert component.path not in removed
    component.unregister()


def test_registration_is_repeated_after_any_error(zk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.zk.components.REGISTER_PAUSE", 0.05)
    component = pool_component(zk)
    component.register()
    errors: list[str] = []
    real = zk.kazoo_client.create

    def create(path: str, *args: Any, **options: Any) -> Any:
        if len(errors) < 2:
            errors.append(path)
            raise ValueError("induced")
        return real(path, *args, **options)

    monkeypatch.setattr(zk.kazoo_client, "create", create)
    (name,) = entries_of(zk)
    zk.kazoo_client.delete(f"{paths.COMPONENTS}/pool/{name}")
    wait_for(lambda: len(entries_of(zk)) == 1 and len(errors) == 2, what="the entry created again")
    component.unregister()

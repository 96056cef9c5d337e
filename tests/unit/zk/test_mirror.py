"""What the mirror reads, and when, while its own writes and events of other clients cross each
other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.exceptions import KazooException, NoAuthError, NoNodeError
from kazoo.protocol.serialization import GetChildren2, GetData
from kazoo.protocol.states import KazooState, ZnodeStat

from nodepool.zk.connection.protocol import CHANGED, CREATED
from nodepool.zk.connection.reply import Reply
from nodepool.zk.mirror import nodes
from nodepool.zk.mirror.nodes import NodeTree
from nodepool.zk.records import Node

NODES = "/nodepool/nodes"
ONE, TWO = f"{NODES}/0000000001", f"{NODES}/0000000002"


def stat(zxid: int, version: int = 0) -> ZnodeStat:
    return ZnodeStat(1, zxid, 0, 0, version, 0, 0, 0, 0, 0, zxid)


def data(state: str) -> bytes:
    return json.dumps({"state": state}).encode()


class Server:
    """Keeps the requests of the mirror until a test answers them."""

    connected = True

    def __init__(self) -> None:
        self.client = self.kazoo = self
        self.state_listeners: list[Callable[[str], Any]] = []
        self.requests: list[tuple[Any, Reply]] = []
        self.armed: list[Reply] = []
        #: Why the mirror gave up the session.
        self.ended: list[str] = []
        self.end_session = self.ended.append
        #: The newest change of the root's children, such as a deletion.
        self.newest = 9
        self.event: Callable[[int, str], Any] = lambda _kind, _path: None

    def add_persistent_watch(self, _root: str, callback: Callable[[int, str], Any]) -> None:
        self.event = callback

    def arm_persistent_watch(self, _root: str, reply: Reply) -> None:
        self.armed.append(reply)

    def full_path(self, path: str) -> str:
        return path

    def submit(self, request: Any, reply: Reply) -> None:
        self.requests.append((request, reply))

    def reconnect(self) -> None:
        for state in (KazooState.SUSPENDED, KazooState.CONNECTED):
            for listener in self.state_listeners:
                listener(state)

    def asked(self) -> list[str]:
        """The paths of records that are being read."""
        return [request.path for request, _reply in self.requests if isinstance(request, GetData)]

    def list_answered(self, *names: str) -> None:
        """Answer the oldest listing."""
        entry = next(entry for entry in self.requests if isinstance(entry[0], GetChildren2))
        self.requests.remove(entry)
        entry[1].set((list(names), stat(self.newest)))

    def read_answered(self, path: str, state: str, zxid: int) -> None:
        entry = next(
            entry
            for entry in self.requests
            if isinstance(entry[0], GetData) and entry[0].path == path
        )
        self.requests.remove(entry)
        entry[1].set((data(state), stat(zxid)))

    def synchronise(self, **nodes: str) -> None:
        self.armed.pop().set()
        self.list_answered(*nodes)
        for name, state in nodes.items():
            self.read_answered(f"{NODES}/{name}", state, 5)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def tree(server: Server) -> NodeTree:
    client: Any = server
    found = NodeTree(client)
    found.start()
    server.synchronise(**{"0000000001": "ready"})
    assert found.synced.is_set() and not server.requests
    return found


def node(state: str) -> Node:
    made = Node()
    made.state = state
    return made


def state_of(tree: NodeTree, path: str) -> str | None:
    found = tree.get(path.rpartition("/")[2])
    return found.state if found is not None else None


def test_concurrent_creation_of_another_client_is_read_after_the_answer(
    tree: NodeTree, server: Server
) -> None:
    three = f"{NODES}/0000000003"
    tree.expect(f"{NODES}/", True)
    server.event(CREATED, TWO)
    server.event(CREATED, three)
    assert server.asked() == [], "either may be ours"
    tree.settle(f"{NODES}/", node("init"), three, 7)
    tree.settled()
    assert server.asked() == [TWO]
    server.read_answered(TWO, "hold", 6)
    assert (state_of(tree, TWO), state_of(tree, three)) == ("hold", "init")


def test_record_that_another_client_writes_too_is_read_after_the_answer(
    tree: NodeTree, server: Server
) -> None:
    tree.expect(ONE, False)
    server.event(CHANGED, ONE)
    server.event(CHANGED, ONE)
    assert server.asked() == []
    tree.settle(ONE, node("in-use"), stat(6, 1), 6)
    assert server.asked() == [ONE]
    server.read_answered(ONE, "used", 7)
    assert state_of(tree, ONE) == "used"


def test_record_that_another_client_changed_is_read_when_our_write_is_refused(
    tree: NodeTree, server: Server
) -> None:
    tree.expect(ONE, False)
    server.event(CHANGED, ONE)
    assert server.asked() == []
    tree.settle(ONE, None, None, 0)
    assert server.asked() == [ONE]


def test_our_own_write_is_shown_without_reading(tree: NodeTree, server: Server) -> None:
    tree.expect(ONE, False)
    server.event(CHANGED, ONE)
    tree.settle(ONE, node("in-use"), stat(6, 1), 6)
    assert server.asked() == [] and state_of(tree, ONE) == "in-use"


def test_record_that_vanished_during_a_lost_connection_is_forgotten(
    tree: NodeTree, server: Server
) -> None:
    server.reconnect()
    assert not tree.synced.is_set() and state_of(tree, ONE) == "ready"
    server.synchronise()
    assert tree.synced.is_set() and state_of(tree, ONE) is None


def test_session_is_given_up_if_the_data_are_older_than_before(
    tree: NodeTree, server: Server
) -> None:
    server.newest = 4
    server.reconnect()
    server.synchronise(**{"0000000001": "ready"})
    assert server.ended == [f"the data of {NODES} are older than before"]
    assert not tree.synced.is_set()
    for listener in server.state_listeners:
        listener(KazooState.LOST)
    server.reconnect()
    server.synchronise(**{"0000000001": "ready"})
    assert len(server.ended) == 1 and tree.synced.is_set()


@pytest.mark.parametrize("error", [NoNodeError, NoAuthError])
def test_session_is_kept_if_the_newest_record_cannot_be_read(
    tree: NodeTree, server: Server, error: type[KazooException]
) -> None:
    server.event(CHANGED, ONE)
    server.read_answered(ONE, "in-use", 12)
    server.reconnect()
    server.armed.pop().set()
    server.list_answered("0000000001")
    _request, reply = server.requests.pop()
    reply.set_exception(error())
    assert server.ended == [] and tree.synced.is_set()


def test_session_is_given_up_if_our_own_write_is_lost(tree: NodeTree, server: Server) -> None:
    tree.expect(ONE, False)
    tree.settle(ONE, node("in-use"), stat(12, 1), 12)
    server.reconnect()
    server.synchronise(**{"0000000001": "ready"})
    assert len(server.ended) == 1


def test_answers_of_an_earlier_reading_do_not_count(tree: NodeTree, server: Server) -> None:
    server.reconnect()
    server.armed.pop().set()
    server.reconnect()
    server.armed.pop().set()
    server.list_answered("0000000001")
    assert server.asked() == [] and not tree.synced.is_set()
    server.list_answered()
    assert tree.synced.is_set() and state_of(tree, ONE) is None


def test_expected_events_are_forgotten_with_the_connection(tree: NodeTree, server: Server) -> None:
    tree.expect(ONE, False)
    server.reconnect()
    server.synchronise(**{"0000000001": "ready"})
    server.event(CHANGED, ONE)
    assert server.asked() == [ONE]


RECORD = {
    "state": "ready",
    "provider": "p",
    "pool": "main",
    "tenant_name": "t",
    "type": ["a"],
    "resources": {"cores": 2},
}


def sums(tree: NodeTree) -> list[object]:
    """All that limits are compared with, without empty ones."""
    usage = [
        tree.measured.places,
        tree.measured.tenants,
        tree.unmeasured.places,
        tree.unmeasured.tenants,
    ]
    return [*({key: count for key, count in one.items() if count} for one in usage), tree.counts()]


@pytest.mark.parametrize(
    "change",
    [
        {"state": "deleting"},
        {"provider": "q"},
        {"pool": "other"},
        {"tenant_name": "u"},
        {"resources": {"cores": 3}},
        {"resources": None},
        {"resources": None, "type": ["b"]},
    ],
    ids=str,
)
def test_sums_follow_each_change_of_a_node(server: Server, change: dict[str, Any]) -> None:
    client: Any = server
    followed, fresh = NodeTree(client), NodeTree(client)
    before = {**RECORD, **({"resources": None} if "type" in change else {})}
    followed.store(["0000000009"], f"{NODES}/0000000009", json.dumps(before).encode(), stat(5))
    for tree in (followed, fresh):
        tree.store(
            ["0000000009"],
            f"{NODES}/0000000009",
            json.dumps({**before, **change}).encode(),
            stat(6, 1),
        )
    assert sums(followed) == sums(fresh)


def test_nodes_to_be_released_are_known_without_looking_at_all(
    tree: NodeTree, server: Server
) -> None:
    changes: list[tuple[dict[str, Any], bool]] = [
        ({"state": "in-use", "allocated_to": "100-1"}, False),
        ({"state": "used", "allocated_to": "100-1"}, True),
        ({"state": "deleting"}, True),
        ({"state": "ready"}, False),
        ({"state": "ready", "allocated_to": "100-1"}, True),
        ({"state": "hold"}, True),
        ({"state": "building", "allocated_to": "100-1"}, False),
        ({"state": "deleting"}, True),
    ]
    for zxid, (content, wanted) in enumerate(changes, 10):
        server.event(CHANGED, ONE)
        _request, reply = server.requests.pop()
        reply.set((json.dumps(content).encode(), stat(zxid)))
        assert [found.state for found in tree.to_release()] == [content["state"]] * wanted
    tree.vanished(["0000000001"], ONE)
    assert tree.to_release() == [] and not tree.unreleased


def with_resources(tree: NodeTree, *texts: str) -> list[Node]:
    """Show nodes with these resources; return their records."""
    for number, text in enumerate(texts):
        name = f"{number + 10:010}"
        content = f'{{"state": "ready", "resources": {text}}}'.encode()
        tree.take([name], f"{NODES}/{name}", content, stat(number + 1))
    return [each for each in tree.snapshot() if each.id != "0000000001"]


def test_equal_resources_of_mirrored_nodes_are_kept_once(tree: NodeTree) -> None:
    one, other = with_resources(tree, *['{"cores": 2, "ram": 4096}'] * 2)
    assert one.resources is other.resources == {"cores": 2, "ram": 4096}
    changed = other.copy()
    assert changed.resources is not None
    changed.resources["cores"] = 8
    assert one.resources == {"cores": 2, "ram": 4096}


@pytest.mark.parametrize(
    "text",
    [
        '{"cores": 1}',
        '{"cores": 1.0}',
        '{"cores": true}',
        '{"cores": [1]}',
        '{"a": "cores", "cores": "a"}',
        '{"cores": 1, "ram": 2}',
        '{"ram": 2, "cores": 1}',
        "{}",
        "[4]",
        "null",
    ],
)
def test_resources_that_differ_in_type_or_order_are_shown_as_they_are(
    tree: NodeTree, text: str
) -> None:
    others = ['{"cores": 1}', '{"cores": 1, "ram": 2}', '{"a": "cores", "cores": "a"}']
    found = with_resources(tree, *others, text)[-1]
    assert json.dumps(found.copy().resources) == json.dumps(found.resources) == text


def test_number_of_shared_resources_is_limited(
    tree: NodeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MOST_RESOURCES", 2)
    found = with_resources(tree, *[f'{{"cores": {count}}}' for count in range(5)])
    assert [node.resources for node in found] == [{"cores": count} for count in range(5)]
    assert len(nodes._RESOURCES) <= 2


def test_nodes_to_be_released_survive_a_record_that_somebody_has_changed(tree: NodeTree) -> None:
    content = b'{"state": "ready", "allocated_to": "100-0000000001"}'
    tree.take(["0000000010"], f"{NODES}/0000000010", content, stat(20))
    (shown,) = tree.to_release()
    shown.allocated_to = None
    tree.vanished(["0000000010"], f"{NODES}/0000000010")
    assert tree.to_release() == []

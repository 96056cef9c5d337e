"""The mirror: additions, changes and deletions are followed, also those missed while cut off."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from kazoo.client import KazooState
from kazoo.protocol.states import KeeperState

from nodepool.exceptions import ZKLockException
from nodepool.zk import paths, reading, reports
from nodepool.zk import zookeeper as zk_module
from nodepool.zk.components import PoolComponent
from nodepool.zk.mirror.nodes import count_nodes
from nodepool.zk.mirror.requests import VERIFIER
from nodepool.zk.writer import Txn
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for


def make_node(**values: Any) -> zk_module.Node:
    node = zk_module.Node()
    node.state = zk_module.READY
    node.provider, node.pool, node.type = "p", "main", ["label"]
    for name, value in values.items():
        setattr(node, name, value)
    return node


@pytest.mark.spec("LAU-21: node_caching, tree_cache")
def test_own_and_foreign_changes_are_followed(zk: Any, zk_chroot: Chroot) -> None:
    other = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    node = make_node()
    zk.storeNode(node)
    assert zk.getCachedNode(node.id).state == "ready"
    reads = zk.node_tree.reads
    node.state = zk_module.HOLD
    zk.storeNode(node)
    assert zk.getCachedNode(node.id).state == "hold"
    assert zk.node_tree.reads == reads, "own writes must not be read back"
    theirs = other.getNode(node.id)
    theirs.state = zk_module.USED
    other.storeNode(theirs)
    wait_for(lambda: zk.getCachedNode(node.id).state == "used")
    second = make_node()
    other.storeNode(second)
    wait_for(lambda: zk.getCachedNode(second.id))
    other.deleteNode(second)
    wait_for(lambda: zk.getCachedNode(second.id) is None)
    assert zk.getNodes() == [node.id]


@pytest.mark.spec("LAU-21: node_cache_lock_handling")
def test_contenders_follow_locks(zk: Any, zk_chroot: Chroot) -> None:
    other = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    node = make_node()
    zk.storeNode(node)
    assert [*zk.node_tree.iter_free("p", "main", "label")] == [node.id]
    theirs = other.getNode(node.id)
    other.lockNode(theirs, blocking=False)
    wait_for(lambda: zk.getCachedNode(node.id).lock_contenders)
    assert [*zk.node_tree.iter_free("p", "main", "label")] == []
    with pytest.raises(ZKLockException, match=r"Did not get lock on .*"):
        zk.lockNode(zk.getNode(node.id), blocking=False)
    other.unlockNode(theirs)
    wait_for(lambda: [*zk.node_tree.iter_free("p", "main", "label")] == [node.id])


@pytest.mark.spec("BLD-25.7")
def test_machine_of_a_verification_is_not_free(zk: Any) -> None:
    node = make_node()
    node.requestor = VERIFIER
    zk.storeNode(node)
    wait_for(lambda: zk.getCachedNode(node.id))
    assert [*zk.node_tree.iter_free("p", "main", "label")] == []
    assert zk.node_tree.counted.free["label"] == 0 and not zk.countNodes().idle


@pytest.mark.spec("ZK-14: after suspension or loss the cache is re-synchronised completely")
def test_changes_missed_during_a_lost_session_are_repaired(zk: Any, zk_chroot: Chroot) -> None:
    other = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    keep, change, remove = make_node(), make_node(), make_node()
    for node in (keep, change, remove):
        zk.storeNode(node)
    states: list[str] = []
    zk.client.state_listeners.append(states.append)
    from kazoo.protocol.connection import _SESSION_EXPIRED

    zk.kazoo_client._call(_SESSION_EXPIRED, None)
    wait_for(lambda: KazooState.LOST in states)
    theirs = other.getNode(change.id)
    theirs.state = zk_module.HOLD
    other.storeNode(theirs)
    other.deleteNode(other.getNode(remove.id))
    added = make_node()
    other.storeNode(added)
    wait_for(lambda: zk.connected and zk.synced)
    wait_for(lambda: {n.id for n in zk.node_tree.snapshot()} == {keep.id, change.id, added.id})
    assert zk.getCachedNode(change.id).state == "hold"
    later = make_node()
    other.storeNode(later)
    wait_for(lambda: zk.getCachedNode(later.id), what="events after the reconnect")


@pytest.mark.spec("issue bad input: each affects only its own record")
def test_broken_records_are_set_aside(
    zk: Any, zk_chroot: Chroot, caplog: pytest.LogCaptureFixture
) -> None:
    other = zk_chroot.connect().client
    good = make_node()
    zk.storeNode(good)
    for data in (
        b"{broken",
        b"[]",
        b'{"state": "melted"}',
        b'{"type": {"a": 1}, "state": "ready"}',
    ):
        other.create(f"{paths.NODES}/", data, sequence=True)
    other.create(f"{paths.REQUESTS}/nonsense", b'{"state": "requested"}')
    other.create(
        f"{paths.REQUESTS}/100-0000000007", b'{"state": "requested", "relative_priority": null}'
    )
    empty = other.create(f"{paths.NODES}/", b"", sequence=True)
    wait_for(lambda: len(zk.node_tree.bad) == 4 and len(zk.request_tree.bad) == 1)
    wait_for(lambda: zk.node_tree.empty)
    assert zk.node_tree.empty == {empty.rsplit("/", 1)[1]}
    assert [n.id for n in zk.nodeIterator()] == [good.id]
    assert zk.getCachedRequest("100-0000000007").relative_priority == 0
    assert sum("Ignoring" in r.message for r in caplog.records) == 5


def test_parts_of_cores_add_up(zk: Any) -> None:
    """As decimals do: limits are compared with these sums, and people see what is left."""
    nodes = [make_node(resources={"cores": 0.1}) for _ in range(19)]
    for node in nodes:
        zk.storeNode(node)
    assert zk.node_tree.usage("p") == {"cores": 1.9}
    for key in range(3):
        zk.reservations.reserve(key, "p", "main", None, {"cores": 0.1})
    assert zk.reservations.provider("p") == {"cores": 0.3}
    for node in nodes:
        zk.deleteNode(node)
    wait_for(lambda: not zk.node_tree.usage("p"), what="nothing is left of them")


def test_counts_with_and_without_a_mirror(zk: Any) -> None:
    nodes = [
        make_node(pool="main"),
        make_node(pool="other", state="building"),
        make_node(pool="main", state="used"),
    ]
    for node in nodes:
        zk.storeNode(node)
    zk.deleteNode(nodes.pop())
    wait_for(lambda: len(zk.node_tree.nodes) == 2, what="one is gone")
    found = zk.countNodes()
    assert found.states == {"ready": 1, "building": 1} and found.pools == {
        ("p", "main"): 1,
        ("p", "other"): 1,
    }
    assert found.idle == {("p", "main", ("label",)): 1}
    assert found.providers == {"p": found.states} and found.labels == {"label": found.states}
    assert count_nodes(zk.readNodes()) == found


def test_counts_follow_states(zk: Any) -> None:
    node = make_node(resources={"cores": 2, "ram": 10}, tenant_name="t")
    zk.storeNode(node)
    assert zk.node_tree.usage("p") == {"cores": 2, "ram": 10}
    assert zk.node_tree.counted.free["label"] == 1
    node.allocated_to = "100-1"
    node.resources = {"cores": 5}
    zk.storeNode(node)
    assert zk.node_tree.usage("p", "main")["cores"] == 5
    assert zk.node_tree.counted.free["label"] == 0 and not zk.countNodes().idle
    assert zk.node_tree.by_request["100-1"] == {node.id}
    zk.deleteNode(node)
    wait_for(lambda: zk.getCachedNode(node.id) is None)
    assert not any(zk.node_tree.usage("p").values())
    assert not any(zk.node_tree.counted.states.values())


@pytest.mark.spec("issue 11, B14: merged transactions are limited by their bytes, too")
def test_large_transactions_concurrently(zk: Any) -> None:
    states: list[str] = []
    zk.client.client.add_listener(states.append)
    client, written = zk.writer._client, []
    for number in range(80):
        txn = Txn(client)
        txn.create(f"/large{number}", b"x" * 40_000)
        zk.writer.submit(txn, lambda results, error: written.append(error))
    wait_for(lambda: len(written) == 80, what="all answers")
    assert set(written) == {None}
    assert KazooState.SUSPENDED not in states


@pytest.mark.spec("issue 11, B14: merged transactions are limited by their bytes, too")
def test_small_transactions_are_merged(zk: Any) -> None:
    written: list[Any] = []
    before = zk.writer.sent
    for number in range(80):
        txn = Txn(zk.writer._client)
        txn.create(f"/small{number}", b"x" * 1000)
        zk.writer.submit(txn, lambda results, error: written.append(error))
    wait_for(lambda: len(written) == 80, what="all answers")
    assert set(written) == {None}
    assert zk.writer.sent - before < 20


@pytest.mark.spec("issue 11, users 8: the log tells when the connection is back")
def test_the_connection_is_back(zk: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    zk.client.client._session_callback(KeeperState.CONNECTING)
    wait_for(lambda: "suspended; no new work is started until it is restored" in caplog.text)
    zk.client.client._session_callback(KeeperState.CONNECTED)
    wait_for(lambda: "ZooKeeper connection: restored" in caplog.text)


@pytest.mark.spec("issue 11, B9: min-ready does not look at all nodes in use for each label")
def test_nodes_made_for_min_ready_are_known(zk: Any) -> None:
    from types import SimpleNamespace

    from nodepool.launcher.requests.minready import MinReady
    from nodepool.zk.mirror.requests import MIN_READY

    class NotWalked(defaultdict[str, set[str]]):
        def items(self) -> Any:
            raise AssertionError("all allocated nodes are looked at")

    worker = MinReady(SimpleNamespace(zk=zk))  # type: ignore[arg-type]
    label = SimpleNamespace(name="label")
    made = make_node(requestor=MIN_READY, allocated_to="900-0000000001")
    pool = PoolComponent(zk.client, "host")
    pool.content.update(id="pool", provider_name=made.provider)
    pool.register()
    wait_for(zk.getRegisteredPools, what="a launcher that frees the nodes")
    for node in (made, make_node(requestor=MIN_READY), make_node(allocated_to="100-0000000002")):
        zk.storeNode(node)
    zk.node_tree.by_request = NotWalked(set, zk.node_tree.by_request)
    assert worker._arriving(label) == 1
    assert worker._arriving(SimpleNamespace(name="other")) == 0
    for state, arriving in (
        (zk_module.BUILDING, 0),
        (zk_module.READY, 1),
        (zk_module.IN_USE, 0),
        (zk_module.READY, 1),
    ):
        made.state = state  # building and unlocked: its launcher has died
        zk.storeNode(made)
        assert worker._arriving(label) == arriving
    made.allocated_to = None
    zk.storeNode(made)
    assert (worker._arriving(label), zk.node_tree.min_ready) == (0, set())


def test_indexes_keep_nothing_of_tenants_and_labels_without_nodes(zk: Any) -> None:
    for resources in ({"cores": 0.1}, {"cores": 0}, None):
        node = make_node(state="in-use", tenant_name="t", resources=resources)
        zk.storeNode(node)
        request = zk_module.NodeRequest()
        request.state, request.node_types = "requested", ["label", "other"]
        zk.storeNodeRequest(request)
        wait_for(lambda: zk.request_tree.label_sets)
        zk.deleteRawNode(node.id)
        zk.deleteNodeRequest(request)
        wait_for(lambda: not zk.node_tree.nodes and not zk.request_tree.requests)
        assert not zk.request_tree.label_sets
        assert (
            "t" not in zk.node_tree.measured.tenants and "t" not in zk.node_tree.unmeasured.tenants
        )


def test_listeners_hear_of_components_that_come_change_and_go(zk: Any) -> None:
    heard: list[tuple[str, bool]] = []
    gone: list[str] = []
    zk.component_tree.listeners.append(lambda path, is_deleted: heard.append((path, is_deleted)))
    zk.client.component_listeners.append(gone.append)
    pool = PoolComponent(zk.client, "host")
    pool.content.update(
        id="1", name="main", provider_name="p", state="running", supported_labels=["a"]
    )
    pool.register()
    path = pool.path
    wait_for(lambda: heard == [(path, False)], what="it is told that the pool has come")
    pool.update(paused=True)
    wait_for(lambda: heard == [(path, False)] * 2, what="it is told that the pool has changed")
    pool.unregister()
    wait_for(
        lambda: heard[2:] == [(path, True)] and gone == [path],
        what="it is told that the pool has gone",
    )


def test_listeners_hear_of_reports_that_come_and_go(zk: Any) -> None:
    heard: list[int] = []
    zk.report_tree.listeners.append(lambda: heard.append(len(zk.report_tree.reports)))
    content = {
        **{
            key: {} for key in ("config", "providers", "not_running", "labels", "lately", "tenants")
        },
        "hostname": "nl01",
    }
    path = reports.path("nl01-1")
    reports.write(zk.kazoo_client, path, {**content, "details": [], "waiting": []})
    wait_for(lambda: heard == [1])
    reading.remove(zk.kazoo_client, path)
    wait_for(lambda: heard == [1, 0])


def test_listeners_hear_of_images_that_change(zk: Any) -> None:
    heard: list[str] = []
    zk.image_tree.listeners.append(heard.append)
    zk.kazoo_client.create(
        "/nodepool/images/debian/builds/0000000001", b'{"state": "ready"}', makepath=True
    )
    wait_for(lambda: "debian" in heard)


def test_listeners_hear_when_all_is_read_again(zk: Any) -> None:
    heard: list[bool] = []
    zk.node_tree.sync_listeners.append(lambda: heard.append(zk.node_tree.synced.is_set()))
    for listener in list(zk.client.state_listeners):
        listener(KazooState.CONNECTED)  # as after a cut
    wait_for(lambda: heard == [True])

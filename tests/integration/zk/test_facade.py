"""The ZooKeeper facade on a real server: requests, nodes, components (LAU-21)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from kazoo.exceptions import KazooException

from nodepool import exceptions
from nodepool.zk import zookeeper as zkm
from nodepool.zk.components import PoolComponent
from nodepool.zk.writer import TransactionFailed
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for

SPEC = "LAU-21: "


@pytest.fixture
def other(zk_chroot: Chroot) -> Any:
    """Another process: its own session, without a mirror."""
    return ZooKeeper(zk_chroot.connect(), enable_cache=False)


def node(state: str = zkm.READY, **values: Any) -> zkm.Node:
    result = zkm.Node()
    result.state = state
    result.provider, result.pool, result.type = "p", "main", ["label"]
    for key, value in values.items():
        setattr(result, key, value)
    return result


def request(**values: Any) -> zkm.NodeRequest:
    result = zkm.NodeRequest()
    result.state = zkm.REQUESTED
    for key, value in values.items():
        setattr(result, key, value)
    return result


# -- requests


@pytest.mark.spec(
    SPEC + "getNodeRequests_empty, getNodeRequests, getNodeRequest, getNodeRequest_not_found"
)
def test_missing_requests_read_as_none(zk: Any) -> None:
    assert zk.getNodeRequests() == []
    assert zk.getNodeRequest("100-0000000000") is None
    create = zk.kazoo_client.create
    names = [
        create(f"/nodepool/requests/{p}-", b"{}", sequence=True).rsplit("/", 1)[1]
        for p in (300, 100, 200, 100)
    ]
    assert zk.getNodeRequests() == sorted(names)
    record = {
        "state": "requested",
        "state_time": 1.5,
        "node_types": ["a"],
        "requestor": "r",
        "tenant_name": "t",
    }
    path = create("/nodepool/requests/200-", json.dumps(record).encode(), sequence=True)
    read = zk.getNodeRequest(path.rsplit("/", 1)[1])
    assert (read.id, read.state, read.state_time, read.node_types, read.tenant_name) == (
        path.rsplit("/", 1)[1],
        "requested",
        1.5,
        ["a"],
        "t",
    )
    assert read.stat.version == 0


@pytest.mark.spec(SPEC + "storeNodeRequest, storeNodeRequest_update, deleteNodeRequest; DRV-8")
def test_stored_requests_can_be_updated_and_deleted(zk: Any, other: Any) -> None:
    record = request(node_types=["b", "a"], requestor="zuul", requestor_data={"x": 1})
    zk.storeNodeRequest(record)
    assert record.id.startswith("100-") and record.event_id
    assert other.getNodeRequest(record.id) == record
    assert zk.kazoo_client.exists(f"/nodepool/requests/{record.id}").ephemeralOwner
    record.state = zkm.FULFILLED
    record.nodes = ["0000000001"]
    zk.storeNodeRequest(record)
    assert other.getNodeRequest(record.id) == record
    wait_for(lambda: zk.getNodeRequest(record.id, cached=True) == record)
    second = request(event_id="mine")
    zk.storeNodeRequest(second, priority="300")
    assert second.id.startswith("300-") and other.getNodeRequest(second.id).event_id == "mine"
    zk.deleteNodeRequest(record)
    zk.deleteNodeRequest(record)
    assert other.getNodeRequest(record.id) is None
    with pytest.raises((exceptions.ZKException, KazooException)):
        zk.storeNodeRequest(record)
    assert other.getNodeRequests() == [second.id]


@pytest.mark.spec(
    SPEC + "getNodeRequestLockIDs, getNodeRequestLockStats, nodeRequestLockStatsIterator, "
    "nodeRequestIterator, deleteNodeRequestLock"
)
def test_request_lock_directories_are_listed(zk: Any, other: Any) -> None:
    first, second = request(), request()
    for record in (first, second):
        zk.storeNodeRequest(record)
    zk.lockNodeRequest(first, blocking=False)
    with pytest.raises(exceptions.ZKLockException, match=r"Did not get lock on .*"):
        other.lockNodeRequest(other.getNodeRequest(first.id), blocking=False)
    with pytest.raises(exceptions.TimeoutException):
        other.lockNodeRequest(other.getNodeRequest(first.id), timeout=0.1)
    zk.lockNodeRequest(second, timeout=5)
    assert sorted(zk.getNodeRequestLockIDs()) == sorted([first.id, second.id])
    stats = {s.lock_id: s for s in zk.nodeRequestLockStatsIterator()}
    assert stats.keys() == {first.id, second.id}
    assert zk.getNodeRequestLockStats(first.id) == stats[first.id]
    assert stats[first.id].stat.numChildren == 1
    assert zk.getNodeRequestLockStats("nobody") is None
    for cached in (True, False):
        assert {r.id for r in zk.nodeRequestIterator(cached=cached)} == {first.id, second.id}
        assert {r.id for r in other.nodeRequestIterator(cached=cached)} == {first.id, second.id}
    zk.unlockNodeRequest(first)
    with pytest.raises(exceptions.ZKLockException):
        zk.unlockNodeRequest(first)
    zk.deleteNodeRequest(first)
    assert first.id in zk.getNodeRequestLockIDs()
    zk.deleteNodeRequestLock(first.id)
    zk.deleteNodeRequestLock(first.id)
    assert zk.getNodeRequestLockIDs() == [second.id]
    # A vanished request is not locked, and nothing stays behind.
    with pytest.raises(exceptions.ZKLockException, match=r"Did not get lock on .*"):
        other.lockNodeRequest(first, blocking=False)
    assert zk.getNodeRequestLockIDs() == [second.id]


# -- nodes


@pytest.mark.spec(
    SPEC + "getNodes, getNode, getNode_not_found, storeNode, storeNode_update, deleteNode"
)
def test_stored_nodes_can_be_updated_and_deleted(zk: Any, other: Any) -> None:
    assert zk.getNode("0000000007") is None
    record = node(zkm.INIT, hold_job="j", external_id={"a": 1}, resources={"cores": 4})
    zk.storeNode(record)
    assert len(record.id) == 10 and record.created_time == record.state_time
    assert other.getNode(record.id) == record == zk.getNode(record.id, cached=True)
    record.state, record.public_ipv4 = zkm.READY, "192.0.2.1"
    zk.storeNode(record)
    assert other.getNode(record.id) == record
    empty = zk.kazoo_client.create("/nodepool/nodes/", b"", sequence=True).rsplit("/", 1)[1]
    assert zk.getNodes() == sorted([record.id, empty]) and zk.getNode(empty) is None
    zk.lockNode(record)
    zk.deleteNode(record)
    assert other.getNode(record.id) is None and zk.getNodes() == [empty]
    zk.deleteNode(record)
    zk.deleteRawNode(empty)
    zk.deleteRawNode(empty)
    assert zk.getNodes() == []


@pytest.mark.spec(SPEC + "lockNode_multi, lockNode_unlockNode, unlockNode_not_locked")
def test_locked_node_cannot_be_locked_again(zk: Any, other: Any) -> None:
    record = node()
    zk.storeNode(record)
    zk.lockNode(record)
    path = f"/nodepool/nodes/{record.id}/lock"
    assert record.lock is not None and len(zk.kazoo_client.get_children(path)) == 1
    with pytest.raises(exceptions.ZKLockException, match=r"Did not get thread lock on .*"):
        zk.lockNode(record, blocking=False)
    for facade in (zk, other):
        with pytest.raises(exceptions.ZKLockException, match=r"Did not get lock on .*"):
            facade.lockNode(facade.getNode(record.id), blocking=False)
    with pytest.raises(exceptions.TimeoutException):
        other.lockNode(other.getNode(record.id), timeout=0.1)
    zk.unlockNode(record)
    assert record.lock is None and zk.kazoo_client.get_children(path) == []
    with pytest.raises(exceptions.ZKLockException):
        zk.unlockNode(record)


@pytest.mark.spec(
    "ZK-6 rules 2, 4, 6: read again after locking; no empty record is left by a late locker"
)
def test_locking_refreshes_or_refuses(zk: Any, other: Any) -> None:
    record = node()
    zk.storeNode(record)
    theirs = other.getNode(record.id)
    record.state = zkm.HOLD
    zk.storeNode(record)
    other.lockNode(theirs)
    assert theirs.state == "hold"
    other.unlockNode(theirs)
    zk.deleteNode(record)
    with pytest.raises(exceptions.ZKLockException, match=r"Did not get lock on .*"):
        other.lockNode(theirs, blocking=False)
    assert zk.getNodes() == []


@pytest.mark.spec(
    "ZK-6: a waiter gets the lock when the one before it goes; kazoo's recipe on the other side"
)
def test_waiting_for_a_node(zk: Any, zk_chroot: Chroot) -> None:
    record = node()
    zk.storeNode(record)
    kazoo = zk_chroot.connect().client
    foreign = kazoo.Lock(f"/nodepool/nodes/{record.id}/lock", "foreign")
    assert foreign.acquire(timeout=5)
    assert zk.getNodeLockContenders(record) == ["foreign"]
    import threading

    waiter = threading.Thread(target=zk.lockNode, args=(record,), kwargs={"timeout": 10})
    waiter.start()
    wait_for(lambda: len(foreign.contenders()) == 2)
    foreign.release()
    waiter.join(5)
    assert record.lock is not None
    assert not foreign.acquire(blocking=False)
    zk.unlockNode(record)
    assert foreign.acquire(timeout=5)
    foreign.release()


@pytest.mark.spec(SPEC + "forceUnlockNode; ZK-6.7; DRV-8: lock that outlives the process")
def test_force_unlock_deletes_the_lock_of_another_client(zk: Any, zk_chroot: Chroot) -> None:
    record = node()
    zk.storeNode(record)
    owner = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    theirs = owner.getNode(record.id)
    owner.lockNode(theirs, ephemeral=False, identifier="me")
    assert theirs.lock is None
    owner.disconnect()
    directory = f"/nodepool/nodes/{record.id}/lock"
    names = zk.kazoo_client.get_children(directory)
    # Alphabetically before, but later in the queue; and something that is not a contender.
    later = zk.kazoo_client.create(f"{directory}/{'0' * 32}__lock__", sequence=True)
    zk.kazoo_client.create(f"{directory}/0-nonsense", b"")
    assert zk.getNodeLockContenders(record) == ["me", ""]
    zk.forceUnlockNode(record)
    assert sorted(zk.kazoo_client.get_children(directory)) == sorted(
        [later.rsplit("/", 1)[1], "0-nonsense"]
    )
    assert names[0] not in zk.kazoo_client.get_children(directory)
    zk.forceUnlockNode(record)
    zk.forceUnlockNode(record)
    assert zk.kazoo_client.get_children(directory) == ["0-nonsense"]


@pytest.mark.spec(SPEC + "getReadyNodesOfTypes, getReadyNodesOfTypes_multilabel")
@pytest.mark.parametrize("cached", [True, False])
def test_ready_nodes_are_listed_under_each_label(zk: Any, other: Any, cached: bool) -> None:
    nodes = {
        name: node(**values)
        for name, values in {
            "a": {"type": ["a"]},
            "ab": {"type": ["a", "b"]},
            "c": {"type": ["c"]},
            "taken": {"type": ["a"], "allocated_to": "100-1"},
            "used": {"type": ["a"], "state": zkm.USED},
        }.items()
    }
    for record in nodes.values():
        zk.storeNode(record)
    found = (zk if cached else other).getReadyNodesOfTypes(["a", "b", "d"])
    assert {label: {n.id for n in ns} for label, ns in found.items()} == {
        "a": {nodes["a"].id, nodes["ab"].id},
        "b": {nodes["ab"].id},
    }


@pytest.mark.spec(SPEC + "nodeIterator; PY-3: without a mirror iterators read through")
def test_node_iterator_reads_through_without_mirror(zk: Any, other: Any) -> None:
    ids = []
    for _ in range(3):
        record = node()
        zk.storeNode(record)
        ids.append(record.id)
    zk.kazoo_client.create("/nodepool/nodes/", b"{", sequence=True)
    for facade in (zk, other):
        for options in ({"cached": False}, {"cached": True}, {"cached": False, "cached_ids": True}):
            assert [n.id for n in facade.nodeIterator(**options)] == ids
    assert other.countPoolNodes("p", "main") == zk.countPoolNodes("p", "main") == 3
    assert zk.countPoolNodes("p", "x") == 0
    assert (
        [n.id for n in zk.getProviderNodes("p")]
        == [n.id for n in other.getProviderNodes("p")]
        == ids
    )


@pytest.mark.spec(
    "LAU-5.4: the oldest idle node of the pool, none while one of it is being deleted"
)
def test_delete_oldest_unused_node(zk: Any) -> None:
    now = time.time()
    old = node(state_time=now - 100)
    for record in (
        node(state_time=now - 50),
        old,
        node(state_time=now - 900, pool="other"),
        node(state_time=now - 900, allocated_to="100-1"),
        node(zkm.HOLD, state_time=now - 900),
    ):
        zk.storeNode(record)
    assert zk.deleteOldestUnusedNode("p", "main")
    assert zk.getNode(old.id).state == "deleting"
    assert not zk.deleteOldestUnusedNode("p", "main"), "one is under way"
    assert zk.deleteOldestUnusedNode("p", "other")
    assert not zk.deleteOldestUnusedNode("q", "main")


@pytest.mark.spec("DRV-8: watchNode(node, callback)")
def test_watch_reports_each_change_of_a_node(zk: Any, other: Any) -> None:
    record = node()
    zk.storeNode(record)
    calls: list[tuple[str, bool]] = []
    zk.watchNode(record, lambda n, deleted: calls.append((n.state, deleted)))
    theirs = other.getNode(record.id)
    theirs.state = zkm.USED
    other.storeNode(theirs)
    wait_for(lambda: ("used", False) in calls)
    other.deleteNode(theirs)
    wait_for(lambda: calls and calls[-1][1])
    assert not [x for x in zk.node_tree.listeners if x.__name__ == "changed"]


@pytest.mark.spec("ZK-2, 8: a node locked by us is written only while the lock stands")
def test_no_write_without_the_lock(zk: Any, other: Any) -> None:
    record = node()
    zk.storeNode(record)
    zk.lockNode(record)
    other.forceUnlockNode(record)
    record.state = zkm.IN_USE
    with pytest.raises(exceptions.ZKException, match="lock"):
        zk.storeNode(record)
    assert other.getNode(record.id).state == "ready"


# -- the rest


@pytest.mark.spec(SPEC + "pool_component; ZK-4, 15")
def test_registered_pool_is_visible_to_other_launchers(zk: Any, zk_chroot: Chroot) -> None:
    client = zk_chroot.connect()
    component = PoolComponent(client, "np01", "11.0.0")
    component.content.update(
        id="the-id",
        name="main",
        provider_name="p",
        supported_labels=["b", "a"],
        state=PoolComponent.RUNNING,
    )
    assert PoolComponent.RUNNING == "running" and component.id == "the-id"
    component.register()
    pool = wait_for(zk.getRegisteredPools)[0]
    assert (pool.id, pool.name, pool.provider_name, pool.priority, pool.paused) == (
        "the-id",
        "main",
        "p",
        100,
        False,
    )
    assert sorted(pool.supported_labels) == ["a", "b"]
    name = zk.kazoo_client.get_children("/nodepool/components/pool")[0]
    assert name.startswith("np01") and len(name) == 14
    data, stat = zk.kazoo_client.get(f"/nodepool/components/pool/{name}")
    assert json.loads(data) == {
        "hostname": "np01",
        "id": "the-id",
        "kind": "pool",
        "model_api": 0,
        "name": "main",
        "paused": False,
        "priority": 100,
        "provider_name": "p",
        "state": "running",
        "supported_labels": ["b", "a"],
        "version": "11.0.0",
    }
    assert stat.ephemeralOwner == client.session_id
    component.update(paused=True)
    wait_for(lambda: zk.getRegisteredPools()[0].paused)
    component.unregister()
    wait_for(lambda: not zk.getRegisteredPools())


@pytest.mark.spec(SPEC + "buildZooKeeperHosts_single, …_multiple, …_ipv6")
def test_zookeeper_hosts_include_port_and_chroot() -> None:
    from nodepool.config import ZooKeeperConnectionConfig as Server
    from nodepool.config import buildZooKeeperHosts

    assert buildZooKeeperHosts([Server("h", port=2181, chroot="/test1")]) == "h:2181/test1"
    assert buildZooKeeperHosts([Server("a", 1, "/x"), Server("b", 2, "/y")]) == "a:1/x,b:2/y"
    assert buildZooKeeperHosts([Server("2001:db8::1", 5)]) == "[2001:db8::1]:5"
    assert buildZooKeeperHosts([Server("[2001:db8::1]", 5)]) == "[2001:db8::1]:5"


@pytest.mark.spec(SPEC + "forceUnlockNode with a version")
def test_lock_of_changed_record_is_not_removed_by_force(zk: Any) -> None:
    record = node()
    zk.storeNode(record)
    zk.lockNode(record, ephemeral=False, identifier="me")
    seen = zk.getNode(record.id)
    zk.storeNode(record)  # another client writes in between
    with pytest.raises(TransactionFailed):
        zk.forceUnlockNode(seen, seen.version)
    assert zk.getNodeLockContenders(record) == ["me"]
    present = zk.getNode(record.id)
    zk.forceUnlockNode(present, present.version)
    assert zk.getNodeLockContenders(record) == []

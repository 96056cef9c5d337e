"""The record of the cluster's history in a real ZooKeeper."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.zk import paths
from nodepool.zk.records import Node, RecordError
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for


def create(zk: Any, count: int = 1) -> list[Node]:
    nodes = []
    for _ in range(count):
        node = Node()
        node.state = "init"
        nodes.append(node)
    zk.createNodes(nodes)
    return nodes


def reconnect(zk: Any) -> None:
    for state in ("SUSPENDED", "CONNECTED"):
        for listener in list(zk.client.state_listeners):
            listener(state)


def test_the_counter_is_the_next_node_id_also_after_deletions(zk: Any) -> None:
    assert zk.cluster.counter() == 0
    nodes = create(zk, 5)
    assert zk.cluster.counter() == 5
    for node in nodes[:3]:
        zk.deleteRawNode(node.id)
    assert zk.cluster.counter() == 5
    assert create(zk)[0].id == "0000000005"


def test_all_processes_agree_on_one_id(zk: Any, zk_chroot: Chroot) -> None:
    other = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    assert zk.cluster.identity() == other.cluster.identity() == zk.cluster.note().id == other.cluster.id


def test_a_point_is_recorded_once_for_each_connection(zk: Any) -> None:
    create(zk, 3)
    first = zk.cluster.note()
    assert [counter for counter, _time in first.points] == [3]
    create(zk, 2)
    view = zk.cluster.view()
    assert view.cluster.points == first.points and view.counter == 5 and zk.cluster.is_current(view)
    reconnect(zk)
    assert zk.cluster.due and not zk.cluster.is_current(view)
    assert [counter for counter, _time in zk.cluster.note().points] == [3, 5]


def test_the_time_of_a_point_is_taken_before_its_counter(zk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of other launchers that are created meanwhile must not look as if they came from a lost history."""
    created: list[Node] = []
    read = zk.cluster.counter

    def busy() -> Any:
        counter = read()
        created.extend(create(zk, 3))
        return counter

    monkeypatch.setattr(zk.cluster, "counter", busy)
    cluster = zk.cluster.note()
    monkeypatch.undo()
    assert [counter for counter, _time in cluster.points] == [0] and len(created) == 3
    for node in created:
        stat = zk.kazoo_client.exists(paths.node(node.id or ""))
        marks = {"nodepool_node_id": node.id, "nodepool_node_created": str(stat.ctime)}
        assert zk.cluster.view().foreign(marks, None) is None


def test_an_emptied_tree_gets_another_id(zk: Any) -> None:
    before = zk.cluster.note().id
    zk.kazoo_client.delete(paths.CLUSTER)
    assert zk.cluster.view().cluster.id != before


def test_a_damaged_record_is_neither_replaced_nor_trusted(zk: Any) -> None:
    zk.kazoo_client.create(paths.CLUSTER, b'{"points": []}')
    for read in (zk.cluster.note, zk.cluster.view, zk.cluster.identity):
        with pytest.raises(RecordError, match="id is missing"):
            read()
    assert zk.kazoo_client.get(paths.CLUSTER)[0] == b'{"points": []}'


def test_the_mirror_shows_older_records_of_a_restored_server(zk: Any) -> None:
    """After a reconnection, the server may have what it had before."""
    node = create(zk)[0]
    shown = wait_for(lambda: zk.getCachedNode(node.id))
    newer = shown.copy()
    newer.state = "ready"
    path = paths.node(node.id or "")
    newer.stat = zk.kazoo_client.exists(path)._replace(mzxid=1 << 60)
    zk.node_tree.store_own([node.id], path, newer, newer.stat)
    assert zk.getCachedNode(node.id).state == "ready"
    reconnect(zk)
    assert zk.wait_synced(20)
    assert zk.getCachedNode(node.id).state == "init"

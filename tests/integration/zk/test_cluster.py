"""The record of the cluster's history in a real ZooKeeper."""

from __future__ import annotations

from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.serialization import Create, SetData, Transaction

from nodepool.zk import paths
from nodepool.zk.cluster import Cluster
from nodepool.zk.connection.protocol import SessionClient
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


def test_counter_of_a_server_that_lags_behind_is_not_used(
    zk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kazoo, known = zk.kazoo_client, [zk.kazoo_client.exists(paths.NODES)]
    exists, sync = kazoo.exists_async, kazoo.sync_async

    def late(path: str) -> Any:
        answer = exists(path)
        if known:
            answer.wait(10)
            answer.value = known[0]
        return answer

    def catch_up(path: str) -> Any:
        known.clear()
        return sync(path)

    create(zk, 3)
    monkeypatch.setattr(kazoo, "exists_async", late)
    monkeypatch.setattr(kazoo, "sync_async", catch_up)
    assert zk.cluster.counter() == 3


def test_all_processes_agree_on_one_id(zk: Any, zk_chroot: Chroot) -> None:
    other = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    assert (
        zk.cluster.identity()
        == other.cluster.identity()
        == zk.cluster.note().id
        == other.cluster.id
    )


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


def test_the_time_of_a_point_is_taken_before_its_counter(
    zk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of other launchers that are created meanwhile must not look as if they came from a
    lost history.
    """
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


def test_change_of_another_process_is_kept(zk: Any, zk_chroot: Chroot) -> None:
    other = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    zk.cluster.note()

    def skip(known: Cluster) -> Cluster:
        if not known.skipped:
            other.cluster.change(lambda theirs: theirs.with_skipped(1, 2))
        return known.with_skipped(7, 8)

    zk.cluster.change(skip)
    assert zk.cluster.read().skipped == ((1, 2), (7, 8))


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


def test_skipped_ids_are_never_given(zk: Any) -> None:
    create(zk, 2)
    zk.cluster.skip_to(1000)
    assert zk.cluster.counter() == 1001 and zk.cluster.read().skipped == ((2, 1000),)
    zk.cluster.skip_to(500)
    assert create(zk)[0].id == "0000001001"
    assert sorted(zk.kazoo_client.get_children(paths.NODES)) == [
        "0000000000",
        "0000000001",
        "0000001001",
    ]


def test_an_implausible_id_skips_nothing(zk: Any) -> None:
    with pytest.raises(ValueError, match="node id 0000000050 is implausible"):
        zk.cluster.skip_to(50, most=50)
    assert zk.cluster.counter() == 0
    zk.cluster.skip_to(49, most=50)
    assert zk.cluster.counter() == 50


def lose_nodes(zk: Any) -> list[dict[str, str]]:
    """Delete six nodes and the counter of node ids; return the marks of the machine of the last
    one, with and without stamp.

    This can happen while a launcher stays connected.
    """
    zk.cluster.note()
    node = create(zk, 6)[5]
    created = zk.kazoo_client.exists(paths.node(node.id or "")).ctime
    zk.kazoo_client.delete(paths.NODES, recursive=True)
    zk.kazoo_client.ensure_path(paths.NODES)
    wait_for(
        lambda: (
            zk.cluster.change(lambda known: known)
            and zk.kazoo_client.exists(paths.CLUSTER).mtime > created
        )
    )
    unmarked = {"nodepool_node_id": str(node.id)}
    return [{**unmarked, "nodepool_node_created": str(created)}, unmarked]


def test_machines_of_skipped_ids_stay_foreign_without_a_new_connection(zk: Any) -> None:
    lost = lose_nodes(zk)
    zk.cluster.skip_to(5)
    assert all(zk.cluster.view().foreign(marks, None) for marks in lost)


def test_skipping_that_is_interrupted_at_any_write_exposes_no_machine(
    zk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_nodes(zk)
    call, left = SessionClient._call, [0]

    def failing(self: Any, request: Any, async_object: Any) -> Any:
        if isinstance(request, (Create, SetData, Transaction)):
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionLoss
        return call(self, request, async_object)

    monkeypatch.setattr(SessionClient, "_call", failing)
    for writes in range(10):
        left[0] = writes
        try:
            zk.cluster.skip_to(5)
            break
        except ConnectionLoss:
            left[0] = 100
            assert all(zk.cluster.view().foreign(marks, None) for marks in lost), (
                f"after {writes} writes"
            )
    assert writes == 4 and zk.cluster.counter() == 6
    assert all(zk.cluster.view().foreign(marks, None) for marks in lost)

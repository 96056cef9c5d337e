"""Deletion of nodes and leaked resources (LAU-10, LAU-11, LAU-13)."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest

from nodepool.launcher.cleanup import CleanupWorker
from tests.conftest import wait_for
from tests.support.clock import HandClock
from tests.support.launcher import LauncherBench, StatsdReceiver, config, provider

SPEC = "LAU-21: "


@pytest.mark.spec(SPEC + "node_delete_success")
def test_an_externally_deleted_node_is_replaced(bench: LauncherBench) -> None:
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    node = bench.wait_nodes(1, state="ready", allocated_to=None)[0]
    bench.zuul.write_node(node.id, state="deleting")
    bench.wait_gone(node.id)
    new = bench.wait_nodes(1, state="ready", allocated_to=None)[0]
    assert new.id != node.id
    assert [s.id for s in bench.servers("fake-provider")] == [new.external_id]


@pytest.mark.spec(
    "LAU-11; ZK-8.11: every deletable state, also what a dead launcher or executor left"
)
@pytest.mark.parametrize(
    "state", ["used", "in-use", "building", "failed", "deleting", "deleted", "aborted"]
)
def test_nodes_in_deletable_states_are_deleted_and_others_stay(
    bench: LauncherBench, state: str
) -> None:
    bench.start(config(provider()))
    locked = bench.ready_node("fake-provider", "main", "fake-label")
    bench.zuul.lock(locked.id)
    bench.zuul.write_node(locked.id, state=state)
    foreign = bench.ready_node("elsewhere", "main", "fake-label", state=state)
    kept = [
        bench.ready_node("fake-provider", "main", "fake-label", state=s).id
        for s in ("hold", "testing", "ready")
    ]
    node = bench.ready_node(
        "fake-provider", "main", "fake-label", state=state, external_id="never-existed"
    )
    bench.wait_gone(node.id)
    assert bench.node(locked.id).state == state
    assert bench.node(foreign.id).state == state
    for node_id in kept:
        bench.node(node_id)
    bench.zuul.unlock(locked.id)
    bench.wait_gone(locked.id)


@pytest.mark.spec(SPEC + "node_delete_DELETED_success; OST-3.20")
def test_a_server_listed_as_deleted_counts_as_deleted(bench: LauncherBench) -> None:
    pool = bench.start(config(provider()))
    request_id, nodes = bench.fulfilled("fake-label")
    cloud = bench.cloud("fake-provider")
    server = cloud.get_server(nodes[0].external_id)
    bench.zuul.accept(request_id)
    server.status = "DELETED"
    bench.zuul.give_back(nodes[0].id)
    bench.wait_gone(nodes[0].id)
    assert server in cloud._server_list
    assert not list(pool.getProviderManager("fake-provider").listNodes())


@pytest.mark.spec(SPEC + "node_delete_failure; DRV-14.24")
def test_a_failing_delete(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    node = bench.wait_nodes(1, state="ready", allocated_to=None)[0]
    adapter = bench.adapter("fake-provider")
    original, calls = adapter._deleteServer, []

    def fail(external_id: str) -> Any:
        calls.append(external_id)
        raise RuntimeError("induced")

    monkeypatch.setattr(adapter, "_deleteServer", fail)
    bench.zuul.write_node(node.id, state="deleting")
    wait_for(lambda: len(calls) >= 2, what="tried again")
    assert bench.node(node.id).state == "deleting"
    wait_for(lambda: not bench.zuul.contenders(node.id), what="unlocked between the tries")
    new = bench.wait_nodes(1, state="ready", allocated_to=None)[0]
    assert new.id != node.id
    monkeypatch.setattr(adapter, "_deleteServer", original)
    bench.wait_gone(node.id)


@pytest.mark.spec(SPEC + "node_delete_error; OST-3.21")
def test_a_server_in_error_after_its_delete_stays_visible(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()))
    manager = pool.getProviderManager("fake-provider")
    request_id, nodes = bench.fulfilled("fake-label")
    server = bench.cloud("fake-provider").get_server(nodes[0].external_id)

    def delete(
        external_id: str,
    ) -> None:  # without an answer: only False says that there is no such server
        server.status = "ERROR"

    adapter = bench.adapter("fake-provider")
    monkeypatch.setattr(adapter, "_deleteServer", delete)
    bench.zuul.accept(request_id)
    bench.zuul.give_back(nodes[0].id)
    wait_for(lambda: server.status == "ERROR")
    assert [i.metadata["nodepool_node_id"] for i in manager.listNodes()] == [nodes[0].id]
    assert bench.node(nodes[0].id).state == "deleting"
    # It counts against the quota.
    assert manager.estimatedNodepoolQuotaUsed().quota["compute"]["instances"] == 1
    bench.zk.deleteRawNode(nodes[0].id)
    wait_for(lambda: manager.possibly_leaked_nodes)


@pytest.mark.spec(SPEC + "leaked_node; DRV-14.25; OST-3.22")
def test_only_leaked_servers_of_the_provider_are_deleted(
    bench: LauncherBench, statsd: StatsdReceiver
) -> None:
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    node = bench.wait_nodes(1, state="ready", allocated_to=None)[0]
    cloud = bench.cloud("fake-provider")
    untagged = cloud.create_server(name="mine", flavor=cloud._flavor_list[0])
    other = cloud.create_server(
        name="theirs",
        flavor=cloud._flavor_list[0],
        meta={"nodepool_provider_name": "another", "nodepool_node_id": "0000000777"},
    )
    bench.zk.deleteRawNode(node.id)
    wait_for(lambda: cloud.get_server(node.external_id) is None, what="the leaked server deleted")
    statsd.wait("nodepool.provider.fake-provider.leaked.instances", "1|c")
    new = bench.wait_nodes(1, state="ready", allocated_to=None)[0]
    assert {s.id for s in cloud._server_list} == {untagged.id, other.id, new.external_id}
    assert statsd.lines.count("nodepool.provider.fake-provider.leaked.instances:1|c") == 1


@pytest.mark.spec(SPEC + "leaked_port_cleanup; OST-3.22")
def test_ports_are_deleted_when_seen_down_twice(
    bench: LauncherBench, statsd: StatsdReceiver
) -> None:
    bench.start(config(provider(**{"port-cleanup-interval": 600})), cleanup_interval=0.3)
    cloud = bench.cloud("fake-provider")
    assert len(cloud._down_ports) == 2
    wait_for(lambda: bench.adapter("fake-provider").leaks.down_ports)
    assert len(cloud._down_ports) == 2
    old = bench.pools[0].getProviderManager("fake-provider")
    bench.config(config(provider(**{"port-cleanup-interval": 1})))
    wait_for(lambda: bench.pools[0].getProviderManager("fake-provider") is not old)
    cloud = bench.cloud("fake-provider")
    wait_for(lambda: not cloud._down_ports, what="leaked ports deleted")
    statsd.wait("nodepool.provider.fake-provider.leaked.ports", "2|c")


@pytest.mark.spec("DRV-14.26: equal upload numbers of different builds do not collide")
def test_leaked_uploads_are_distinguished_by_build(bench: LauncherBench) -> None:
    from nodepool.driver.openstack.adapter import OpenStackResource

    pool = bench.make(config(provider()), cleanup_interval=1000)
    pool.start()
    bench.wait_ready(pool)
    manager, adapter = pool.getProviderManager("fake-provider"), bench.adapter("fake-provider")
    known = bench.store_image("img", "fake-provider")
    deleted: list[Any] = []

    def resource(build_id: str) -> Any:
        return OpenStackResource(
            {
                "nodepool_provider_name": "fake-provider",
                "nodepool_build_id": build_id,
                "nodepool_upload_id": known.id,
            },
            "image",
            build_id,
        )

    adapter.listResources = lambda: [resource(known.build_id), resource("f" * 32)]
    adapter.deleteResource = lambda r: deleted.append(r.metadata["nodepool_build_id"])
    manager.cleanupLeakedResources()
    assert not deleted
    manager.cleanupLeakedResources()
    assert deleted == ["f" * 32]


@pytest.mark.spec(SPEC + "empty_node_deleted; ZK-6.2")
def test_an_empty_znode_is_removed(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    path = bench.zuul.client.create("/nodepool/nodes/", b"", sequence=True)
    node_id = path.rsplit("/", 1)[1]
    bench.wait_gone(node_id)
    # As Zuul leaves it when it locks a node that has just been deleted.
    held = bench.zuul.client.create("/nodepool/nodes/0000009999", b"")
    bench.zuul.lock("0000009999")
    bench.use_up(bench.fulfilled("fake-label")[0])
    assert bench.zuul.client.exists(held)
    bench.zuul.unlock("0000009999")
    bench.wait_gone("0000009999")


@pytest.mark.spec(SPEC + "deleteRawNode_exception; ZK-6.3")
def test_a_half_removed_node(bench: LauncherBench) -> None:
    """A launcher died between ``deleted`` and the removal; or Zuul's lock came in between."""
    node = bench.ready_node("fake-provider", "main", "fake-label", state="deleted")
    unowned = bench.ready_node("fake-provider", "main", "fake-label", state="deleting")
    bench.start(config(provider()))
    bench.wait_gone(node.id, unowned.id)


@pytest.mark.spec("ZK-10.2: a node locked by somebody else is never written")
def test_a_node_locked_while_it_is_to_be_deleted(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    request_id, nodes = bench.fulfilled("fake-label")
    node_id = nodes[0].id
    bench.zuul.accept(request_id)
    bench.zuul.write_node(node_id, state="used")
    version = bench.zuul.client.get(f"/nodepool/nodes/{node_id}")[1].version
    bench.use_up(bench.fulfilled("fake-label")[0])
    assert bench.zuul.client.get(f"/nodepool/nodes/{node_id}")[1].version == version
    bench.zuul.unlock(node_id)
    bench.wait_gone(node_id)
    wait_for(lambda: not bench.servers("fake-provider"))


@pytest.mark.spec("ZK-6.1: swept when old and without a live contender")
def test_request_locks_are_swept_with_care(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.launcher.LOCK_CLEANUP", 0)
    root = "/nodepool/requests-lock"
    for name in ("200-0000000001", "200-0000000002"):
        bench.zuul.client.create(f"{root}/{name}", makepath=True)
    held = bench.zuul.client.create(
        f"{root}/200-0000000002/{'a' * 32}__lock__", ephemeral=True, sequence=True
    )
    waiting = bench.submit("nowhere", state="failed")
    bench.zuul.client.create(f"{root}/{waiting}")
    bench.start(config(provider()), cleanup_interval=0.2)
    wait_for(lambda: "200-0000000001" not in bench.zk.getNodeRequestLockIDs())
    bench.use_up(bench.fulfilled("fake-label")[0])
    assert set(bench.zk.getNodeRequestLockIDs()) >= {"200-0000000002", waiting}
    bench.zuul.client.delete(held)
    bench.zuul.cancel(waiting)
    wait_for(lambda: not bench.zk.getNodeRequestLockIDs())


@pytest.mark.spec(
    "issue 11, B13: lock directories of requests do not pile up, and are not read one by one each "
    "minute"
)
def test_request_locks_go_soon_and_without_reading(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.launcher.cleanup.GONE_FOR", 100.0)
    pool = bench.start(config(provider()), cleanup_interval=1000)
    sent: list[str] = []
    call = pool.zk.kazoo_client._call
    monkeypatch.setattr(
        pool.zk.kazoo_client,
        "_call",
        lambda request, reply: (
            sent.append(f"{type(request).__name__} {getattr(request, 'path', '')}"),
            call(request, reply),
        )[1],  # type: ignore[func-returns-value]
    )
    state = copy.copy(pool.state)
    state.clock = clock = HandClock()
    worker = CleanupWorker(state, pool.node_reconciler, lambda: 60.0, lambda: 28800.0)
    root = f"{pool.zk.kazoo_client.chroot}/nodepool/requests-lock"
    served = [bench.fulfilled("fake-label")[0] for _ in range(3)]
    bench.use_up(*served)
    wait_for(lambda: not any(pool.zk.request_tree.get(i) for i in served))

    def sweep(seconds: float) -> list[str]:
        clock.now += seconds
        sent.clear()
        worker._sweep_request_locks()
        return [line for line in sent if line.split()[1].startswith(root)]

    left = set(bench.zk.getNodeRequestLockIDs())
    assert left == set(served)
    assert sweep(0) == sweep(60) == [f"GetChildren {root}"]
    assert sorted(sweep(60)) == sorted(
        [f"GetChildren {root}", *(f"Delete {root}/{i}" for i in served)]
    )
    assert bench.zk.getNodeRequestLockIDs() == []


@pytest.mark.spec("LAU-10: a deletion that fails is tried again: the node does not stay locked")
def test_a_record_that_cannot_be_removed_at_first(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kazoo.exceptions import ConnectionLoss

    from nodepool.driver.statemachine.deleter import StateMachineNodeDeleter

    pool = bench.start(config(provider()))
    request_id, (node,) = bench.fulfilled("fake-label")
    client = bench.chroot.connect().client
    remove, delete, failures = StateMachineNodeDeleter._remove, pool.zk.deleteNode, []  # type: ignore[var-annotated]

    def contended(deleter: Any) -> None:
        if not failures:  # so the record cannot go together with its lock
            client.create(f"/nodepool/nodes/{node.id}/lock/other")
        remove(deleter)

    def fail_once(node: Any) -> None:
        if not failures:
            failures.append(node.id)
            client.delete(f"/nodepool/nodes/{node.id}/lock/other")
            raise ConnectionLoss
        delete(node)

    monkeypatch.setattr(StateMachineNodeDeleter, "_remove", contended)
    monkeypatch.setattr(pool.zk, "deleteNode", fail_once)
    bench.zuul.give_back(*bench.zuul.accept(request_id))
    wait_for(lambda: failures == [node.id], 10, "removal failed")
    bench.wait_gone(node.id)


@pytest.mark.spec(
    "issue 11, A3: a deletion that fails again and again does not keep a pool full of idle nodes"
)
def test_capacity_is_freed_despite_a_stuck_deletion(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.zk.facade.nodes.DELETION_GUARD", 2)
    bench.start(config(provider(labels=["a", "b"], pool={"max-servers": 2})))
    adapter, calls = bench.adapter("fake-provider"), []
    original = adapter._deleteServer
    (first, (stuck,)), (second, (idle,)) = bench.fulfilled("a"), bench.fulfilled("a")

    def fail(external_id: str) -> Any:
        if external_id != stuck.external_id:
            return original(external_id)
        calls.append(time.monotonic())
        raise RuntimeError("induced")

    monkeypatch.setattr(adapter, "_deleteServer", fail)
    bench.zuul.give_back(*bench.zuul.accept(first))
    bench.zuul.cancel(second)
    bench.wait_nodes(1, state="ready", allocated_to=None)
    since = wait_for(lambda: (node := bench.node(stuck.id)).state == "deleting" and node.state_time)
    request = bench.submit("b")
    bench.wait_request(request, "fulfilled")
    bench.wait_gone(idle.id)
    wait_for(lambda: len(calls) >= 5)
    assert bench.node(stuck.id).state_time == since
    assert calls[4] - calls[0] > 2, "0.2 s, 0.4 s, 0.8 s and 1.6 s between them"
    monkeypatch.setattr(adapter, "_deleteServer", original)
    bench.wait_gone(stuck.id)


@pytest.mark.spec(
    "issue 11, A4: of the locks of other launchers only those that have changed are read"
)
def test_locks_of_another_launchers_requests(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, count = bench.zuul.client, 60
    requests = [bench.submit("nowhere", state="pending") for _ in range(count)]
    held = {
        i: other.create(
            f"/nodepool/requests-lock/{i}/{'a' * 32}__lock__",
            ephemeral=True,
            sequence=True,
            makepath=True,
        )
        for i in requests
    }
    pool = bench.start(config(provider()), cleanup_interval=3600)
    client = pool.zk.kazoo_client
    looked: list[str] = []
    original = client.get_children_async

    def counted(path: str, *args: Any, **kwargs: Any) -> Any:
        looked.append(path)
        return original(path, *args, **kwargs)

    wait_for(lambda: len(client._child_watchers) >= count, what="the first look at all")
    monkeypatch.setattr(client, "get_children_async", counted)
    for request_id in requests[:40]:  # as the launcher that has them does, in turn
        record = bench.zuul.request(request_id)
        other.set(
            f"/nodepool/requests/{request_id}", json.dumps({**record, "state": "failed"}).encode()
        )
        other.delete(held[request_id])
    # The rest is given up by its launcher: found by the locks.
    for request_id in requests[40:]:
        other.delete(held[request_id])
    for request_id in requests[40:]:
        wait_for(
            lambda i=request_id: bench.zuul.request(i)["state"] != "pending",
            what=f"request {request_id}",
        )  # type: ignore[misc]
    assert len(looked) <= 2 * count

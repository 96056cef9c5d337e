"""After a broken connection: ids that ZooKeeper has assigned again, and requests nobody needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from kazoo.exceptions import ConnectionLoss

from nodepool.exceptions import LaunchStatusException
from nodepool.zk import ZooKeeperClient, paths
from nodepool.zk.writer import Callback, Txn
from nodepool.zk.zookeeper import IN_USE, READY, REQUESTED, Node, NodeRequest, ZooKeeper
from tests.conftest import Chroot, wait_for
from tests.integration.metastatic.test_slots import Bench, config
from tests.support.faults.launcher import Proxy


@pytest.fixture
def proxy(zk_chroot: Chroot) -> Iterator[Proxy]:
    created = Proxy(int(zk_chroot.hosts.rpartition(":")[2]))
    yield created
    created.set("open")
    for client in zk_chroot.clients:
        client.disconnect()
    created.stop()


def made(client: ZooKeeperClient) -> Iterator[Bench]:
    zk = ZooKeeper(client)
    assert zk.wait_synced(20)
    bench = Bench(zk, config())
    yield bench
    bench.adapter.stop()


@pytest.fixture
def bench(zk_chroot: Chroot, proxy: Proxy) -> Iterator[Bench]:
    yield from made(zk_chroot.connect(timeout=30, hosts=proxy.host))


@pytest.fixture
def others(zk_chroot: Chroot) -> Iterator[Bench]:
    """Another client of the same ZooKeeper, with a separate connection."""
    yield from made(zk_chroot.connect())


@contextlib.contextmanager
def cut_off(bench: Bench, proxy: Proxy) -> Iterator[None]:
    """Cut the connection; when the block ends, wait until the mirror is complete again."""
    proxy.set("close")
    wait_for(lambda: not bench.zk.synced)
    yield
    proxy.set("open")
    wait_for(lambda: bench.zk.synced)


def requested(bench: Bench) -> NodeRequest:
    found: NodeRequest = wait_for(lambda: next(iter(bench.requests()), None))
    return found


def test_request_of_zuul_with_the_id_of_a_lost_one_keeps_its_node(
    bench: Bench, others: Bench, proxy: Proxy
) -> None:
    machine = bench.machine()
    machine.advance()
    request = requested(bench)
    kazoo, request_id = others.zk.kazoo_client, request.id or ""
    with cut_off(bench, proxy):
        kazoo.delete(paths.request(request_id))
        zuul = NodeRequest()
        zuul.state, zuul.requestor, zuul.node_types = REQUESTED, "zuul", ["big"]
        kazoo.create(paths.request(request_id), zuul.serialize())
        present = others.zk.getNodeRequest(request_id)
        assert present is not None
        node = others.fulfil(present)

    def failed() -> bool:
        with pytest.raises(LaunchStatusException, match="no longer exists"):
            machine.advance()
        return True

    wait_for(failed, what="the launch to fail")
    bench.zk.kazoo_client.sync("/")
    stored, kept = others.zk.getNode(node.id or ""), others.zk.getNodeRequest(request_id)
    assert stored is not None
    assert (stored.state, stored.user_data, others.zk.getNodeLockContenders(stored)) == (
        READY,
        None,
        [],
    )
    assert kept is not None and kept.requestor == "zuul"


@pytest.mark.parametrize("step", ["slot", "release", "event"])
def test_node_of_zuul_with_the_id_of_a_lost_backing_node_is_not_used(
    bench: Bench, others: Bench, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    machine = bench.machine()
    machine.advance()
    requested(bench)
    backing = bench.fulfil()
    bench.finish(machine)
    (record,) = bench.records()
    kazoo, node_id = others.zk.kazoo_client, backing.id or ""
    if step == "release":
        bench.end(machine.node_id)
        wait_for(record.isEmpty)
        record.releasing = True  # nothing else decides about it
    with cut_off(bench, proxy):
        if step != "event":
            monkeypatch.setattr(bench.adapter.slots, "_backing_node_changed", lambda *_args: None)
        kazoo.delete(paths.node(node_id), recursive=True)
        zuul = Node()
        zuul.state, zuul.provider, zuul.type = IN_USE, "cloud", "big"
        kazoo.create(paths.node(node_id), zuul.serialize())
        kazoo.create(f"{paths.node(node_id)}/lock")
    wait_for(lambda: (node := bench.zk.getCachedNode(node_id)) and node.user_data is None)
    if step == "release":
        bench.adapter.slots.housekeeping._release(record)
        assert bench.records() == []
    else:
        assert record.lost == (step == "event")
        other = bench.machine()
        other.advance()
        fresh = bench.fulfil()
        assert bench.finish(other).driver_data["backing_node"] == fresh.id
    stored = others.zk.getNode(node_id)
    assert stored is not None
    assert (stored.state, stored.user_data) == (IN_USE, None)


def test_request_whose_cancellation_is_lost_is_canceled_with_the_next_connection(
    bench: Bench, others: Bench, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = bench.machine()
    machine.advance()
    request_id = requested(bench).id or ""

    def lose(_txn: Txn, callback: Callback) -> None:
        callback(None, ConnectionLoss())

    with cut_off(bench, proxy):
        with monkeypatch.context() as patch:
            patch.setattr(bench.zk.writer, "submit", lose)
            bench.adapter.slots.forget(request_id, delete=True)
        assert others.zk.getNodeRequest(request_id) is not None
    wait_for(lambda: others.zk.getNodeRequest(request_id) is None, what="the cancellation")

"""How few ZooKeeper operations a request takes; time and CPU are in tests/benchmark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.driver import Drivers
from nodepool.launcher import NodePool
from nodepool.zk import zookeeper as zk
from nodepool.zk.zookeeper import ZooKeeper
from tests import REPOSITORY
from tests.conftest import Chroot, wait_for

DRIVERS = REPOSITORY / "tests" / "benchmark" / "drivers"


@pytest.fixture
def pool(zk_chroot: Chroot) -> Iterator[NodePool]:
    Drivers.load([str(DRIVERS)])
    nodepool = NodePool(
        None,
        zk_chroot.config(
            {
                "drivers-path": [str(DRIVERS)],
                "labels": [{"name": "small"}],
                "providers": [
                    {
                        "name": "p0",
                        "driver": "instant",
                        "pools": [{"name": "main", "labels": ["small"]}],
                    }
                ],
            }
        ),
    )
    nodepool.start()
    try:
        wait_for(lambda: nodepool.ready and len(nodepool.zk.getRegisteredPools()) == 1)
        yield nodepool
    finally:
        nodepool.stop()
        Drivers.load([])


def operations(nodepool: NodePool) -> tuple[int, int]:
    return nodepool.zk.writer.sent, sum(tree.reads for tree in nodepool.zk.trees)


def submit(client: Any, **values: Any) -> str:
    record = {
        "state": "requested",
        "state_time": time.time(),
        "node_types": ["small"],
        "requestor": "zuul",
        **values,
    }
    path = client.create("/nodepool/requests/200-", json.dumps(record).encode(), sequence=True)
    return str(path).rsplit("/", 1)[1]


def fulfilled(facade: ZooKeeper, request_id: str) -> list[str]:
    request = wait_for(
        lambda: (r := facade.getNodeRequest(request_id)) and r.state == zk.FULFILLED and r
    )
    return list(request.nodes)


@pytest.mark.spec(
    "a launched node costs at most 5 transactions and 3 reads from submission to removal"
)
def test_a_launched_node(pool: NodePool, zk_chroot: Chroot) -> None:
    facade = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    transactions, reads = operations(pool)
    request_id = submit(facade.kazoo_client)
    (node_id,) = fulfilled(facade, request_id)
    node = facade.getNode(node_id)
    assert node is not None
    facade.lockNode(node)
    facade.kazoo_client.delete(f"/nodepool/requests/{request_id}")
    node.state = zk.USED
    facade.storeNode(node)
    facade.unlockNode(node)
    wait_for(lambda: facade.getNodes() == [])
    assert operations(pool)[0] - transactions <= 5
    assert operations(pool)[1] - reads <= 3


@pytest.mark.spec("a ready node costs at most 2 transactions and 1 read")
def test_a_ready_node(pool: NodePool, zk_chroot: Chroot) -> None:
    facade = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    node = zk.Node()
    node.state = zk.READY
    node.provider, node.pool, node.type = "p0", "main", ["small"]
    facade.storeNode(node)
    wait_for(lambda: [*pool.zk.node_tree.iter_free("p0", "main", "small")])
    transactions, reads = operations(pool)
    assert fulfilled(facade, submit(facade.kazoo_client)) == [node.id]
    assert operations(pool)[0] - transactions <= 2
    assert operations(pool)[1] - reads <= 1
    stored = facade.getNode(node.id or "")
    assert stored is not None
    assert stored.state == zk.READY
    assert not facade.getNodeLockContenders(stored)

"""Two launcher processes replace 50 ready nodes; one of them is killed in a wave."""

from __future__ import annotations

import time

import pytest

from nodepool.zk.mirror import notes
from nodepool.zk.rotations import Rotation
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import wait_for
from tests.support.faults.launcher import Bench

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]

KEPT, UNREADY = 50, 5


def test_ready_nodes_never_fall_below_the_limit_although_a_launcher_dies(bench: Bench) -> None:
    bench.cloud.set(create_delay=0.2, delete_delay=0.1)
    label = {"name": "l0", "min-ready": KEPT, "max-unready": UNREADY}
    config = bench.config(bench.provider(pool={"max-servers": 2 * KEPT}), labels=[label])
    launchers = [bench.start(config, wait=False) for _ in range(2)]
    zk = ZooKeeper(bench.zuul.connection)
    free = zk.node_tree.counted.free
    wait_for(lambda: free["l0"] == KEPT, 60, f"{KEPT} ready nodes")
    before = set(zk.node_tree.nodes)
    counts = []
    zk.node_tree.listeners.append(lambda *_: counts.append(free["l0"]))
    for _operator in range(2):
        notes.write(zk.kazoo_client, Rotation("label", "l0", time.time()))
    half = KEPT // 2
    wait_for(lambda: len(before & set(zk.node_tree.nodes)) <= half, 60, "half of them are gone")
    launchers[0].kill()
    wait_for(lambda: not zk.readNotes(Rotation), 90, "the rotation has ended")
    wait_for(lambda: free["l0"] == KEPT, 60, f"{KEPT} ready nodes")
    assert not before & {i for i, node in zk.node_tree.nodes.items() if node.state == "ready"}
    assert min(counts) >= KEPT - UNREADY
    assert launchers[1].alive()

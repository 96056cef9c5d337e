"""What it costs a launcher to probe 1,000 idle nodes, with a real sshd on loopback.

  python -m tests.benchmark.probes

ZooKeeper is not part of it: a probe that succeeds neither reads nor writes there.
"""

from __future__ import annotations

import time

import pytest

from nodepool.launcher.nodes.probes import NodeProbes
from nodepool.nodescan import NodescanWorker
from tests.support.sshd import ssh_server
from tests.unit.launcher.test_probes import Scene

NODES, INTERVAL = 1000, 1800


def measure(probes: NodeProbes, scene: Scene, ids: list[str]) -> float:
    """Return the seconds of CPU until each node has been probed."""
    began = time.process_time()
    for node_id in ids:
        scene.step(node_id)
    scene.clock.now += INTERVAL
    waiting = set(ids)
    for node_id in ids:
        probes.queue.add(node_id)
    while waiting:
        key = probes.queue.get()
        assert key is not None, "no answer"
        if scene.step(key) is not None:
            waiting.discard(key)
        probes.queue.done(key)
    return time.process_time() - began


def main() -> None:
    with pytest.MonkeyPatch.context() as patch, ssh_server() as server:
        scene = Scene(patch)
        scene.probes._scans = NodescanWorker("benchmark")
        scene.probes._scans.start()
        values = {
            "interface_ip": "127.0.0.1",
            "connection_port": server.port,
            "host_keys": server.host_keys,
        }
        ids = [scene.node(number, **values) for number in range(NODES)]
        measure(scene.probes, scene, ids[:10])  # imports paramiko
        cpu = measure(scene.probes, scene, ids[10:]) / (NODES - 10)
        scene.probes._scans.stop()
        scene.probes._scans.join()
        assert scene.counted.count("nodepool.provider.p.probe.ok") == NODES, scene.counted
        assert server.connections() >= NODES, server.connections()
        share = 100 * cpu * NODES / INTERVAL
        print(f"{1000 * cpu:.1f} ms of CPU for a probe")
        print(f"{share:.2f} % of a core for {NODES} nodes every {INTERVAL} s")


if __name__ == "__main__":
    main()

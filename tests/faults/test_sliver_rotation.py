"""Operators replace idle slivers; the ready ones never fall below the limit."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.faults.launcher import Bench
from tests.support.faults.slivers import LABEL, SliverBench
from tests.support.nodemanager.scene import make_daemon

pytestmark = [pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(300)]

KEPT, UNREADY = 50, 5


@pytest.fixture
def slivers(bench: Bench, tmp_path: pathlib.Path) -> Iterator[SliverBench]:
    for nm in make_daemon(tmp_path, overcommit={"disk": 100.0}):
        yield SliverBench(bench, nm)
        for launcher in bench.launchers:
            launcher.kill()


@pytest.mark.parametrize("killed", [False, True])
def test_ready_slivers_never_fall_below_the_limit(
    slivers: SliverBench, killed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = slivers.config(**{"min-ready": KEPT, "max-unready": "10%"})
    launcher = slivers.start(config)
    job = slivers.jobs(1)
    zk = ZooKeeper(slivers.zuul.connection)
    free = zk.node_tree.counted.free
    wait_for(lambda: free[LABEL] == KEPT, 60, f"{KEPT} ready nodes")
    before, counts = slivers.ready(), []
    # Called for each change of a node in ZooKeeper.
    zk.node_tree.listeners.append(lambda *_: counts.append(free[LABEL]))
    waiting = slivers.command("rotate", "label", LABEL, "--wait", "--reason", "more memory")
    if killed:
        half = KEPT // 2
        wait_for(lambda: len(before & slivers.slivers()) <= half, 60, "half of them are gone")
        launcher.kill()
        launcher = slivers.start(config)
    out, err = waiting.communicate(timeout=limit(120))
    assert waiting.returncode == 0 and f"the rotation of label {LABEL} has ended" in out, err
    wait_for(lambda: free[LABEL] == KEPT, 60, f"{KEPT} ready nodes")
    assert not before & slivers.slivers()
    with capsys.disabled():
        print(f"{KEPT} slivers replaced: at least {min(counts)} of them ready")
    assert min(counts) >= KEPT - UNREADY
    slivers.end(*job)
    assert f"rotation of label {LABEL}: more memory" in launcher.text()

"""Idle slivers that no longer answer are replaced; a restart of the node manager replaces none."""

from __future__ import annotations

import functools
import pathlib
import signal
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.client import programs
from nodepool.nodemanager.host import group_name
from tests.conftest import wait_for
from tests.support import cgroups
from tests.support.deadline import limit
from tests.support.faults.launcher import Bench
from tests.support.faults.slivers import LABEL, SliverBench
from tests.support.nodemanager.scene import make_daemon

pytestmark = [pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(300)]

#: More than twice the number that is broken: most of the others answer.
KEPT, INTERVAL = 6, 5


def stocked(slivers: SliverBench) -> bool:
    return len(slivers.ready()) == KEPT


@pytest.fixture
def slivers(bench: Bench, tmp_path: pathlib.Path) -> Iterator[SliverBench]:
    for nm in make_daemon(tmp_path):
        found = SliverBench(bench, nm)
        found.start(found.config(**{"min-ready": KEPT, "probe": {"interval": INTERVAL}}))
        wait_for(functools.partial(stocked, found), 60, "the idle slivers")
        yield found
        for launcher in bench.launchers:
            launcher.kill()


def remove_sshd(slivers: SliverBench, name: str) -> None:
    argv = ["rm", "/usr/sbin/sshd"]
    with programs.start(slivers.nm.client, name, argv) as running:
        while running.read(limit(20)) is not None:
            pass
        assert running.status == 0


def freeze(slivers: SliverBench, name: str) -> None:
    """Let all programs of a sliver stand still, without the knowledge of the node manager."""
    group = group_name(str(slivers.nm.tmp / "state"))
    for file, word in (("freezer.state", "FROZEN"), ("cgroup.freeze", "1")):
        for path in cgroups.named(f"{name}.sliver"):
            if group in path.parts and (path / file).exists():
                (path / file).write_text(word)
                return
    pytest.skip("cgroups of this host cannot be frozen")


def log_of(slivers: SliverBench) -> str:
    return slivers.bench.launchers[-1].text()


@pytest.mark.parametrize("way", ["sshd is removed", "frozen"])
def test_idle_sliver_that_no_longer_answers_is_replaced_with_the_reason(
    slivers: SliverBench, way: str
) -> None:
    before = slivers.ready()
    name = min(before)
    {"frozen": freeze, "sshd is removed": remove_sshd}[way](slivers, name)
    slivers.nm.wait(name, "gone", 120)
    wait_for(lambda: stocked(slivers), 60, "another sliver")
    assert before - slivers.ready() == {name}
    node = name.removeprefix("np")
    (line,) = [each for each in log_of(slivers).splitlines() if "its probe failed twice" in each]
    assert f"Deleting node {node}: its probe failed twice: " in line
    wait_for(
        lambda: "its probe failed twice" in slivers.run("explain", "node", node), 30, "the history"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_restart_of_the_node_manager_replaces_no_idle_sliver(
    slivers: SliverBench, number: signal.Signals
) -> None:
    before = slivers.ready()
    slivers.nm.stop(number)
    wait_for(lambda: log_of(slivers).count("; repeating it in") >= 3, 60, "failed probes")
    slivers.nm.start()
    wait_for(lambda: log_of(slivers).count(" answers again and is kept") >= 3, 60, "good probes")
    assert slivers.ready() == before == slivers.slivers()
    assert "its probe failed twice" not in log_of(slivers)


def test_node_manager_that_is_down_for_long_costs_no_idle_sliver(slivers: SliverBench) -> None:
    before = slivers.ready()
    slivers.nm.stop()
    problem = "most idle nodes of provider metal fail their probes"
    wait_for(lambda: problem in slivers.run("problem-list", "--format", "json"), 90, "the problem")
    slivers.nm.start()
    assert slivers.ready() == before == slivers.slivers()
    slivers.zuul.wait_fulfilled([slivers.zuul.submit(LABEL)], timeout=limit(60))

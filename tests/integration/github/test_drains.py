"""Drains of the pool: idle runners leave, runners with a job stay, and a set without nodes gets
no jobs.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator

import pytest

from nodepool.adapters.github.program import GitHub
from nodepool.client import Pool
from nodepool.status.drains import remaining
from nodepool.status.explain import explain
from nodepool.zk.drains import Drain
from nodepool.zk.history import HistoryReader
from nodepool.zk.mirror import notes
from tests.conftest import wait_for
from tests.integration.github.conftest import Site
from tests.integration.github.test_jobs import end_worker, wait_connected
from tests.integration.lease.conftest import places
from tests.support.github import Emulator, Program, emulator
from tests.support.launcher import LauncherBench
from tests.support.sshd import SSHServer

pytestmark = [pytest.mark.github, pytest.mark.full]
FIRST, SECOND = "127.0.0.1", "localhost"


@pytest.fixture
def service() -> Iterator[Emulator]:
    """A service whose polls wait as long as those of GitHub."""
    with emulator("--long-poll-ms", "50000") as made:
        yield made


@pytest.fixture
def pool(bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path) -> Iterator[Pool]:
    with places(bench, sshd, tmp_path, 6, "small", names=(FIRST, SECOND)) as made:
        yield made


def begin(bench: LauncherBench, kind: str, name: str, **options: bool) -> Drain:
    found = Drain(kind, name, time.time(), reason="new disks", **options)
    notes.write(bench.zk.kazoo_client, found)
    return found


def hosts(bench: LauncherBench, daemon: GitHub, state: str) -> list[str | None]:
    """Return the hosts of the runners in a state."""
    found = []
    for runner in daemon.fleets[0].runners():
        if runner.state == state and runner.lease is not None and not runner.withdrawn:
            node = bench.zk.getNode(runner.lease.nodes[0].id)
            found.append(node.hostname if node is not None else None)
    return found


@pytest.mark.parametrize("keep_idle", [False, True])
def test_idle_runners_leave_a_drained_host_and_a_job_on_it_finishes(
    site: Site, service: Emulator, program: Program, bench: LauncherBench, keep_idle: bool
) -> None:
    program.behave(seconds=3600)
    second = begin(bench, "host", SECOND)
    daemon = site.start({"name": "set", "min": 2, "max": 3})
    wait_connected(service)
    job = service.add_job("set")
    wait_for(
        lambda: (
            hosts(bench, daemon, "idle") == [FIRST] * 2 and hosts(bench, daemon, "busy") == [FIRST]
        ),
        60,
        "two idle runners and one with a job",
    )
    notes.remove(bench.zk.kazoo_client, second)
    drain = begin(bench, "host", FIRST, keep_idle=keep_idle)
    wait_for(lambda: hosts(bench, daemon, "idle") == [SECOND] * 2, 25, "idle runners elsewhere")
    assert hosts(bench, daemon, "busy") == [FIRST] and not daemon.status()["trouble"]
    wait_for(lambda: len(remaining(bench.zk, drain)) == 1, 10, "the node with the job")
    [lease] = [lease for lease in site.pool.leases() if lease.drained]
    assert lease.drained == f"host {FIRST} is drained: new disks"
    end_worker(program)
    wait_for(lambda: remaining(bench.zk, drain) == [], 30, "the end of the drain's nodes")
    service.call("POST", f"/jobs/{job}/complete", {"result": "failed"})
    assert daemon.fleets[0].idled.count == 0


@pytest.mark.parametrize(
    "drained",
    [("label", "small"), ("provider", "hosts"), ("pool", "hosts-main"), ("host", "both")],
    ids="-".join,
)
def test_set_without_nodes_gets_no_jobs_and_resumes_when_the_drain_ends(
    site: Site, service: Emulator, pool: Pool, bench: LauncherBench, drained: tuple[str, str]
) -> None:
    daemon = site.start({"name": "set", "min": 1, "max": 3})
    [one] = daemon.sets
    wait_connected(service)
    wait_for(lambda: hosts(bench, daemon, "idle"), 60, "an idle runner")
    names = (FIRST, SECOND) if drained[0] == "host" else (drained[1],)
    drains = [begin(bench, drained[0], name) for name in names]
    wait_for(lambda: one.capacity() == 0 and not one.fleet.runners(), 25, "no capacity, no runner")
    assert f"{drains[0].name} is drained: new disks" in str(daemon.status()["trouble"])
    assert "is drained: new disks" in explain(bench.zk, "label", "small", HistoryReader()).answer
    service.add_job("set")
    wait_for(lambda: service.jobs("available"), 10, "a job that is not acquired")
    assert pool.leases() == [] and all(not remaining(bench.zk, each) for each in drains)
    notes.remove(bench.zk.kazoo_client, drains[0])
    wait_for(lambda: service.jobs("completed"), 25, "the job")
    assert not daemon.status()["trouble"]


def test_daemon_that_starts_during_a_drain_knows_it(
    site: Site, service: Emulator, bench: LauncherBench
) -> None:
    first = site.start({"name": "set", "min": 1, "max": 3})
    wait_for(lambda: hosts(bench, first, "idle"), 60, "an idle runner")
    site.stop()
    drain = begin(bench, "label", "small")
    daemon = site.start({"name": "set", "min": 1, "max": 3})
    wait_for(lambda: remaining(bench.zk, drain) == [], 60, "the return of its node")
    assert daemon.sets[0].capacity() == 0
    notes.remove(bench.zk.kazoo_client, drain)
    wait_for(lambda: hosts(bench, daemon, "idle"), 30, "an idle runner")

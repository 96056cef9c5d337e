"""Drains of hosts with real slivers."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.zk.drains import Drain
from nodepool.zk.mirror import notes
from tests.conftest import wait_for
from tests.integration.nodemanager.daemon.test_launcher import config, log_in
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench, reason_for
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


def test_drain_of_the_only_host_waits_for_its_jobs(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(nm)
    launcher = bench.start(given)
    path = bench.config(given)
    request, _nodes = bench.fulfilled("small", "small")
    used = bench.zuul.accept(request)
    wait_for(lambda: any(each["providers"]["metal"]["hosts"] for each in bench.zk.readReports()))
    ended: list[float] = []

    def run() -> None:
        assert nodepoolcmd.main(["-c", path, "drain", "host", "h0", "--wait"]) == 0
        ended.append(time.monotonic())

    thread = threading.Thread(target=run, name="drain")
    thread.start()
    wait_for(lambda: launcher.state.drains.all())
    waiting = bench.submit("small")
    wait_for(lambda: "host h0 is drained" in reason_for(launcher.assignment, waiting))
    wait_for(
        lambda: (
            [
                host["problem"]
                for each in bench.zk.readReports()
                for host in each["providers"]["metal"]["hosts"]
            ]
            == ["host h0 is drained"]
        )
    )
    node = bench.zuul.node(used[0])
    assert log_in(nm, node, tmp_path).startswith("np"), "the job goes on"
    bench.zuul.give_back(used[0])
    bench.wait_gone(used[0])
    assert not ended
    bench.zuul.give_back(used[1])
    bench.wait_gone(used[1])
    last = time.monotonic()
    thread.join(limit(30))
    assert ended and ended[0] - last < limit(1)
    assert "host h0 has no nodes left" in capsys.readouterr().out
    assert bench.zuul.request(waiting)["state"] == "requested"
    assert nodepoolcmd.main(["-c", path, "undrain", "host", "h0"]) == 0
    bench.wait_request(waiting, "fulfilled", timeout=60)


def test_slivers_go_to_the_other_host(
    bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path
) -> None:
    with contextlib.contextmanager(make_daemon)(tmp_path, number=1) as other:
        launcher = bench.start(config(nm, other))
        hosts = launcher.getProviderManager("metal").adapter.hosts
        wait_for(lambda: all(host.usable for host in hosts.all()))
        drained = Drain("host", "h0", time.time())
        notes.write(bench.zk.kazoo_client, drained)
        wait_for(lambda: launcher.state.drains.all())
        _request, nodes = bench.fulfilled("small", "small", "small")
        assert {node.external_id["host"] for node in nodes} == {"h1"}
        alone = (
            hosts.get("h1").capacity["slivers"] + hosts.get("h0").capacity["allocated"]["slivers"]
        )
        assert sum(limits["slivers"] for limits in hosts.limits()) == alone

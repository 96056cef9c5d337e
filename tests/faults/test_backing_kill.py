"""A launcher that is killed while it gets, fills or returns backing nodes (NM-C.8,
``backing-label``).
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from tests import REPOSITORY
from tests.conftest import Chroot, wait_for
from tests.support.launcher import LauncherBench, make_bench
from tests.support.nodemanager.backing_scene import BackingHosts, make_hosts

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]


@pytest.fixture
def bench(
    zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[LauncherBench]:
    yield from make_bench(zk_chroot, monkeypatch, tmp_path)


@pytest.fixture
def hosts(tmp_path: pathlib.Path) -> Iterator[BackingHosts]:
    yield from make_hosts(tmp_path)


class Launcher:
    """The program, in the foreground."""

    def __init__(self, config: str, tmp_path: pathlib.Path) -> None:
        self.log = tmp_path / "launcher.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "nodepool.cmd.launcher",
                    "-f",
                    "--no-webapp",
                    "-c",
                    config,
                    "-p",
                    str(tmp_path / "pid"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def ours(bench: LauncherBench) -> list[Any]:
    return [
        node
        for node in bench.nodes(provider="racks")
        if node.user_data and "metastatic:metal" in node.user_data
    ]


def slivers(hosts: BackingHosts) -> list[str]:
    try:
        return hosts.slivers()
    except (RpcError, RpcFault):
        return []


BEFORE: dict[str, Callable[[LauncherBench, BackingHosts], Any]] = {
    # The request for a backing node lives for some milliseconds; the server counts it.
    "asked": lambda bench, hosts: bench.zuul.client.exists("/nodepool/requests").cversion > 1,
    "taken over": lambda bench, hosts: ours(bench),
    "pushed": lambda bench, hosts: hosts.places(),
    "sliver made": lambda bench, hosts: slivers(hosts),
}
AFTER: dict[str, Callable[[LauncherBench, BackingHosts], Any]] = {
    "sliver gone": lambda bench, hosts: not slivers(hosts),
    "marked": lambda bench, hosts: any(
        json.loads(node.user_data)["failed"] for node in ours(bench)
    ),
    "daemon removed": lambda bench, hosts: not hosts.places(),
}


@pytest.mark.spec("NM-C.8: a launcher killed with SIGKILL at any point loses no backing node")
@pytest.mark.parametrize("moment", [*BEFORE, *AFTER])
def test_killed_launcher_loses_no_backing_node(
    bench: LauncherBench, hosts: BackingHosts, tmp_path: pathlib.Path, moment: str
) -> None:
    path = bench.chroot.config(hosts.config(), timeout=2.0)
    launcher = Launcher(path, tmp_path)
    try:
        request = bench.zuul.submit("small")
        if moment in BEFORE:
            wait_for(lambda: BEFORE[moment](bench, hosts), 40, moment)
            launcher.kill()
            launcher = Launcher(path, tmp_path)
        bench.wait_request(request, "fulfilled", timeout=60)
        (node_id,) = bench.zuul.accept(request)
        node = bench.zuul.node(node_id)
        assert hosts.log_in(node) == f"np{node_id}"
        assert hosts.client(node["host_id"]).call("GetRecord", f"np{node_id}")["state"] == "ready"
        if moment in AFTER:
            bench.zuul.give_back(node_id)
            wait_for(lambda: AFTER[moment](bench, hosts), 40, moment)
            launcher.kill()
            launcher = Launcher(path, tmp_path)
        else:
            launcher.kill()  # in use: sliver and login do not need it
            assert hosts.log_in(node) == f"np{node_id}"
            launcher = Launcher(path, tmp_path)
            bench.zuul.give_back(node_id)
        bench.wait_gone(node_id, timeout=60)
        wait_for(
            lambda: not ours(bench) and not hosts.places(),
            120,
            "all backing nodes to be given back",
        )
        wait_for(
            lambda: len(bench.nodes(provider="racks", state="ready")) == 2,
            60,
            "the machines to be ready for others",
        )
        assert not [n for n in bench.nodes() if n.provider == "metal"]
    except BaseException:
        print(launcher.log.read_text()[-8000:])
        raise
    finally:
        launcher.stop()

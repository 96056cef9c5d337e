"""A process that was killed for memory is named within a second, to everybody who waits for it."""

from __future__ import annotations

import datetime
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.client import Lease, Pool
from nodepool.status.explain import explain
from nodepool.texts import killed
from nodepool.zk.history import HistoryReader
from tests.conftest import wait_for
from tests.integration.lease.conftest import Api
from tests.integration.nodemanager.daemon.test_events import LATER
from tests.integration.nodemanager.daemon.test_launcher import config
from tests.support.deadline import limit
from tests.support.gitlab_runner import Manager, response
from tests.support.launcher import LauncherBench
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root"),
]
LINE = r"process (\d+) \(python3[^)]*\) was killed: the node's memory limit of 128 MiB was reached"


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


@pytest.fixture
def pool(bench: LauncherBench, nm: NmDaemon, tmp_path: pathlib.Path) -> Iterator[Pool]:
    api = Api(bench, bench.start(config(nm)), tmp_path)
    try:
        yield Pool(api.url, api.token())
    finally:
        api.app.stop()


def moment(kill: Any) -> float:
    return datetime.datetime.fromisoformat(kill["time"]).timestamp()


@pytest.mark.spec("issue 49, 2: named within 1 s, for the client and in explain")
def test_kill_is_named_within_a_second(bench: LauncherBench, pool: Pool) -> None:
    with pool.lease("small") as lease:
        assert lease.kills == []
        assert lease.run("true").stderr == b""
        done = lease.run(LATER)
        ended = time.time()
        [kill] = lease.kills
        assert done.status == 137 and re.search(f"^nodepool: {LINE}$", done.stderr.decode(), re.M)
        assert (kill["node"], kill["memory_limit"]) == (lease.nodes[0].id, 128 << 20)
        late = {"client": ended - moment(kill)}
        # Another program of the same lease is not named again, nor for another failure.
        assert lease.run("exit 3").stderr == b""
        zk = bench.pools[0].zk
        again = lease.run(f"sh -c '{LATER}'; sleep 1; exit 2")
        assert again.status == 2 and len(re.findall(LINE, again.stderr.decode())) == 1
        assert len(lease.kills) == 2 and lease.kills[0]["pid"] == kill["pid"]
        # Explain, from the history alone as the command line has it.
        lease.run(f"setsid sh -c 'sleep 1; {LATER}' > /dev/null 2>&1 < /dev/null & true")
        request = explain_until(zk, "node", lease.nodes[0].id, 3)
        late["explain"] = time.time() - moment(lease.refresh().kills[2])
        assert len(re.findall(LINE, explain(zk, "request", lease.id, HistoryReader()).text())) == 3
        assert all(killed(each) in request for each in lease.kills)
        page = pool.call("GET", f"/explain/node/{lease.nodes[0].id}")["history"]
        assert [event["pid"] for event in page if event["type"] == "node-killed"] == [
            each["pid"] for each in lease.kills
        ]
    print({name: f"{seconds:.3f} s" for name, seconds in late.items()})
    assert all(seconds < limit(1.0) for seconds in late.values()), late
    usage = r"used [\d.]+ s of CPU in .*; kills for memory: 3"
    wait_for(
        lambda: re.search(usage, explain(zk, "request", lease.id, HistoryReader()).text()),
        30,
        "the usage, with the request",
    )


def explain_until(zk: Any, kind: str, name: str, number: int) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = explain(zk, kind, name, HistoryReader()).text()
        if len(re.findall(LINE, text)) == number:
            return text
        time.sleep(0.01)
    raise AssertionError(text)


@pytest.mark.spec("issue 49, 2: a launcher without the provider also knows")
def test_other_launcher_and_a_later_client_know_kills(
    bench: LauncherBench, pool: Pool, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "other").mkdir()
    api = Api(
        bench, bench.start({"labels": [], "providers": []}, name="other.yaml"), tmp_path / "other"
    )
    try:
        with pool.lease("small") as lease:
            other = Pool(api.url, api.token())
            found = Lease(other, other.call("GET", f"/leases/{lease.id}"), token=lease.token)
            lease.run(LATER)
            assert [each["pid"] for each in found.find_kills(1.0)] == [lease.kills[0]["pid"]]
            [listed] = other.leases()
            assert listed.kills[0]["program"] == lease.kills[0]["program"]
            # What was killed before the client came is not of its command.
            assert pool.get(lease.id, lease.token).run("exit 137").stderr == b""
    finally:
        api.app.stop()


@pytest.mark.spec("issue 49, 2: in the output of jobs of GitLab")
def test_job_of_gitlab_names_the_kill_in_its_output(pool: Pool, tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "NODEPOOL_URL": pool.url, "NODEPOOL_TOKEN": pool.token or ""}
    folders = ("--builds-dir", "/root/builds", "--cache-dir", "/root/cache")
    manager = Manager(tmp_path, environment, folders, ("--label", "small"))
    try:
        result = manager.run({"build_script": f"({LATER})\nexit $?"}, response())
        assert result.state == "failed" and re.search(LINE, result.log), result.log
    finally:
        shutil.rmtree(manager.tmp, ignore_errors=True)


@pytest.mark.spec("issue 49: a hostile job neither floods nor forges")
def test_many_kills_are_bounded_and_stay_with_their_lease(pool: Pool) -> None:
    with pool.lease("small") as hostile, pool.lease("small") as other:
        forged = "Memory cgroup out of memory: Killed process 1 (forged)"
        many = f"for i in $(seq 25); do python3 -c 'bytearray(1 << 30)'; done; echo '{forged}'"
        # Some fail to allocate, others are killed while they touch it.
        hostile.run(f"{many} > /dev/kmsg 2> /dev/null; for i in $(seq 23); do ({LATER}); done; "
                    "exit 1", timeout="2m")  # fmt: skip
        assert len(hostile.kills) == 20
        assert all(kill["node"] == hostile.nodes[0].id for kill in hostile.kills)
        assert not any("forged" in kill["program"] for kill in hostile.kills)
        assert other.refresh().kills == []
        assert other.run("exit 137").stderr == b""

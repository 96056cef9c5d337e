"""ZooKeeper is restored from a backup, or emptied: nothing that is in use is deleted, and
`recover` sorts it out.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.zk import paths
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.zookeeper import Node, ZooKeeper
from tests import REPOSITORY
from tests.conftest import delete_tree, wait_for
from tests.support.deadline import limit
from tests.support.faults.launcher import HERE, Bench, LauncherProcess, Proxy, Zuul, own_server

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

MACHINES = 20


class Drill:
    """A server with a backup, and machines that were launched since."""

    def __init__(self, server: dict[str, Any], tmp: pathlib.Path) -> None:
        self.server = server
        self.bench = Bench(server, tmp)
        self.backup = tmp / "backup"
        self.config = self.bench.config(self.bench.provider(pool={"max-servers": 60}))

    @property
    def zuul(self) -> Zuul:
        return self.bench.zuul

    def reconnect(self) -> None:
        """Zuul is restarted with every restore."""
        server = self.server
        client = ZooKeeperClient(
            f"{server['hosts']}{self.bench.chroot}",
            timeout=60,
            tls_cert=server["cert"],
            tls_key=server["key"],
            tls_ca=server["ca"],
        )
        client.connect(timeout=30)
        self.bench.zuul = Zuul(client)

    def use_some(self, count: int) -> list[str]:
        ids = [self.zuul.submit("l0") for _ in range(count)]
        self.zuul.wait_fulfilled(ids)
        return [node for request in ids for node in self.zuul.accept(request)]

    def back_up(self) -> None:
        self.server["stop"]()
        self.zuul.connection.disconnect()
        shutil.copytree(self.server["data"], self.backup)
        self.server["start"]()
        self.reconnect()

    def restore(self) -> None:
        # Zuul's session must outlive the server: if it ended first, launchers would delete the
        # nodes that it uses.
        self.server["stop"]()
        self.zuul.connection.disconnect()
        shutil.rmtree(self.server["data"])
        shutil.copytree(self.backup, self.server["data"])
        self.server["start"]()
        self.reconnect()

    def empty(self) -> None:
        """Lose all data, as with a volume that was replaced."""
        self.server["stop"]()
        self.zuul.connection.disconnect()
        shutil.rmtree(self.server["data"])
        self.server["start"]()
        self.reconnect()

    def start(self, *args: str, crash_at: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                str(HERE / "command.py"),
                "-c",
                str(self.config),
                "recover",
                *args,
                "--format",
                "json",
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "NODEPOOL_FAULT_DRIVERS": str(HERE / "drivers"),
                "NODEPOOL_CRASH_AT": crash_at,
            },
        )

    def status(self, *args: str, crash_at: str) -> int:
        with self.start(*args, crash_at=crash_at) as process:
            process.communicate(timeout=60)
        return process.returncode

    def run(self, *args: str) -> list[dict[str, Any]]:
        process = self.start(*args)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out
        return list(json.loads(out))

    def wait_searches(self, launcher: LauncherProcess, count: int = 3) -> None:
        """Until this many leak searches have begun since now: a leak is deleted by the second one
        that sees it.
        """
        cloud = self.bench.cloud
        before = cloud.count("listed")
        wait_for(lambda: cloud.count("listed") >= before + count, 30, "further leak searches")
        assert launcher.alive()

    def problem(self, launcher: LauncherProcess) -> bool:
        return "nodepool recover --dry-run" in launcher.readiness()

    def machines(self) -> dict[str, str]:
        """Node ids by the ids of their machines."""
        return {
            name: metadata["nodepool_node_id"]
            for name, metadata in self.bench.cloud.instances().items()
        }

    def leak(self, **metadata: str) -> str:
        """Something that the launcher created and forgot."""
        name = "i-leaked"
        marks = {"nodepool_provider_name": "p0", "nodepool_pool_name": "main", **metadata}
        new = self.bench.cloud.directory / "leak.new"
        new.write_text(json.dumps({"hostname": name, "metadata": marks}))
        new.replace(self.bench.cloud.directory / f"{name}.json")
        return name

    def check_search_works(self, node_id: str) -> None:
        name = self.leak(nodepool_node_id=node_id)
        wait_for(lambda: name not in self.bench.cloud.instances(), 30, "the leaked machine deleted")


@pytest.fixture
def drill(tmp_path: pathlib.Path) -> Iterator[Drill]:
    with own_server() as server:
        made = Drill(server, tmp_path)
        try:
            yield made
        finally:
            made.bench.close()


def test_locks_that_are_restored_with_the_session_of_a_running_daemon_end(drill: Drill) -> None:
    server, proxy = drill.server, Proxy(drill.server["port"])
    client = ZooKeeperClient(
        f"{proxy.host}{drill.bench.chroot}",
        timeout=20,
        tls_cert=server["cert"],
        tls_key=server["key"],
        tls_ca=server["ca"],
    )
    client.connect(timeout=30)
    try:
        zk = ZooKeeper(client)
        assert zk.wait_synced(20)
        node = Node()
        node.state, node.provider, node.type = "ready", "p0", "l0"
        zk.storeNode(node)
        zk.lockNode(node)
        session = client.session_id
        drill.back_up()
        wait_for(lambda: zk.connected and zk.synced)
        assert client.session_id == session
        zk.unlockNode(node)
        node.comment = "written after the backup"
        zk.storeNode(node)
        proxy.set("close")
        drill.restore()
        # The servers have seen more than this client, so they accept its session.
        kazoo = drill.zuul.connection.kazoo
        for number in range(100):
            kazoo.create(f"/number{number}")
        assert len(kazoo.get_children(paths.node_lock(node.id or ""))) == 1
        proxy.set("open")
        wait_for(lambda: zk.synced and client.session_id not in (None, session))
        wait_for(lambda: not zk.getNodeLockContenders(node), 60, "the lock to end")
        stored = zk.getNode(node.id or "")
        assert stored is not None and stored.comment is None
    finally:
        client.disconnect()
        proxy.stop()


@pytest.mark.parametrize("live", [False, True], ids=["launcher restarted", "launcher kept running"])
def test_machines_launched_after_the_backup_survive_and_can_be_recovered(
    drill: Drill, live: bool
) -> None:
    bench = drill.bench
    launcher = bench.start(drill.config)
    first = drill.use_some(3)
    drill.zuul.give_back(*first)
    bench.wait_nothing_left()
    drill.back_up()
    wait_for(launcher.ready, 30)
    used = sorted(drill.use_some(MACHINES))
    if not live:
        launcher.stop()
    drill.restore()
    if not live:
        launcher = bench.start(drill.config)
    wait_for(lambda: drill.problem(launcher), 60, "the problem in /ready")
    drill.wait_searches(launcher)
    assert sorted(drill.machines().values()) == used
    assert bench.cloud.count("leaked") == 0
    # New nodes do not get the ids of the lost ones, because many clouds name machines by them.
    fresh = drill.use_some(2)
    assert min(fresh) > used[-1]
    drill.wait_searches(launcher)
    drill.zuul.give_back(*fresh)
    wait_for(lambda: len(drill.machines()) == MACHINES, what="the new machines deleted")
    drill.wait_searches(launcher)
    assert sorted(drill.machines().values()) == used
    assert bench.cloud.count("leaked") == 0

    rows = drill.run("--dry-run")
    assert sorted(row["id"] for row in rows) == used and drill.run() == rows
    assert {row["provider"] for row in rows} == {"p0"} and all(row["age"] for row in rows)
    held, adopted, deleted = used[:5], used[5:10], used[10:]
    assert [row["result"] for row in drill.run("--hold", "--label", "l0", *held)] == ["held"] * 5
    assert [row["result"] for row in drill.run("--adopt", "--label", "l0", *adopted)] == [
        "adopted"
    ] * 5
    assert drill.problem(launcher)
    assert [row["result"] for row in drill.run("--delete", "--all")] == ["deleted"] * len(deleted)
    assert drill.run() == []
    wait_for(lambda: not drill.problem(launcher), 30, "the problem gone")
    assert sorted(drill.machines().values()) == held + adopted
    # The search works again; held and adopted nodes are like any others.
    drill.check_search_works("0000000001")
    assert sorted(drill.machines().values()) == held + adopted
    records = drill.zuul.read("nodes")
    assert {node: records[node]["state"] for node in held + adopted} == {
        **dict.fromkeys(held, "hold"),
        **dict.fromkeys(adopted, "ready"),
    }
    taken = drill.use_some(5)
    assert sorted(taken) == adopted
    drill.zuul.give_back(*taken)
    for node in held:
        path = f"/nodepool/nodes/{node}"
        drill.zuul.kazoo.set(path, json.dumps({**records[node], "state": "deleting"}).encode())
    bench.wait_nothing_left(30)


def test_machines_survive_an_emptied_tree(drill: Drill) -> None:
    bench = drill.bench
    launcher = bench.start(drill.config)
    used = sorted(drill.use_some(3))
    launcher.stop()
    for child in drill.zuul.kazoo.get_children("/"):
        drill.zuul.kazoo.delete(f"/{child}", recursive=True)
    drill.leak(nodepool_node_id="0000000002")  # of 11.0.0, which stamps nothing
    launcher = bench.start(drill.config)
    wait_for(lambda: drill.problem(launcher), 30, "the problem in /ready")
    drill.wait_searches(launcher)
    assert len(drill.machines()) == 4 and bench.cloud.count("leaked") == 0
    assert len(drill.run()) == 4
    # Another id than those that are in use would be given now; what carries no stamp stays lost.
    drill.run("--hold", "--label", "l0", "--provider", "p0", *used[:2])
    drill.wait_searches(launcher)
    assert len(drill.machines()) == 4 and bench.cloud.count("leaked") == 0
    assert len(drill.run("--delete", "--all")) == 2
    wait_for(lambda: not drill.problem(launcher), 30, "the problem gone")
    assert sorted(drill.machines().values()) == used[:2]


@pytest.mark.parametrize("how", ["data lost", "tree deleted"])
def test_running_launcher_serves_again_after_its_store_was_emptied(drill: Drill, how: str) -> None:
    bench = drill.bench
    launcher = bench.start(drill.config)
    drill.zuul.give_back(*drill.use_some(1))
    bench.wait_nothing_left()
    if how == "data lost":
        drill.empty()
    else:
        delete_tree(drill.zuul.kazoo, "/nodepool")
    bench.wait_pools(1)
    drill.zuul.kazoo.ensure_path("/nodepool/requests")  # as Zuul does with its request
    began = time.monotonic()
    ids = [drill.zuul.submit("l0") for _ in range(3)]
    drill.zuul.wait_fulfilled(ids)
    assert time.monotonic() - began < limit(10)
    for kind in ("components/launcher", "launcher-reports", "launcher-configs"):
        path = f"/nodepool/{kind}"
        wait_for(
            lambda path=path: (
                drill.zuul.kazoo.exists(path) and len(drill.zuul.kazoo.get_children(path)) == 1
            ),
            10,
            kind,
        )
    drill.zuul.use(ids)
    bench.wait_nothing_left()
    assert "trying again" not in launcher.text()


def test_recovery_needs_no_launcher_after_the_store_was_emptied(drill: Drill) -> None:
    launcher = drill.bench.start(drill.config)
    used = sorted(drill.use_some(2))
    launcher.stop()
    drill.empty()
    drill.zuul.kazoo.delete("/nodepool", recursive=True)
    assert [row["result"] for row in drill.run("--hold", "--label", "l0", *used)] == ["held"] * 2
    assert sorted(drill.zuul.read("nodes")) == used


def test_a_recovery_killed_before_any_write_can_be_repeated(drill: Drill) -> None:
    """What has been written keeps the machines safe in between: a launcher searches for leaks
    all the time.
    """
    bench = drill.bench
    launcher = bench.start(drill.config)
    drill.back_up()
    wait_for(launcher.ready, 30)
    used = sorted(drill.use_some(3))
    unmarked = drill.leak(nodepool_node_id="0000000010")  # of 11.0.0, which stamps nothing
    drill.restore()
    wait_for(lambda: drill.problem(launcher), 60, "the problem in /ready")
    kills = 0
    while drill.status("--hold", "--all", crash_at=f"write-before:{kills + 1}") == -signal.SIGKILL:
        kills += 1
        drill.wait_searches(launcher, 2)
        assert len(drill.machines()) == 4
    assert kills >= 3, "too few writes"
    wait_for(lambda: not drill.problem(launcher), 30, "the problem gone")
    drill.wait_searches(launcher)
    assert (
        sorted(drill.machines().values())
        == [*used, "0000000010"]
        == sorted(drill.zuul.read("nodes"))
    )
    assert unmarked in drill.machines()

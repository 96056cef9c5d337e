"""Static hosts are probed like other idle nodes, and before their nodes are ready."""

from __future__ import annotations

import getpass
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.launcher.nodes import probes
from tests.conftest import Chroot, wait_for
from tests.support.driver_scene import DriverBench
from tests.support.sshd import SSHServer, ssh_server

REASON = "its command has ended with status 1: no disk"


@pytest.fixture
def bench(zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverBench]:
    monkeypatch.setattr(probes, "TIMEOUT", 0.5)
    monkeypatch.setattr(probes, "PAUSE", 0.3)
    bench = DriverBench(zk_chroot)
    yield bench
    bench.stop()


@pytest.fixture
def sshd() -> Iterator[SSHServer]:
    with ssh_server(kinds=["ed25519"]) as server:
        yield server


@pytest.fixture
def broken(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a file; while it exists, the host is not healthy."""
    return tmp_path / "broken"


def config(sshd: SSHServer, probe: dict[str, Any], **host: Any) -> dict[str, Any]:
    given = {
        "name": "127.0.0.1",
        "labels": ["a"],
        "username": getpass.getuser(),
        "connection-port": sshd.port,
        "timeout": 2,
        **host,
    }
    pools = [{"name": "main", "nodes": [given]}]
    return {
        "labels": [{"name": "a", "probe": {"interval": 1, **probe}}],
        "providers": [{"name": "racks", "driver": "static", "pools": pools}],
    }


def command(sshd: SSHServer, broken: pathlib.Path) -> dict[str, Any]:
    text = f"[ ! -e '{broken}' ] || {{ echo no disk; exit 1; }}"
    return {"method": "command", "command": text, "ssh-key": str(sshd.client_key)}


def wait_unusable(bench: DriverBench, reason: str) -> None:
    """Wait until the host is reported as unusable, and no node of it is registered."""
    (pool,) = bench.pools

    def reported() -> bool:
        return any(reason in str(problem) for problem in pool.problems())

    wait_for(reported, what="problem")
    bench.wait_nodes("a", 0)


def test_idle_host_on_which_the_command_fails_is_registered_when_it_succeeds_again(
    bench: DriverBench, sshd: SSHServer, broken: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench.start(config(sshd, command(sshd, broken)), cleanup_interval=1)
    (before,) = bench.wait_nodes("a")
    broken.touch()
    bench.wait_gone(before.id)
    assert f"Deleting node {before.id}: its probe failed twice: {REASON}" in caplog.messages
    wait_unusable(bench, REASON)
    request = bench.submit("a")
    broken.unlink()
    (node,) = bench.accept(request)
    assert node.id != before.id
    bench.give_back(node)


def test_host_that_comes_back_from_its_user_is_tried_before_it_is_ready(
    bench: DriverBench, sshd: SSHServer, broken: pathlib.Path
) -> None:
    bench.start(config(sshd, {**command(sshd, broken), "interval": 3600}), cleanup_interval=1)
    bench.wait_nodes("a")
    (used,) = bench.get("a")
    broken.touch()
    bench.give_back(used)
    bench.wait_gone(used.id)
    wait_unusable(bench, REASON)
    broken.unlink()
    bench.wait_nodes("a")
    wait_for(
        lambda: not any(REASON in str(p) for p in bench.pools[0].problems()), what="no problem"
    )


def test_idle_host_that_does_not_answer_is_registered_when_it_answers_again(
    bench: DriverBench, sshd: SSHServer
) -> None:
    bench.start(config(sshd, {}), cleanup_interval=1)
    (before,) = bench.wait_nodes("a")
    sshd.pause()
    bench.wait_gone(before.id)
    wait_unusable(bench, "connection timeout")
    sshd.restart()
    (after,) = bench.wait_nodes("a")
    assert after.id != before.id


def test_end_of_the_launcher_during_a_trial_removes_no_node(
    bench: DriverBench, sshd: SSHServer, tmp_path: pathlib.Path
) -> None:
    """The second slot is tried while the first one is idle."""
    begun, second = tmp_path / "begun", tmp_path / "second"
    text = f"[ ! -e '{second}' ] || {{ touch '{begun}'; sleep 600; }}"
    probe = {"method": "command", "command": text, "ssh-key": str(sshd.client_key)}
    probe |= {"interval": 3600, "timeout": 600}
    pool = bench.start(config(sshd, probe))
    (before,) = bench.wait_nodes("a")
    second.touch()
    bench.reconfigure(config(sshd, probe, **{"max-parallel-jobs": 2}))
    wait_for(begun.exists, what="the command")
    bench.pools.remove(pool)
    pool.stop()
    assert [node.id for node in bench.wait_nodes("a")] == [before.id]


@pytest.mark.parametrize("method", ["ssh", "port", "command"])
def test_launcher_never_connects_to_a_host_without_host_key_checking(
    bench: DriverBench, sshd: SSHServer, broken: pathlib.Path, method: str
) -> None:
    probe = command(sshd, broken) if method == "command" else {"method": method}
    broken.touch()
    options = {"host-key-checking": False, "host-key": sshd.host_keys}
    pool = bench.start(config(sshd, probe, **options))
    (node,) = bench.wait_nodes("a")
    wait_for(lambda: pool.config is not None)
    assert pool.probes._probing(node) is None
    bench.reconfigure(config(sshd, probe if method != "command" else {}, **{"host-key": []}))
    wait_for(lambda: pool.probes._probing(bench.wait_nodes("a")[0]), what="probes of checked hosts")

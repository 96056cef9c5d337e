"""``nodepool lease``, with a host that a real sshd serves."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands import lease as command
from nodepool.cmd.commands.context import CommandError, user
from nodepool.lease import Leases, LeaseState, Terms
from nodepool.ssh import OPTIONS
from nodepool.zk.mirror.feed import KILLED
from nodepool.zk.records import HOLD, READY
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench
from tests.support.sshd import SSHServer, ssh_server

Run = Callable[..., str]


@pytest.fixture(scope="module")
def sshd() -> Iterator[SSHServer]:
    with ssh_server(kinds=["ed25519"]) as server:
        yield server


@pytest.fixture
def config(bench: LauncherBench, sshd: SSHServer) -> str:
    node = {
        "name": "127.0.0.1",
        "labels": ["small", "zuul-only"],
        "username": "root",
        "connection-port": sshd.port,
        "max-parallel-jobs": 2,
    }
    pools = [{"name": "main", "nodes": [node]}]
    labels = [{"name": "small"}, {"name": "zuul-only", "lease": False}]
    bench.start(
        {"labels": labels, "providers": [{"name": "rack", "driver": "static", "pools": pools}]}
    )
    bench.wait_nodes(2, state=READY)
    return str(bench.tmp / "nodepool.yaml")


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    # Its path must be short, as that of a socket is.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lease-"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv(command.VARIABLE, raising=False)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def run(config: str, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str, status: int = 0) -> str:
        assert nodepoolcmd.main(["-c", config, "lease", *args]) == status
        return capsys.readouterr().out

    return run


@pytest.fixture
def start(config: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command in a separate process."""
    found: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "nodepool.cmd.nodepoolcmd", "-c", config, "lease", *args]
        found.append(
            subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return found[-1]

    yield start
    for process in found:
        process.kill()
        process.communicate()


def only(bench: LauncherBench) -> Any:
    [lease] = Leases(bench.zk).all()
    return lease


def taken(run: Run, *args: str) -> dict[str, Any]:
    return dict(json.loads(run("small", "--for", "4h", "--json", *args)))


def test_detached_lease_remains_until_it_is_returned(bench: LauncherBench, run: Run) -> None:
    lease = taken(run, "--purpose", "bisect")
    assert (lease["state"], lease["purpose"], lease["owner"]) == ("held", "bisect", user())
    assert lease["ends"] == pytest.approx(time.time() + 4 * 3600, abs=60)
    assert bench.zuul.node(lease["nodes"][0]["id"])["state"] == HOLD
    listed = run("list")
    assert lease["id"] in listed and "bisect" in listed and "3 h 59 min" in listed
    assert "Purpose: bisect" in run("show")
    assert "ends in 7 h 59 min" in run("renew", lease["id"], "--for", "8h")
    run("return")
    wait_for(lambda: Leases(bench.zk).all() == [], 20, "no lease")


def test_options_may_come_first(bench: LauncherBench, run: Run) -> None:
    assert "Lease 200-" in run("--for", "90m", "small")
    assert only(bench).state is LeaseState.HELD


def test_lease_of_the_environment_or_the_only_one_is_meant(
    bench: LauncherBench, run: Run, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    first = taken(run)
    assert first["id"] in run("show")
    second = taken(run)
    with pytest.raises(Exception, match="you have 2 leases; name one"):
        nodepoolcmd.main(["-c", config, "lease", "show"])
    monkeypatch.setenv(command.VARIABLE, second["id"])
    assert second["id"] in run("show")


def test_login_works_right_away_with_checked_host_keys(
    bench: LauncherBench, run: Run, sshd: SSHServer, own_home: pathlib.Path, config: str
) -> None:
    lease = taken(run)
    folder = own_home / "nodepool" / "leases" / lease["id"]
    assert folder.stat().st_mode & 0o777 == 0o700
    path = folder / "ssh_config"
    path.write_text(f"Host *\n    IdentityFile {sshd.client_key}\n" + path.read_text())
    done = subprocess.run(
        ["ssh", "-F", str(path), "n1", "echo", "well"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "well\n", done.stderr
    assert sshd.host_keys[0] in (folder / "known_hosts").read_text()
    (folder / "known_hosts").write_text("")
    refused = subprocess.run(
        ["ssh", "-F", str(path), "n1", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 255 and "Host key verification failed" in refused.stderr


def test_files_of_a_lease_are_removed_with_it(
    bench: LauncherBench, run: Run, own_home: pathlib.Path
) -> None:
    folder = own_home / "nodepool" / "leases"
    returned, ended = taken(run), taken(run)
    assert {path.name for path in folder.iterdir()} == {returned["id"], ended["id"]}
    run("return", returned["id"])
    assert [path.name for path in folder.iterdir()] == [ended["id"]]
    # One that ended automatically, and whose end was more than a day ago; the other one is still
    # held.
    bench.wait_nodes(1, state=READY)
    old = folder / "200-0000009999"
    held = folder / ended["id"]
    old.mkdir()
    for path in (old, held):
        os.utime(path, (time.time() - 90000, time.time() - 90000))
    third = taken(run)
    assert {path.name for path in folder.iterdir()} == {ended["id"], third["id"]}


def test_command_on_a_node_ends_with_its_own_status_and_without_its_background(
    run: Run, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setitem(OPTIONS, "IdentityFile", str(sshd.client_key))
    lease = taken(run)
    began = time.monotonic()
    run("exec", lease["id"], "--", f"sleep 300 & echo $! > {tmp_path}/pid; exit 255", status=255)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert time.monotonic() - began < limit(30)


def test_inventory_has_groups_by_label(run: Run, sshd: SSHServer) -> None:
    taken(run)
    found = json.loads(run("inventory"))
    assert found["small"]["hosts"]["n1"]["ansible_port"] == sshd.port
    assert "-o StrictHostKeyChecking=yes" in found["small"]["vars"]["ansible_ssh_common_args"]


def test_command_runs_with_the_nodes_and_returns_them(bench: LauncherBench, run: Run) -> None:
    program = (
        "import json, os; exit(len(json.loads(os.environ['NODEPOOL_NODES_JSON'])) + 4 * "
        "('NODEPOOL_LEASE' in os.environ))"
    )
    run("small", "small", "--", sys.executable, "-c", program, status=6)
    assert Leases(bench.zk).all() == []


@pytest.mark.spec("issue 49, 2: a kill for memory is named after `lease -- COMMAND`")
@pytest.mark.parametrize(
    ("accepted", "status"), [(False, 137), (False, 2), (True, 137), (False, 0)]
)
def test_command_that_failed_names_kills_on_its_nodes_meanwhile(
    bench: LauncherBench, config: str, capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path,
    accepted: bool, status: int,
) -> None:  # fmt: skip
    launcher, begun = bench.pools[0], tmp_path / "begun"
    places = [(node.id, node.provider) for node in bench.zk.nodeIterator()]

    def note_kills(pid: int) -> None:
        values = {"pid": pid, "program": "cc1plus", "memory_limit": 1 << 31}
        for node, provider in places:
            launcher.feed.note(KILLED, node=node, provider=provider, **values)

    note_kills(6)
    wait_for(lambda: launcher.feed.stored == launcher.feed.number, 30, "the earlier kill")

    def kill() -> None:
        wait_for(begun.exists, 30, "the command")
        note_kills(7)

    thread = threading.Thread(target=kill, name="kill")
    thread.start()
    command = ["--", "sh", "-c", f"touch {begun}; sleep 3; exit {status}"]
    if accepted:
        request = bench.zuul.submit("small")
        bench.wait_request(request, "fulfilled")
        begin = ["request", "accept", request]
    else:
        begin = ["lease", "small"]
    assert nodepoolcmd.main(["-c", config, *begin, *command]) == status
    thread.join()
    line = "nodepool: process 7 (cc1plus) was killed: the node's memory limit of 2 GiB was reached"
    found = [each for each in capfd.readouterr().err.splitlines() if "killed" in each]
    assert found == ([line] if status else [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_attached_lease_is_returned_on_signals(
    bench: LauncherBench, start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run below nohup
    process = start("small")
    signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None and "until this command ends" in process.stdout.readline()
    assert only(bench).ends <= time.time() + command.ATTACHED
    process.send_signal(number)
    assert process.wait(30) == 0
    assert Leases(bench.zk).all() == []


def test_lost_terminal_does_not_end_a_lease_below_nohup(
    bench: LauncherBench, start: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = start("small", "--", "sh", "-c", f"touch {tmp_path}/begun; read line; exit 5")
    signal.signal(signal.SIGHUP, before)
    wait_for((tmp_path / "begun").exists, 30, "the command")
    process.send_signal(signal.SIGHUP)
    process.communicate("\n", timeout=30)
    assert process.returncode == 5
    assert Leases(bench.zk).all() == []


def test_command_on_a_node_ends_with_a_signal(
    run: Run, sshd: SSHServer, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setitem(OPTIONS, "IdentityFile", str(sshd.client_key))
    lease, path = taken(run), tmp_path / "pid"

    def terminate() -> None:
        wait_for(lambda: path.exists() and path.read_text().endswith("\n"), 30, "the command")
        os.kill(os.getpid(), signal.SIGTERM)

    # Without the handler of the command, the signal must not end the tests.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        with pytest.raises(SystemExit) as ended:
            run("exec", lease["id"], "--", f"echo $$ > {path}; exec sleep 10")
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    remote = pathlib.Path(f"/proc/{path.read_text().strip()}")
    wait_for(lambda: not remote.exists(), 5, "the end of the command")


def test_command_gets_the_signal_and_its_lease_is_returned(
    bench: LauncherBench, start: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path
) -> None:
    process = start(
        "small",
        "--",
        "sh",
        "-c",
        f"trap 'exit 7' TERM; touch {tmp_path}/begun; while :; do sleep 0.1; done",
    )
    wait_for((tmp_path / "begun").exists, 30, "the command")
    process.terminate()
    assert process.wait(30) == 7
    assert Leases(bench.zk).all() == []


def test_lease_of_a_killed_holder_ends_automatically(
    bench: LauncherBench, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("small")
    wait_for(
        lambda: [lease.state for lease in Leases(bench.zk).all()] == [LeaseState.HELD],
        30,
        "the lease",
    )
    process.send_signal(signal.SIGKILL)
    node = only(bench).nodes[0]
    bench.zuul.write_node(
        node.id, state_time=time.time() - command.ATTACHED
    )  # its end, which is not waited for
    bench.wait_gone(node.id, timeout=30)


def test_nodes_that_are_not_ready_in_time_are_not_requested_any_more(
    bench: LauncherBench, run: Run
) -> None:
    taken(run)
    taken(run)
    run("small", "--wait", "0.5", status=3)
    assert len(Leases(bench.zk).all()) == 2


@pytest.mark.core
def test_waiting_shows_the_position_in_the_queue(
    bench: LauncherBench,
    run: Run,
    start: Callable[..., subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken(run)
    taken(run)
    first = start("small")
    wait_for(
        lambda: LeaseState.WAITING in [lease.state for lease in Leases(bench.zk).all()],
        30,
        "the first that waits",
    )
    assert (
        nodepoolcmd.main(["-c", str(bench.tmp / "nodepool.yaml"), "lease", "small", "--wait", "3"])
        == command.NOT_IN_TIME
    )
    assert "waits: position 2 in the queue, " in capsys.readouterr().err
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM
    assert first.stderr is not None and "waits: position 1 in the queue, " in first.stderr.read()


def test_label_that_may_not_be_leased_is_refused(bench: LauncherBench, config: str) -> None:
    message = r"label zuul-only may not be leased \(lease: false in its configuration\)"
    with pytest.raises(CommandError, match=message):
        nodepoolcmd.main(["-c", config, "lease", "small", "zuul-only"])
    request_id, (node,) = bench.fulfilled("zuul-only")
    with pytest.raises(CommandError, match=message):
        nodepoolcmd.main(["-c", config, "request", "accept", request_id, "--detach"])
    assert bench.zuul.node(node.id)["state"] == READY
    assert nodepoolcmd.main(["-c", config, "hold", node.id, "--for", "1h"]) == 0
    assert only(bench).nodes[0].id == node.id


def test_label_that_nobody_has_fails(
    bench: LauncherBench, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        nodepoolcmd.main(["-c", str(bench.tmp / "nodepool.yaml"), "lease", "large", "--for", "1h"])
        == command.FAILED_STATUS
    )
    assert "no launcher offers large" in capsys.readouterr().err
    assert Leases(bench.zk).all() == []


def test_ended_lease_is_reported_with_a_separate_status(
    run: Run, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        nodepoolcmd.main(["-c", config, "lease", "renew", "200-0000000099", "--for", "1h"])
    assert ended.value.code == command.ENDED
    assert "does not exist, or has ended" in capsys.readouterr().err


def test_hold_of_another_user_is_listed_with_its_owner(bench: LauncherBench, run: Run) -> None:
    leases = Leases(bench.zk)
    lease = leases.ask(["small"], Terms("bob", "unix:1001", "debugging"))
    bench.wait_request(lease.id, "fulfilled")
    leases.hand_over(lease.id, 600)
    assert "bob" in run("list", "--owner", "bob") and "bob" not in run("list", "--owner", "alice")

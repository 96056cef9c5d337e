"""``nodepool.client`` against a launcher, and a host that a real sshd serves."""

from __future__ import annotations

import ast
import http.client
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from nodepool.client import Lease, LeaseEnded, NoCapacity, NodepoolError, NotAllowed, Pool
from nodepool.client import lease as lease_module
from nodepool.nodemanager.client.rpc import Client, RpcError
from nodepool.zk.records import HOLD
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.integration.lease.conftest import Api


def test_commands_run_and_files_are_copied_on_the_node(pool: Pool, tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").write_bytes(b"\0\xffdata")
    with pool.lease("small", purpose="test") as lease:
        done = lease.run(["sh", "-c", "cat; echo $0 >&2; exit 3", "a b"], input=b"typed")
        assert (done.status, done.stdout, done.stderr) == (3, b"typed", b"a b\n")
        with pytest.raises(subprocess.CalledProcessError):
            lease.run("exit 4", check=True)
        target = str(tmp_path / "there")
        lease.put(tmp_path / "in", target)
        lease.get(target, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == b"\0\xffdata"
        with pytest.raises(OSError, match="No such file"):
            lease.get("/nowhere/at/all", tmp_path / "none")
        with pytest.raises(subprocess.TimeoutExpired):
            lease.run("sleep 60", timeout=0.5)
        assert lease.inventory()["small"] == {"hosts": ["n1"]}
    wait_for(lambda: pool.leases() == [], what="the lease returned")


def test_lease_is_returned_after_an_error_in_the_block(pool: Pool) -> None:
    with pytest.raises(RuntimeError), pool.lease("small"):
        raise RuntimeError
    wait_for(lambda: pool.leases() == [], what="the lease returned")


def test_attached_lease_is_renewed_while_the_program_lives(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RENEW_EVERY", 0.1)
    lease = api.pool().lease("fake-label")
    wait_for(lambda: lease.refresh().renewed >= 3, what="three renewals")
    lease.give_back()
    wait_for(
        lambda: f"lease-{lease.id}" not in {thread.name for thread in threading.enumerate()},
        what="the thread ended",
    )


def test_detached_lease_has_the_given_end_and_is_found_by_others(api: Api) -> None:
    pool = api.pool()
    lease = pool.lease("fake-label", for_="4h", key="job-1", notes={"runner": 1})
    assert (
        lease.ends is not None and 4 * 3600 - 60 < lease.ends.timestamp() - time.time() <= 4 * 3600
    )
    assert pool.lease("fake-label", for_="4h", key="job-1").id == lease.id
    with pytest.raises(NotAllowed):
        Pool(api.url, f"npl_{lease.id}_wrong").get(lease.id)
    token = pool.lease("fake-label", for_="4h", key="job-1").token
    again = Pool(api.url).get(lease.id, token)
    again.note(job=2)
    assert again.notes == {"runner": 1, "job": 2}
    again.renew("6h").give_back()
    again.give_back()
    with pytest.raises(LeaseEnded):
        pool.get(lease.id)


def test_wait_ends_with_the_reason_and_withdraws_the_request(api: Api) -> None:
    pool = api.pool()
    held = [pool.lease("fake-label", for_="1h") for _ in range(4)]
    with pytest.raises(NoCapacity, match=r"was not ready in time: \w+"):
        pool.lease("fake-label", wait="2s")
    assert len(pool.leases()) == len(held) and api.bench.zk.getNodeRequests() == []


def test_waiting_lease_reports_its_changes(api: Api) -> None:
    pool = api.pool()
    held = [pool.lease("fake-label", for_="1h") for _ in range(4)]
    lease = pool.lease("fake-label", wait=None)
    states = []
    for change in lease.changes(time.monotonic() + 60):
        states.append(change.state)
        held[0].give_back()
    assert (states[0], states[-1]) == ("waiting", "held")
    lease.give_back()


def test_lease_that_is_returned_while_it_waits_is_not_requested_again(api: Api) -> None:
    pool = api.pool()
    held = [pool.lease("fake-label", for_="1h") for _ in range(4)]
    seen: list[Lease] = []

    def cancel() -> None:
        wait_for(lambda: seen, what="the lease")
        seen[0].give_back()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(LeaseEnded, match="has been returned"):
        pool.lease("fake-label", wait="10s", on_change=seen.append)
    thread.join()
    assert {lease.id for lease in pool.leases()} == {lease.id for lease in held}


def test_deleted_node_ends_an_attached_lease(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RENEW_EVERY", 0.2)
    lease = api.pool().lease("fake-label")
    [node] = api.bench.nodes(state=HOLD)
    api.bench.zuul.write_node(node.id, state="deleting")

    def ended() -> bool:
        try:
            lease.refresh()
        except LeaseEnded:
            return True
        return False

    wait_for(ended, what="LeaseEnded")
    with pytest.raises(LeaseEnded):
        lease.run("true")


def test_end_of_the_program_returns_its_leases(api: Api, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from nodepool.client import Pool\nlease = Pool().lease('fake-label')\nprint(lease.id, "
        "flush=True)\ninput()\n"
    )
    environment = {
        **os.environ,
        "NODEPOOL_URL": api.url,
        "NODEPOOL_TOKEN": api.token(),
        "PYTHONPATH": str(REPOSITORY),
    }

    def started() -> Any:
        process = subprocess.Popen(
            [sys.executable, str(program)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None and process.stdout.readline().startswith(b"200-")
        return process

    for end in (
        lambda process: process.stdin.write(b"\n"),
        lambda process: process.send_signal(signal.SIGINT),
    ):
        with started() as process:
            assert len(api.bench.nodes(state=HOLD)) == 1
            end(process)
        wait_for(lambda: api.bench.nodes(state=HOLD) == [], what="the node returned")


@pytest.mark.parametrize("end", ["pass", "sys.exit()", "raise RuntimeError"])
def test_forked_process_does_not_return_the_leases_of_its_parent(
    api: Api, end: str, tmp_path: pathlib.Path
) -> None:
    program = (
        "import os, sys\n"
        "from nodepool.client import Pool\n"
        "other = Pool().lease('fake-label')\n"
        "with Pool().lease('fake-label') as lease:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        lease._ssh()\n"
        f"        {end}\n"
        "    else:\n"
        "        os.waitpid(child, 0)\n"
        "        print(lease.refresh().state, other.refresh().state)\n"
    )
    environment = {
        **os.environ,
        "NODEPOOL_URL": api.url,
        "NODEPOOL_TOKEN": api.token(),
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert done.stdout == "held held\n"
    assert api.pool().leases() == []
    assert list(tmp_path.glob("nplease-*")) == [], "files for SSH, with a key"


def test_commands_of_a_returned_lease_fail_because_it_was_returned(pool: Pool) -> None:
    with pool.lease("small") as lease:
        failures: list[NodepoolError] = []

        def use() -> None:
            try:
                lease.run("echo begun >&2; sleep 60")
            except NodepoolError as error:
                failures.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        wait_for(lambda: lease._running, what="the login")
        lease.give_back()
        thread.join(30)
    assert [(type(error), str(error)) for error in failures] == [
        (LeaseEnded, f"Lease {lease.id} has been returned")
    ]


def test_server_that_cannot_be_reached_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NodepoolError, match="unix:///nowhere cannot be reached"):
        Pool("unix:///nowhere").leases()
    with pytest.raises(ValueError, match="not a URL"):
        Pool("pool.example.org")


def test_error_without_a_text_is_named_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_options: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(http.client.HTTPConnection, "request", fail)
    with pytest.raises(NodepoolError, match="cannot be reached: TimeoutError"):
        Pool("http://127.0.0.1:9").leases()
    with pytest.raises(RpcError, match="TimeoutError"):
        Client("http://127.0.0.1:9").call("GetSlivers")


def test_client_needs_nothing_but_the_standard_library() -> None:
    for name, own in (
        ("client/__init__", {"nodepool"}),
        ("client/calls", {"nodepool"}),
        ("client/lease", {"nodepool"}),
        ("client/pool", {"nodepool"}),
        ("ssh", set()),
    ):
        tree = ast.parse((REPOSITORY / "nodepool" / f"{name}.py").read_text())
        modules = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in modules} <= set(sys.stdlib_module_names) | own
    program = (
        "import sys, nodepool.client; print(*(name for name in sys.modules if "
        "name.startswith('nodepool')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert set(done.stdout.split()) == {
        "nodepool",
        "nodepool.client",
        "nodepool.client.calls",
        "nodepool.client.lease",
        "nodepool.client.pool",
        "nodepool.ssh",
        "nodepool.texts",
    }

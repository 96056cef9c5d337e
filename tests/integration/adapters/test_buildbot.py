"""Builds of a real master of Buildbot on leased nodes, by its real worker."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.client import Pool
from nodepool.web.actions.waiting import Waiting
from tests.conftest import wait_for
from tests.support.buildbot_master import CANCELLED, EXCEPTION, RETRY, SUCCESS, Master
from tests.support.ci_programs import program
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench

Start = Callable[..., Master]
#: Runs until the test lets it continue.
HELD = "echo began; until [ -e {go} ]; do sleep 0.1; done; echo went on"


def command_lines() -> str:
    found = ""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_text(errors="replace")
    return found


def programs(home: pathlib.Path) -> list[str]:
    """Return the ids of the processes that run below the home directory."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink().is_relative_to(home):
                found.append(path.parent.name)
    return found


def send(processes: list[str], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), number)


@pytest.fixture
def start(pool: Pool, home: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts masters whose workers use the pool; at the end nothing must be left of them."""
    made: list[Master] = []
    token = tmp_path / "token"
    token.write_text(f"{pool.token}\n")
    token.chmod(0o600)

    def start(
        scripts: dict[str, str] | None = None, run: bool = True, **workers: dict[str, Any]
    ) -> Master:
        common = {
            "label": "small-noble",
            "url": pool.url,
            "token_file": str(token),
            "key_file": str(pool.key_file),
        }
        folder = tmp_path / f"master{len(made)}"
        made.append(
            Master(
                folder,
                {name: {**common, **options} for name, options in workers.items()},
                scripts or {},
            )
        )
        if run:
            made[-1].start()
        return made[-1]

    yield start
    for master in made:
        master.end()
        print(master.log())
    wait_for(lambda: pool.leases() == [], 30, "every lease returned")
    wait_for(lambda: programs(home) == [], 20, "no worker's program")


def test_build_runs_on_a_leased_node_and_returns_it(
    start: Start, pool: Pool, home: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    go = tmp_path / "go"
    master = start({"one": HELD.format(go=go)}, one={})
    master.force("one")
    wait_for(lambda: "began" in master.text("one"), 60, "a script that runs")
    [lease] = pool.leases()
    assert (lease.state, lease.purpose) == ("held", "worker one, build 1 of one")
    assert master.step("one") == "worker one ready"
    tac = home / ".buildbot-worker" / "one" / "buildbot.tac"
    password = tac.read_text().partition("'one', '")[2].partition("'")[0]
    assert len(password) == 43 and tac.stat().st_mode & 0o777 == 0o600
    assert (
        password not in command_lines()
        and password not in master.log()
        and (pool.token or "") not in master.log()
    )
    go.touch()
    assert master.finished("one") == [SUCCESS]
    wait_for(lambda: pool.leases() == [], 20, "the lease returned")
    assert not tac.exists() and programs(home) == []


def test_full_pool_shows_place_and_reason_and_a_canceled_build_withdraws(
    start: Start, pool: Pool, bench: LauncherBench
) -> None:
    with pool.lease("small-noble", "small-noble", for_="1h"):
        master = start(one={"priority": "300", "tenant": "acme"})
        master.force("one")
        wait_for(
            lambda: (
                "waiting for a node small-noble: position 1 in the queue, " in master.step("one")
            ),
            60,
            "a reason",
        )
        assert [(lease.id[:4], lease.tenant) for lease in pool.leases(state="waiting")] == [
            ("300-", "acme")
        ]
        [build] = master.builds("one")
        master.post(f"builds/{build['buildid']}", "stop")
        assert master.finished("one", timeout=20) == [CANCELLED]
        wait_for(lambda: bench.zk.getNodeRequests() == [], 20, "no request")


def test_launcher_with_too_many_clients_is_asked_once_a_second(
    start: Start, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def no_places(_waiting: object) -> None:
        calls.append(time.monotonic())

    with pool.lease("small-noble", "small-noble", for_="1h") as other:
        monkeypatch.setattr(Waiting, "places", property(no_places))
        master = start(one={})
        master.force("one")
        wait_for(lambda: len(calls) > 5, 60, "some polls")
        assert calls[5] - calls[0] > 4.5
        other.give_back()
        assert master.finished("one") == [SUCCESS]


def test_pool_that_stays_full_lets_the_build_wait_for_the_next_attempt(
    start: Start, pool: Pool
) -> None:
    with pool.lease("small-noble", "small-noble", for_="1h") as other:
        master = start(one={"wait": "1s"})
        master.force("one")
        assert master.finished("one")[0] == RETRY
        assert "gave up after 1s: waiting for a node small-noble: " in master.text(
            "one", name="worker_preparation"
        )
        other.give_back()
        # On a busy machine the node is not ready within a second, and the build is repeated once
        # more.
        wait_for(lambda: SUCCESS in master.finished("one", 2), 60, "a build that succeeds")


def test_build_is_repeated_on_another_node_when_its_lease_ends(
    start: Start, pool: Pool, home: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    go = tmp_path / "go"
    master = start({"one": HELD.format(go=go)}, one={})
    master.force("one")
    wait_for(lambda: "began" in master.text("one"), 60, "a script that runs")
    [lease] = pool.leases()
    # Its node is not deleted: the program of the ended lease can still log in, or try to.
    old = shutil.copytree(next(home.rglob("buildbot.tac")).parent, tmp_path / "old")
    lease.give_back()
    assert master.finished("one")[0] == RETRY
    assert f"worker one: disconnected, its builds are repeated: Lease {lease.id} " in master.log()
    go.touch()
    wait_for(lambda: SUCCESS in master.finished("one", 2), 60, "a build that succeeds")
    with subprocess.Popen([program("buildbot-worker"), "start", "--nodaemon", old]) as again:
        try:
            wait_for(lambda: "invalid login from user 'one'" in master.log(), 60, "a refusal")
        finally:
            again.kill()
    # Otherwise the worker was ended twice, and may never be ended again (Buildbot 4.3).
    assert "SubstantiatiationCancelled" not in master.log()


def test_killed_master_returns_its_old_lease_when_it_starts_again(
    start: Start, pool: Pool, tmp_path: pathlib.Path
) -> None:
    go = tmp_path / "go"
    master = start({"one": HELD.format(go=go)}, one={})
    master.force("one")
    wait_for(lambda: "began" in master.text("one"), 60, "a script that runs")
    [old] = pool.leases()
    master.end(signal.SIGKILL)
    go.touch()
    master.start()
    wait_for(
        lambda: old.id not in [lease.id for lease in pool.leases()], 20, "the old lease returned"
    )
    assert f"worker one: returning lease {old.id} of an earlier start of the master" in master.log()
    wait_for(lambda: SUCCESS in master.finished("one", 2), 60, "a build that succeeds")


def test_stopped_master_leaves_no_lease_even_while_it_waits(
    start: Start, pool: Pool, bench: LauncherBench
) -> None:
    master = start({"two": "sleep 3600"}, two={}, three={})
    master.force("two")
    wait_for(lambda: master.builds("two") and pool.leases(), 60, "a lease")
    with pool.lease("small-noble", for_="1h"):
        master.force("three")
        wait_for(lambda: "waiting for a node" in master.step("three"), 60, "a build that waits")
        began = time.monotonic()
        master.end()
        assert time.monotonic() - began < limit(15)
        assert [lease.purpose for lease in pool.leases()] == [""]
        assert bench.zk.getNodeRequests() == []


@pytest.mark.parametrize("delay", [0, 0.1, 0.2, 0.3, 0.5, 1.0])
def test_master_that_is_stopped_while_a_build_starts_ends_soon(
    start: Start, pool: Pool, delay: float
) -> None:
    master = start({"one": "sleep 3600"}, one={})
    master.force("one")
    time.sleep(delay)  # any moment of the start has to be fine
    began = time.monotonic()
    master.end()
    assert time.monotonic() - began < limit(15)
    assert pool.leases() == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"token_file": "bad"}, "The token is unknown, has expired, or was revoked"),
        ({"label": "large"}, "no launcher offers large"),
    ],
)
def test_build_that_can_never_get_a_node_fails_with_the_reason(
    start: Start, tmp_path: pathlib.Path, options: dict[str, str], text: str
) -> None:
    if "token_file" in options:
        options = {"token_file": str(tmp_path / "bad")}
        (tmp_path / "bad").write_text(f"np_0123456789_{'x' * 43}")
        (tmp_path / "bad").chmod(0o600)
    master = start(one=options)
    master.force("one")
    assert master.finished("one") == [EXCEPTION]
    assert text in master.text("one", name="worker_preparation")


def test_node_without_the_worker_program_is_returned_with_the_reason(
    start: Start, pool: Pool
) -> None:
    master = start(one={"program": "no-such-worker"})
    master.force("one")
    assert master.finished("one")[0] == RETRY
    assert "no-such-worker is not installed" in master.text("one", name="worker_preparation")
    wait_for(lambda: pool.leases() == [], 20, "the lease returned")


def test_server_that_does_not_answer_does_not_block_the_master(start: Start, pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        master = start(one={}, **{f"slow{number}": {"url": url} for number in range(12)})
        for number in range(12):
            master.force(f"slow{number}")
        wait_for(
            lambda: all(master.builds(f"slow{number}") for number in range(12)),
            60,
            "builds that wait",
        )
        assert master.get("workers", timeout=2)
        master.force("one")
        assert master.finished("one", timeout=40) == [SUCCESS]
        wait_for(lambda: pool.leases() == [], 20, "the lease returned")
        master.end(signal.SIGKILL)


def test_invalid_options_are_named_by_checkconfig(start: Start) -> None:
    options: dict[str, dict[str, Any]] = {
        "one": {"label": ""},
        "two": {"master": "host"},
        "three": {"wait": "soon"},
        "four": {"url": "pool.example.org"},
    }
    found = start(run=False, **options).check_config()
    for text in (
        "one: label is missing: the label of the node",
        "two: master must be HOST:PORT, as nodes reach the master, and not 'host'",
        "three: 'soon' is not a duration such as 90s",
        "four: 'pool.example.org' is not a URL such as",
    ):
        assert f"NodepoolLatentWorker {text}" in found

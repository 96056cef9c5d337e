"""Jobs of GitLab on leased nodes: a host that a real sshd serves, and a manager that behaves as
GitLab Runner does.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.client import Pool
from nodepool.zk.records import USED
from tests.conftest import wait_for
from tests.support.gitlab_runner import BUILD_FAILURE, SYSTEM_FAILURE, Manager, Result, response
from tests.support.launcher import LauncherBench

Start = Callable[..., Manager]


@pytest.fixture
def start(pool: Pool, tmp_path: pathlib.Path) -> Iterator[Start]:
    """Makes managers whose jobs use the pool with two nodes ``small``."""
    made: list[Manager] = []

    def start(*prepare: str, config: tuple[str, ...] = ()) -> Manager:
        environment = {
            **os.environ,
            "NODEPOOL_URL": pool.url,
            "NODEPOOL_TOKEN": pool.token or "",
            "NODEPOOL_SSH_KEY": str(pool.key_file),
        }
        folders = ("--builds-dir", str(tmp_path / "a b"), "--cache-dir", str(tmp_path / "cache"))
        made.append(
            Manager(tmp_path, environment, (*folders, *config), prepare or ("--label", "small"))
        )
        return made[-1]

    yield start
    for manager in made:
        shutil.rmtree(manager.tmp, ignore_errors=True)
    wait_for(lambda: pool.leases() == [], 30, "every lease returned")


def in_background(
    manager: Manager, scripts: dict[str, str], **job: Any
) -> tuple[threading.Thread, list[Result]]:
    found: list[Result] = []
    thread = threading.Thread(
        target=lambda: found.append(manager.run(scripts, response(**job))),
        name="manager",
        daemon=True,
    )
    thread.start()
    return thread, found


@pytest.mark.core
@pytest.mark.spec("GitLab 2-4: stages in order, JSON of config, output in the log of the job")
def test_job_runs_on_a_leased_node_and_returns_it(
    start: Start, pool: Pool, tmp_path: pathlib.Path
) -> None:
    manager = start()
    during = f"ls -d '{tmp_path}/a b' {tmp_path}/cache; stat -c %a -L /proc/$$/fd/3 | sort -u"
    result = manager.run(
        {
            "get_sources": "echo cloned",
            "build_script": f"{during}\necho out; echo err >&2",
            "archive_cache": "echo kept",
        }
    )
    assert (result.state, [name for name, _status in result.stages]) == (
        "success",
        ["config", "prepare", "get_sources", "build_script", "archive_cache", "cleanup"],
    )
    lines = result.log.splitlines()
    assert any(line.startswith("Running on node ") for line in lines)
    assert [line for line in lines if not line.startswith(("Running on", "Waiting for"))] == [
        "cloned",
        f"{tmp_path}/a b",
        f"{tmp_path}/cache",
        "600",
        "out",
        "err",
        "kept",
    ]
    assert manager.settings["driver"]["name"] == "nodepool" and manager.settings[
        "builds_dir"
    ] == str(tmp_path / "a b")
    assert "secret-of-job" not in result.log and manager.warnings == ""


@pytest.mark.spec("GitLab 7: owner, purpose, tenant from the description of the job, end")
def test_lease_names_the_job_and_counts_for_its_group(start: Start, pool: Pool) -> None:
    manager = start()
    thread, _found = in_background(
        manager, {"build_script": "echo began; while :; do sleep 0.1; done"}
    )
    wait_for(lambda: "began" in manager.text(), 30, "the script")
    [lease] = pool.leases()
    assert (lease.purpose, lease.tenant, lease.notes) == (
        "job 7 check of acme/tools/widget",
        "acme",
        {"key": "gitlab:gitlab.example.org:7"},
    )
    assert lease.ends is not None and lease.created is not None
    assert 1490 < (lease.ends - lease.created).total_seconds() < 1530
    manager.cancel()
    thread.join(60)


@pytest.mark.spec("GitLab 7: a name that cannot be a purpose fails no job")
@pytest.mark.parametrize(
    "name", ["two\nlines", "right-to-left \u200f", "half \ud83d", "\u2028" * 255]
)
def test_job_may_have_any_name(start: Start, name: str) -> None:
    job = response()
    job["job_info"]["name"] = name
    result = start().run({"build_script": "echo began"}, job)
    assert (result.state, "began" in result.log) == ("success", True), result.log


def test_script_that_was_killed_is_a_failure_with_the_status_of_shells(start: Start) -> None:
    result = start().run({"build_script": "kill -KILL $$"})
    assert (result.state, result.exit_code) == ("failed", 137), result.log


@pytest.mark.spec("GitLab 5: the status of a script is never passed through")
@pytest.mark.parametrize("status", [1, 2, SYSTEM_FAILURE, 255])
def test_failed_script_is_a_failure_of_the_job(start: Start, status: int) -> None:
    result = start().run(
        {
            "build_script": f"exit {status}",
            "archive_cache": "echo never",
            "after_script": "echo after",
        }
    )
    assert (result.state, result.exit_code) == ("failed", status)
    assert "after" in result.log and "never" not in result.log


@pytest.mark.spec("GitLab 4: a script that reads its standard input does not read itself")
def test_long_script_is_complete_and_has_no_input(start: Start) -> None:
    filler = "".join(f"# {number} {'x' * 90}\n" for number in range(2000))
    result = start().run({"build_script": f"cat\n{filler}\necho end"})
    assert result.state == "success" and "end" in result.log


@pytest.mark.spec("GitLab 5: SIGTERM kills what runs on the node")
def test_canceled_job_ends_its_processes_on_the_node(start: Start) -> None:
    manager = start()
    thread, found = in_background(
        manager, {"build_script": "readlink /proc/$$/fd/3; sleep 7654 & echo began $!; sleep 7654"}
    )
    wait_for(lambda: "began" in manager.text(), 30, "the script")
    process = pathlib.Path("/proc", manager.text().partition("began ")[2].split()[0])
    assert "sleep" in (process / "cmdline").read_text()
    assert "(deleted)" in manager.text()
    manager.cancel()
    thread.join(60)
    assert found and found[0].state == "canceled"
    wait_for(lambda: not process.exists(), 10, "no process")


@pytest.mark.spec(
    "GitLab 9.2: a canceled job withdraws its request; the log shows place and reason"
)
def test_waiting_shows_place_and_reason_and_can_be_canceled(
    start: Start, pool: Pool, bench: LauncherBench
) -> None:
    with pool.lease("small", "small", for_="1h"):
        manager = start()
        thread, found = in_background(manager, {"build_script": "true"})
        wait_for(lambda: "Waiting for a node small (lease 200-" in manager.text(), 30, "a line")
        assert "position 1 in the queue, " in manager.text()
        manager.cancel()
        thread.join(60)
        assert found and found[0].state == "canceled"
        wait_for(lambda: bench.zk.getNodeRequests() == [], 20, "no request")


@pytest.mark.spec("GitLab 7: pool full: system failure, which GitLab tries again")
def test_job_that_gets_no_node_in_time_fails_with_the_reason(start: Start, pool: Pool) -> None:
    with pool.lease("small", "small", for_="1h"):
        result = start("--label", "small", "--wait", "1s").run({"build_script": "true"})
        assert (result.state, result.stages.count(("prepare", SYSTEM_FAILURE))) == (
            "system failure",
            3,
        )
        assert "was not ready in time: " in result.log


@pytest.mark.spec("GitLab 7: not offered, not allowed: no second attempt")
@pytest.mark.parametrize(
    ("arguments", "job", "text"),
    [
        (("--label", "large"), {}, "no launcher offers large"),
        (
            ("--image", "small*", "--image", "tiny"),
            {"image": {"name": "nodepool/other"}},
            "it offers small*, tiny",
        ),
        (("--image", "small*"), {}, "the job needs image: with one of small*"),
        (("--label", "small"), {"services": [{"name": "postgres"}]}, "services: are not supported"),
        (("--label", "small"), {"job_info": None}, "does not describe a job"),
    ],
)
def test_impossible_job_fails_immediately_with_the_reason(
    start: Start, arguments: tuple[str, ...], job: dict[str, Any], text: str
) -> None:
    result = start(*arguments).run({"build_script": "true"}, response(**job))
    assert result.stages == [("config", 0), ("prepare", BUILD_FAILURE), ("cleanup", 0)]
    assert result.state == "failed" and text in result.log


@pytest.mark.spec("GitLab 2: rights come from the description of the job, not from its variables")
def test_label_comes_from_the_image_of_the_job(start: Start, pool: Pool) -> None:
    manager = start("--image", "small")
    assert (
        manager.run({"build_script": "true"}, response(image={"name": "nodepool/small"})).state
        == "success"
    )


@pytest.mark.spec("GitLab 1: cleanup works when prepare was killed at any moment")
def test_killed_prepare_leaves_no_lease(start: Start, pool: Pool) -> None:
    with pool.lease("small", "small", for_="1h"):
        manager = start()
        thread, _found = in_background(manager, {"build_script": "true"})
        wait_for(lambda: len(pool.leases()) == 2, 30, "its lease")
        manager.canceled.set()
        for kept in manager.tmp.glob("nodepool-lease.json"):
            kept.unlink()
        process = manager.current
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        thread.join(60)
        wait_for(lambda: len(pool.leases()) == 1, 20, "only ours")


@pytest.mark.spec("GitLab 7: lease ended, node deleted: the reason, and system failure")
def test_lease_that_ended_during_the_job_is_a_system_failure(
    start: Start, pool: Pool, bench: LauncherBench
) -> None:
    manager = start()
    thread, found = in_background(
        manager,
        {
            "get_sources": "echo began; until [ -e .nodepool-gitlab/go ]; do sleep 0.1; done",
            "build_script": "true",
        },
    )
    wait_for(lambda: "began" in manager.text(), 30, "the first script")
    [lease] = pool.leases()
    lease.give_back()
    wait_for(
        lambda: (
            bench.zuul.node(lease.nodes[0].id) is None
            or bench.zuul.node(lease.nodes[0].id)["state"] == USED
        ),
        20,
        "it ended",
    )
    home = pathlib.Path("~root").expanduser()
    (home / ".nodepool-gitlab" / "go").touch()
    try:
        thread.join(60)
    finally:
        (home / ".nodepool-gitlab" / "go").unlink()
    assert found and found[0].state == "system failure"
    assert "has ended" in found[0].log


def test_call_by_hand_is_explained(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    from nodepool.adapters import gitlab

    monkeypatch.delenv("JOB_RESPONSE_FILE", raising=False)
    monkeypatch.setenv("NODEPOOL_URL", pool.url)
    assert gitlab.main(["prepare", "--label", "small"]) == 1
    assert "GitLab Runner (17 or later) starts this program" in capfd.readouterr().out

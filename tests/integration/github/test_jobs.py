"""Jobs of a scale set become runners on leased nodes, and nothing is left over."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import time

import pytest

from nodepool.adapters.runners import fleet, runner
from nodepool.adapters.runners.runner import BUSY
from nodepool.client import Pool
from nodepool.status.explain import Explanation, Unknown, explain
from nodepool.zk.history import HistoryReader
from nodepool.zk.mirror.feed import KILLED
from tests.conftest import wait_for
from tests.integration.github.conftest import Site
from tests.support.deadline import limit
from tests.support.github import Emulator, Program
from tests.support.launcher import LauncherBench

pytestmark = [pytest.mark.github, pytest.mark.full]


def wait_connected(service: Emulator, name: str = "set") -> None:
    wait_for(
        lambda: any(
            one["scaleSetId"] == service.set_id(name) for one in service.state()["sessions"]
        ),
        30,
        "a session",
    )


def explained(bench: LauncherBench) -> Explanation:
    """Return what `nodepool explain fleet set` shows; empty if nothing is known of it yet."""
    try:
        return explain(bench.zk, "fleet", "set", HistoryReader())
    except Unknown:
        return Explanation("fleet", "set")


def end_worker(program: Program) -> None:
    """End the job on the node; the runner ends with status 1."""
    pattern = f"{program.folder}/bin/Runner.Worker"
    wait_for(
        lambda: subprocess.run(["pkill", "-f", pattern], check=False).returncode == 0,
        30,
        "the worker",
    )


@pytest.mark.spec(
    "GitHub 1: one job, one lease, one runner; the node goes back when the program has ended"
)
def test_job_runs_on_a_leased_node(
    site: Site, service: Emulator, pool: Pool, program: Program
) -> None:
    program.behave(seconds=3600)
    daemon = site.start()
    wait_connected(service)
    job = service.add_job("set")
    wait_for(lambda: service.jobs("running"), 30, "the job")
    [lease] = pool.leases()
    assert (lease.purpose, lease.state, (lease.notes or {})["fleet"]) == (
        "runner of set",
        "held",
        f"{service.config_url} set",
    )
    name = (lease.notes or {})["runner"]
    assert program.started() == [name]
    wait_for(
        lambda: "(run " in str((pool.get(lease.id).notes or {}).get("job")),
        30,
        "the job in the notes of the lease",
    )
    wait_for(lambda: [each.state for each in daemon.fleets[0].runners()] == ["busy"], 30, "busy")
    end_worker(program)
    wait_for(lambda: [each.lost for each in daemon.fleets[0].runners()] == [True], 30, "the end")
    wait_for(lambda: pool.leases() == [], 30, "the return of its node")
    service.call("POST", f"/jobs/{job}/complete", {"result": "failed"})
    wait_for(lambda: daemon.fleets[0].find(name) is None, 30, "the end of the job")
    site.wait_empty()


@pytest.mark.spec("GitHub 10: 50 jobs with max 10 (here 6 places)")
def test_more_jobs_than_places_are_all_done_and_no_runner_is_too_many(
    site: Site, service: Emulator, program: Program
) -> None:
    site.start({"name": "set", "max": 4})
    wait_connected(service)
    for _ in range(20):
        service.add_job("set")
    most = 0

    def done() -> bool:
        nonlocal most
        state = service.state()
        most = max(most, len(state["runners"]))
        return all(job["state"] == "completed" for job in state["jobs"])

    wait_for(done, 120, "all jobs done")
    site.wait_empty()
    assert most <= 4
    assert len(program.started()) <= 24


@pytest.mark.spec("GitHub 10: min 2 kept warm; a job takes one, another one starts")
def test_least_number_of_idle_runners_is_kept(
    site: Site, service: Emulator, program: Program
) -> None:
    daemon = site.start({"name": "set", "min": 2, "max": 3, "idle": "1s"})
    wait_for(lambda: len(service.state()["runners"]) == 2, 30, "two runners")
    first = set(program.started())
    service.add_job("set")
    wait_for(lambda: service.jobs("completed"), 30, "the job")
    wait_for(
        lambda: len(set(program.started()) - first) >= 1 and len(service.state()["runners"]) == 2,
        30,
        "two runners again",
    )
    assert daemon.fleets[0].failures == 0


@pytest.mark.spec(
    "GitHub 10: job canceled before start: the idle runner is removed, then its node is returned"
)
def test_runner_whose_job_was_canceled_is_removed(
    site: Site, service: Emulator, pool: Pool, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LINGER", 1.0)
    site.start()
    wait_connected(service)
    with pool.lease(*["small"] * 6, for_="1h"):
        job = service.add_job("set")
        wait_for(lambda: len(pool.leases()) == 2, 30, "a lease that waits")
        service.call("POST", f"/jobs/{job}/complete", {"result": "canceled"})
        wait_for(lambda: len(pool.leases()) == 1, 30, "it is withdrawn")
    assert program.started() == []
    site.wait_empty()


@pytest.mark.spec(
    "GitHub 8.6: a drained set keeps polling with capacity 0, and finishes its running jobs"
)
def test_drained_set_finishes_its_job_and_starts_no_other(
    site: Site, service: Emulator, pool: Pool, program: Program, bench: LauncherBench
) -> None:
    program.behave(seconds=8)
    site.start()
    wait_connected(service)
    service.add_job("set")
    wait_for(lambda: service.jobs("running"), 30, "the job")
    site.stop()
    site.start({"name": "set", "max": 0})
    wait_connected(service)
    other = service.add_job("set")
    wait_for(lambda: "runs " in explained(bench).text(), 30, "the note of the job")
    wait_for(lambda: service.jobs("completed"), 60, "the end of the job")
    wait_for(lambda: pool.leases() == [], 30, "the return of its node")
    assert len(program.started()) == 1
    service.call("POST", f"/jobs/{other}/complete", {"result": "canceled"})


def test_reload_drains_a_set_and_resumes_it(
    site: Site, service: Emulator, program: Program
) -> None:
    """As an operator does it: change the file, then SIGHUP."""
    config = site.config({"name": "set", "min": 1, "max": 3})
    process = site.run(config)
    wait_for(lambda: program.started(), 60, "an idle runner")

    def reload(**options: int) -> None:
        config["scale-sets"][0].update(options)
        site.write(config)
        process.send_signal(signal.SIGHUP)

    reload(min=0, max=0)
    wait_for(lambda: service.state()["runners"] == [], 90, "no idle runner")
    service.add_job("set")
    assert not wait_for(lambda: service.jobs("available"), 10, "the job")[0].get("runnerName")
    reload(min=2, max=1)
    wait_for(lambda: "not applied: set: min (2) is above max (1)" in site.log(), 10, "the error")
    for _ in range(5):
        reload(min=0, max=1)
    wait_for(lambda: service.jobs("completed"), 60, "the job")
    process.send_signal(signal.SIGUSR2)
    wait_for(lambda: "Threads: " in site.log(), 10, "the threads")
    assert "drains (0x" in site.log(), "it follows the pool's drains"
    assert site.log().rpartition("Threads: ")[2].partition("\n")[0].count("reload (") == 1


@pytest.mark.spec(
    "GitHub 8.2: idle limit for runners that no job needs, then a pause with its reason"
)
def test_wrong_statistics_start_no_endless_row_of_runners(
    site: Site, service: Emulator, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "UNUSED_PAUSE", (60.0, 600.0))
    daemon = site.start({"name": "set", "max": 2, "idle": "1s"})
    wait_connected(service)
    kept = daemon.fleets[0]
    # As after an incident: GitHub counts jobs that nobody has.
    monkeypatch.setattr(daemon.sets[0], "count", lambda statistics: None)
    kept.want(2)
    wait_for(lambda: kept.idled.left > 0 and kept.runners() == [], 60, "a pause")
    assert "got no job" in str(kept.status()["trouble"])
    assert 3 <= len(program.started()) <= 4
    site.wait_empty()


@pytest.mark.spec(
    "GitHub 7: status of the runner program; failures are counted and retried after a pause"
)
@pytest.mark.parametrize(
    ("early", "text"),
    [(1, "ended with status 1"), (7, "rebuild the image of small"), (127, "no runner in")],
)
def test_runner_that_fails_is_reported(
    site: Site, service: Emulator, program: Program, early: int, text: str
) -> None:
    program.behave(early=early)
    daemon = site.start()
    wait_connected(service)
    service.add_job("set")
    wait_for(lambda: text in daemon.fleets[0].broken.text, 30, "the reason")
    if early == 7:
        assert daemon.sets[0].capacity() == 0
        daemon.fleets[0].broken.clear()
    program.behave()
    site.wait_empty()
    assert daemon.fleets[0].failures >= 1


@pytest.mark.spec(
    "issue 49, 2: in log, status and the log of the job; as the reason of a dead runner"
)
def test_kill_for_memory_is_named_while_the_job_runs_and_when_its_runner_dies(
    site: Site,
    service: Emulator,
    program: Program,
    bench: LauncherBench,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program.behave(seconds=3600)
    daemon = site.start()
    wait_connected(service)
    service.add_job("set")
    wait_for(
        lambda: [each.state for each in daemon.fleets[0].runners()] == [BUSY], 60, "the job runs"
    )
    [mine] = daemon.fleets[0].runners()
    assert mine.lease is not None
    node = bench.node(mine.lease.nodes[0].id)
    kill = {"node": node.id, "provider": node.provider}
    kill |= {"program": "cc1plus", "memory_limit": 2 << 30}
    text = "process {} (cc1plus) was killed: the node's memory limit of 2 GiB was reached"
    began = time.monotonic()
    bench.pools[0].feed.note(KILLED, pid=7, **kill)
    wait_for(lambda: mine.kills == [text.format(7)], 30, "the kill in the status")
    print(f"in the status after {time.monotonic() - began:.3f} s")
    assert time.monotonic() - began < limit(1.0)
    kills = pathlib.Path.home() / ".nodepool-runner" / mine.name / "kills"
    wait_for(lambda: kills.read_text() == f"{text.format(7)}\n", 30, "the kill on the node")
    end_worker(program)
    wait_for((program.folder / "job.log").exists, 30, "the end of the job")
    wait_for(
        lambda: (
            (program.folder / "job.log").read_text()
            == f"::error title=Out of memory::{text.format(7)}\n"
        ),
        30,
        "the kill in the log of the job",
    )
    bench.pools[0].feed.note(KILLED, pid=8, **kill)
    wait_for(
        lambda: f"{text.format(7)}; {text.format(8)}" in caplog.text, 60, "the reason in the log"
    )
    program.behave()
    for job in service.jobs("assigned", "running"):
        service.call("POST", f"/jobs/{job['id']}/complete", {"result": "failed"})
    site.wait_empty()


@pytest.mark.spec("GitHub 10: node deleted under a running job")
def test_node_that_vanishes_frees_its_place(
    site: Site, service: Emulator, pool: Pool, program: Program
) -> None:
    program.behave(seconds=3600)
    daemon = site.start()
    wait_connected(service)
    service.add_job("set")
    wait_for(lambda: service.jobs("running"), 30, "the job")
    [lease] = pool.leases()
    program.behave()
    lease.give_back()
    wait_for(lambda: daemon.fleets[0].failures == 1, 30, "it is noticed")
    [job] = service.jobs("running")
    subprocess.run(["pkill", "-f", f"{program.folder}/bin/"], check=False)
    service.call("POST", f"/jobs/{job['id']}/complete", {"result": "failed"})
    site.wait_empty()


@pytest.mark.spec("GitHub 10: pool empty: the reason is shown; no label: too")
def test_reason_for_waiting_is_shown(
    site: Site, service: Emulator, pool: Pool, bench: LauncherBench
) -> None:
    daemon = site.start({"name": "set"}, {"name": "lost", "label": "nowhere"})
    for name in ("set", "lost"):
        wait_connected(service, name)
    with pool.lease(*["small"] * 6, for_="1h"):
        job = service.add_job("set")
        service.add_job("lost")
        wait_for(
            lambda: "no launcher offers nowhere" in str(daemon.status()["trouble"]), 30, "the label"
        )
        wait_for(
            lambda: (
                "all" in str(daemon.fleets[0].status()) or "busy" in str(daemon.fleets[0].status())
            ),
            30,
            "a reason",
        )
        wait_for(lambda: "6 hold" in explained(bench).answer, 30, "the cause")
        found = explained(bench)
        assert found.answer.startswith("1 runner waiting for a node: ") and found.suggestion
        with pytest.raises(Unknown, match="nodepool-github status"):
            explain(bench.zk, "fleet", "other", HistoryReader())
        service.call("POST", f"/jobs/{job}/complete", {"result": "canceled"})
    for one in service.jobs("available", "assigned"):
        service.call("POST", f"/jobs/{one['id']}/complete", {"result": "canceled"})


@pytest.mark.spec("GitHub 7: the secret of a runner is in no process list, log, record or file")
def test_secret_of_a_runner_is_nowhere(
    site: Site,
    service: Emulator,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program.behave(seconds=3600)
    caplog.set_level("DEBUG")
    daemon = site.start()
    secrets: list[str] = []
    given = daemon.service.register
    monkeypatch.setattr(
        daemon.service, "register", lambda *args: secrets.append(given(*args)) or secrets[-1]
    )
    wait_connected(service)
    service.add_job("set")
    wait_for(lambda: service.jobs("running"), 30, "the job")
    [secret] = secrets
    lines = subprocess.run(
        ["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert secret not in lines and secret not in caplog.text
    folder = pathlib.Path("~root").expanduser() / runner.FOLDER / program.started()[0]
    assert sorted(each.name for each in folder.iterdir()) == ["job-ended.sh", "kills", "log", "pid"]
    assert all(secret not in each.read_text() for each in folder.iterdir())
    end_worker(program)
    [job] = service.jobs("running")
    service.call("POST", f"/jobs/{job['id']}/complete", {"result": "failed"})
    site.wait_empty()

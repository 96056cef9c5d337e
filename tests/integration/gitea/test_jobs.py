"""Jobs of a real Gitea on leased nodes: a host that a real sshd serves, and runners that speak
the real protocol.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time

import pytest

from nodepool.adapters.gitea import instance
from nodepool.adapters.runners import runner
from nodepool.adapters.runners.program import ask_status, show_status
from tests.conftest import wait_for
from tests.integration.gitea.conftest import NODES, Daemon
from tests.support.deadline import limit
from tests.support.gitea import Forge

pytestmark = [pytest.mark.gitea, pytest.mark.full]


@pytest.mark.spec("Gitea 8: lease, runner for one job, success, no registration, no node")
def test_job_runs_on_a_leased_node_and_nothing_is_left(daemon: Daemon, gitea: Forge) -> None:
    service = daemon.start()
    repository = daemon.run({"check": "stat -c '%a %n' /proc/$PPID/cwd/* /proc/$PPID/cwd/.runner"})
    assert daemon.ended(repository) == {"check": "success"}
    [job] = gitea.jobs(repository).values()
    assert job["labels"] == [daemon.label]
    log = gitea.log(repository, job["id"])
    files = [
        line.split()[1:] for line in log.splitlines() if "Run stat" not in line and "/cwd/" in line
    ]
    assert {mode for mode, _name in files} == {"600"}
    assert any(name.endswith("/.runner") for _mode, name in files) and "secret" not in log
    daemon.idle()
    assert service.fleets[0].failures == 0 and service.fleets[0].done == 1


def test_failed_job_is_no_failure_of_the_runner(daemon: Daemon) -> None:
    service = daemon.start()
    repository = daemon.run({"good": "true", "bad": "exit 3"})
    assert daemon.ended(repository) == {"good": "success", "bad": "failure"}
    daemon.idle()
    assert (service.fleets[0].done, service.fleets[0].failures) == (2, 0)


@pytest.mark.spec("Gitea 8: 20 jobs with at most 5 runners")
def test_many_jobs_never_have_more_runners_than_allowed(daemon: Daemon, gitea: Forge) -> None:
    service = daemon.start()
    repository = daemon.run({f"job-{number}": "sleep 0.5" for number in range(20)})
    most = 0

    def all_ended() -> bool:
        nonlocal most
        most = max(most, len(gitea.runners()), len(daemon.pool.leases()))
        return set(gitea.states(repository).values()) == {"success"}

    wait_for(all_ended, 180, "20 jobs")
    daemon.idle()
    assert 1 < most <= NODES
    assert service.fleets[0].failures == 0


@pytest.mark.spec("Gitea 2: a set that nobody maps is shown once, and gets no runner")
def test_job_with_labels_that_nobody_serves_gets_no_runner(daemon: Daemon, gitea: Forge) -> None:
    service = daemon.start()
    repository = gitea.repository({"lost": ([daemon.label, "gpu"], "true")})
    text = f"not served here: {', '.join(sorted([daemon.label, 'gpu']))} (1 jobs)"
    wait_for(lambda: text in daemon.status(), 20, "the labels in the status")
    assert daemon.pool.leases() == [] and service.fleets[0].wanted == 0
    gitea.cancel(repository)
    wait_for(lambda: text not in daemon.status(), 20, "the job is no longer shown")


@pytest.mark.spec("Gitea 8: canceled before its runner exists: the request for a node is withdrawn")
def test_job_that_is_canceled_while_it_waits_gives_its_lease_back(
    daemon: Daemon, gitea: Forge
) -> None:
    with daemon.pool.lease(*["small"] * NODES, for_="1h"):
        service = daemon.start()
        repository = daemon.run({"check": "true"})
        wait_for(lambda: len(daemon.pool.leases()) == 2, 30, "a lease that waits")
        gitea.cancel(repository)
        wait_for(lambda: len(daemon.pool.leases()) == 1, 30, "it is withdrawn")
        assert service.fleets[0].failures == 0
    assert daemon.ended(repository) == {"check": "cancelled"}


@pytest.mark.spec(
    "Gitea 8: canceled during the job: the server forgets the runner, whose program is stopped"
)
def test_job_that_is_canceled_while_it_runs_ends_on_the_node(
    daemon: Daemon, gitea: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "SWEEP", 1.0)
    monkeypatch.setattr(runner, "COMPARE", 1.0)
    monkeypatch.setattr(runner, "UNKNOWN", 1.5)
    service = daemon.start()
    repository = daemon.run({"check": f"echo $$ > {daemon.folder}/pid; sleep 7654 & sleep 7654"})
    wait_for(
        lambda: (
            (daemon.folder / "pid").read_text().strip() if (daemon.folder / "pid").exists() else ""
        ),
        60,
        "the step",
    )
    step = (daemon.folder / "pid").read_text().strip()
    gitea.cancel(repository)
    daemon.idle()
    wait_for(lambda: not pathlib.Path("/proc", step).exists(), 10, "the step has ended")
    assert daemon.ended(repository) == {"check": "cancelled"}
    assert service.fleets[0].failures == 0


def test_warm_runner_waits_for_a_job_and_is_replaced(daemon: Daemon, gitea: Forge) -> None:
    service = daemon.start(min=1)
    wait_for(
        lambda: [each["status"] for each in gitea.runners()] == ["online"], 30, "an idle runner"
    )
    [before] = gitea.runners()
    began = time.monotonic()
    repository = daemon.run({"check": "true"})
    assert daemon.ended(repository) == {"check": "success"}
    assert time.monotonic() - began < limit(20)
    wait_for(
        lambda: [each["id"] for each in gitea.runners() if each["id"] != before["id"]],
        30,
        "another runner",
    )
    for each in service.fleets:
        each.need(0)
    remove_warm(daemon)


def remove_warm(daemon: Daemon) -> None:
    """Let the fleet keep no idle runner, and wait until none is left."""
    assert daemon.service is not None
    for each in daemon.service.fleets:
        each.kind = dataclasses.replace(each.kind, least=0, idle=0.0)
    daemon.idle()


@pytest.mark.spec(
    "Gitea 3.4, 3.5: an idle runner is disabled, checked and deleted, before its node is returned"
)
def test_runner_that_gets_no_job_is_removed(
    daemon: Daemon, gitea: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LINGER", 1.0)
    service = daemon.start(min=1)
    wait_for(
        lambda: [each["status"] for each in gitea.runners()] == ["online"], 30, "an idle runner"
    )
    remove_warm(daemon)
    assert service.fleets[0].failures == 0


@pytest.mark.spec("Gitea 3.5: removing a busy runner breaks the job")
def test_busy_runner_is_not_removed(daemon: Daemon, gitea: Forge) -> None:
    service = daemon.start()
    repository = daemon.run({"check": f"until [ -e {daemon.folder}/go ]; do sleep 0.1; done"})
    wait_for(lambda: gitea.states(repository) == {"check": "in_progress"}, 60, "the job runs")
    wait_for(lambda: '"busy", ' in daemon.status(), 20, "the runner is known as busy")
    assert daemon.listener is not None
    text = show_status(ask_status(f"127.0.0.1:{daemon.listener.port}"))
    assert (
        f"main/{daemon.label} (label small): wanted 1 of {NODES}; 1 busy" in text
        and "check; on node" in text
    )
    [runner] = service.fleets[0].runners()
    [runners] = service.instances["main"].runners
    assert not runners.remove(runner.name)
    (daemon.folder / "go").touch()
    assert daemon.ended(repository) == {"check": "success"}
    daemon.idle()


@pytest.mark.spec("Gitea 1: a token without the scope is told which it needs")
@pytest.mark.parametrize("scopes", ["read:repository", "read:admin"])
def test_token_without_rights_starts_nothing_and_reports_what_it_needs(
    daemon: Daemon, gitea: Forge, scopes: str
) -> None:
    token = gitea.server.user_token(gitea.server.user, scopes)
    service = daemon.start(token=token)
    repository = daemon.run({"check": "true"})
    wait_for(
        lambda: "it needs the scopes read:admin,write:admin" in daemon.status(), 30, "the reason"
    )
    assert token not in daemon.status() and not gitea.runners() and service.fleets[0].done == 0
    daemon.stop()
    gitea.cancel(repository)
    daemon.idle()


@pytest.mark.spec("Gitea 1: scopes of a token: repository")
def test_daemon_serves_one_repository(daemon: Daemon, gitea: Forge) -> None:
    repository = gitea.repository({})
    token = gitea.server.user_token(gitea.server.user, "write:repository")
    daemon.start(token=token, instance={"scope": f"repos/{repository}"})
    other = daemon.run({"other": "true"})
    gitea.push(repository, {"check": ([daemon.label], "true")})
    assert daemon.ended(repository) == {"check": "success"}
    daemon.idle()
    assert gitea.states(other) == {"other": "queued"}
    gitea.cancel(other)


@pytest.mark.spec("Gitea 4: the webhook only shortens the wait")
def test_webhook_shortens_the_wait_for_a_poll(daemon: Daemon, gitea: Forge) -> None:
    secret = daemon.folder / "webhook"
    secret.write_text("webhook-secret")
    secret.chmod(0o600)
    daemon.start(instance={"interval": "10m", "webhook-secret-file": str(secret)})
    wait_for(lambda: '"trouble": []' in daemon.status(), 20, "the first poll")
    assert daemon.listener is not None
    hook = gitea.call(
        "POST",
        "/admin/hooks",
        {
            "type": "gitea",
            "active": True,
            "events": ["workflow_job"],
            "config": {
                "url": f"http://127.0.0.1:{daemon.listener.port}/webhook/main",
                "content_type": "json",
                "secret": "webhook-secret",
            },
        },
    )
    try:
        repository = daemon.run({"check": "true"})
        assert daemon.ended(repository) == {"check": "success"}
    finally:
        gitea.call("DELETE", f"/admin/hooks/{hook['id']}")
    wait_for(lambda: daemon.pool.leases() == [], 30, "no lease")


@pytest.mark.spec("Gitea 8: the server is restarted: what runs continues")
def test_restart_of_the_server_disturbs_no_job(daemon: Daemon, gitea: Forge) -> None:
    service = daemon.start()
    repository = daemon.run(
        {"check": f"until [ -e {daemon.folder}/go ]; do sleep 0.1; done", "second": "true"}
    )
    wait_for(
        lambda: gitea.states(repository) == {"check": "in_progress", "second": "success"},
        60,
        "the job runs",
    )
    gitea.server.down()
    try:
        wait_for(lambda: "cannot be reached" in daemon.status(), 30, "the reason")
        assert service.fleets[0].failures == 0
    finally:
        gitea.server.up()
    wait_for(lambda: json.loads(daemon.status())["trouble"] == [], 60, "the queue is read again")
    (daemon.folder / "go").touch()
    assert daemon.ended(repository) == {"check": "success", "second": "success"}
    daemon.idle()
    assert service.fleets[0].failures == 0


@pytest.mark.spec("Gitea 8: a runner that crashes during its job")
def test_crashed_runner_returns_its_node_and_does_not_delay_others(
    daemon: Daemon, gitea: Forge
) -> None:
    service = daemon.start()
    repository = daemon.run(
        {"check": f"until [ -e {daemon.folder}/go ]; do sleep 0.1; done; kill -KILL $PPID"}
    )
    wait_for(lambda: '"busy", ' in daemon.status(), 60, "the runner is known as busy")
    (daemon.folder / "go").touch()
    wait_for(lambda: daemon.pool.leases() == [], 30, "the node is returned")
    assert (service.fleets[0].failures, service.fleets[0].broken.left) == (0, 0.0)
    gitea.cancel(repository)  # the server itself does so after ten minutes
    daemon.idle()


@pytest.mark.spec("Gitea 3.3: the program is missing on the node")
def test_missing_program_is_named_and_tried_again_after_growing_pauses(
    daemon: Daemon, gitea: Forge
) -> None:
    service = daemon.start(command="no-such-runner daemon")
    repository = daemon.run({"check": "true"})
    wait_for(
        lambda: "no-such-runner is not in PATH on the node" in daemon.status(), 60, "the reason"
    )
    fleet = service.fleets[0]
    wait_for(lambda: fleet.broken.count > 1, 60, "another attempt and another pause")
    gitea.cancel(repository)
    daemon.idle()

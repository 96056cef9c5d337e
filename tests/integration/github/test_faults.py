"""What goes wrong with GitHub's service, and a daemon that is killed: jobs continue, nothing is
started twice or left over.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import signal
import subprocess
import sys
import urllib.request

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from nodepool.adapters.github import listener
from nodepool.adapters.github.program import SCHEMA, GitHub
from nodepool.adapters.runners.program import Collector
from nodepool.client import Pool
from tests.conftest import wait_for
from tests.integration.github.conftest import Site
from tests.integration.github.test_jobs import wait_connected
from tests.support.fault_proxy import (
    FaultProxy,
    Forward,
    Reply,
    Request,
    cut_off,
    drop,
    lose_answer,
)
from tests.support.github import Emulator, Program, emulator

pytestmark = [pytest.mark.github, pytest.mark.full]
ENDPOINTS = (
    "registrationToken",
    "adminConnection",
    "scaleSets",
    "sessions",
    "getMessage",
    "deleteMessage",
    "acquireJobs",
    "generateJitConfig",
    "runners",
)


def end_session(service: Emulator, name: str = "set") -> None:
    service.call("POST", f"/expire/session/{service.set_id(name)}")


@pytest.mark.spec("GitHub 10: 503, 403 and delay on each endpoint")
@pytest.mark.parametrize(
    "response",
    [
        {"kind": "status", "status": 503},
        {"kind": "rateLimit", "status": 403, "retryAfterSecs": 1, "primary": False},
        {"kind": "rateLimit", "status": 429, "retryAfterSecs": 1, "primary": False},
        {"kind": "delay", "millis": 700},
    ],
    ids=["503", "403", "429", "slow"],
)
def test_job_is_done_although_each_call_fails_once(
    site: Site, service: Emulator, response: dict[str, object]
) -> None:
    for endpoint in ENDPOINTS:
        service.fail(endpoint, **response)
    daemon = site.start()
    wait_for(lambda: service.set_id("set") is not None, 60, "the set")
    wait_connected(service)
    service.add_job("set")
    wait_for(lambda: len(service.jobs("completed")) == 1, 60, "the job")
    site.wait_empty()
    assert daemon.fleets[0].failures == 0


ACTIONS = {"drop": drop, "lost answer": lose_answer, "cut answer": cut_off}
PATHS = (
    "registration-token",
    "runner-registration",
    "/runnerscalesets",
    "/sessions",
    "/queue/",
    "/acquirejobs",
    "/generatejitconfig",
    "/agents",
)


@pytest.mark.spec("GitHub: an answer may be lost on its way, or half of it")
@pytest.mark.parametrize("action", ACTIONS)
def test_job_is_done_although_each_answer_is_lost_once(
    site: Site, service: Emulator, program: Program, action: str
) -> None:
    def rewritten(request: Request, forward: Forward) -> Reply:
        answer = forward(request)
        answer.body = answer.body.replace(service.url.encode(), proxy.url.encode())
        return answer

    proxy = FaultProxy(("127.0.0.1", int(service.url.rpartition(":")[2])), rewritten)
    try:
        for path in PATHS:
            for method in ("GET", "POST", "DELETE"):
                proxy.fail(
                    lambda each, path=path, method=method: (
                        path in each.path and each.method == method
                    ),
                    ACTIONS[action](),
                    times=1,
                )
        daemon = site.start(url=f"{proxy.url}/org")

        def connected() -> bool:
            # A session whose answer was lost: GitHub ends it after minutes.
            if daemon.sets[0].conflicts and service.state()["sessions"]:
                end_session(service)
                daemon.sets[0].conflicts = 0
            return daemon.status()["trouble"] == []

        wait_for(connected, 90, "it listens")
        service.add_job("set")
        wait_for(lambda: connected() and len(service.jobs("completed")) == 1, 90, "the job")
        site.wait_empty()
        assert len(set(program.started())) <= 2
    finally:
        site.stop()
        proxy.close()


@pytest.mark.spec("GitHub 10: tokens expire in the middle")
def test_tokens_that_expire_are_renewed(site: Site, service: Emulator, program: Program) -> None:
    program.behave(seconds=1)
    daemon = site.start()
    wait_connected(service)
    for number in range(3):
        service.call("POST", "/expire/admin-tokens")
        service.call("POST", f"/expire/queue-token/{service.set_id('set')}")
        service.add_job("set")
        wait_for(lambda number=number: len(service.jobs("completed")) == number + 1, 60, "the job")
    site.wait_empty()
    assert daemon.status()["trouble"] == []


@pytest.mark.spec(
    "GitHub 3, rules 1 and 2: set found by name, made again when it has gone, not deleted at the "
    "end"
)
def test_deleted_scale_set_is_made_again(site: Site, service: Emulator) -> None:
    daemon = site.start()
    wait_connected(service)
    first = service.set_id("set")
    assert first is not None
    daemon.service.delete(first)
    wait_for(lambda: service.set_id("set") not in (None, first), 60, "another set")
    wait_connected(service)
    service.add_job("set")
    wait_for(lambda: service.jobs("completed"), 60, "the job")
    site.stop()
    assert service.set_id("set") is not None and service.state()["sessions"] == []


@pytest.mark.spec("GitHub 4: a second listener waits, says so, and takes over")
def test_second_daemon_continues_the_work_of_the_first(
    site: Site, service: Emulator, program: Program, pool: Pool
) -> None:
    program.behave(seconds=5)
    config = site.config()
    first = site.run(config)
    wait_for(lambda: service.set_id("set") is not None, 60, "the set")
    wait_connected(service)
    second = site.start()
    wait_for(lambda: second.sets[0].conflicts, 30, "a conflict")
    assert "another listener has the session" in str(second.status()["trouble"])
    [found] = [
        each for each in Collector(second, "x").collect() if each.name == "x_session_conflicts"
    ]
    assert found.samples[0].labels == {"fleet": "set"} and found.samples[0].value >= 1
    service.add_job("set")
    wait_for(lambda: service.jobs("running"), 60, "the job")
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    end_session(service)
    wait_for(lambda: second.status()["trouble"] == [], 60, "it listens")
    wait_for(
        lambda: [each.name for each in second.fleets[0].runners()] == program.started(),
        30,
        "the runner is taken over",
    )
    site.wait_empty()
    assert len(program.started()) == 1


STEPS = {
    "the session is opened": "sessions",
    "a job is acquired": "acquireJobs",
    "a message is acknowledged": "deleteMessage",
    "a runner is registered": "generateJitConfig",
}


@pytest.mark.spec("GitHub 10: listener killed at each step and restarted")
@pytest.mark.parametrize("step", STEPS)
def test_daemon_is_killed_while(site: Site, service: Emulator, program: Program, step: str) -> None:
    config = site.config()
    endpoint = STEPS[step]
    if endpoint != "sessions":
        first = site.run(config)
        wait_for(lambda: service.set_id("set") is not None, 60, "the set")
        wait_connected(service)
        before = len(service.call("GET", "/state")["unacknowledged"])
        assert before == 0
        service.fail(endpoint, kind="delay", millis=2500)
        service.add_job("set")
        reached = {
            "acquireJobs": lambda: service.state()["unacknowledged"],
            "deleteMessage": lambda: service.jobs("assigned", "running", "completed"),
            "generateJitConfig": lambda: site.pool.leases(),
        }[endpoint]
        wait_for(reached, 60, "the step")
    else:
        service.fail(endpoint, kind="delay", millis=2500)
        first = site.run(config)
        wait_for(lambda: service.set_id("set") is not None, 60, "the set")
        service.add_job("set")
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    wait_for(lambda: _dropped(service), 30, "the session is gone")
    site.run(config)
    site.wait_empty()
    assert len(service.jobs("completed")) == 1
    assert len(set(program.started())) <= 2


def _dropped(service: Emulator) -> bool:
    """End the session of a daemon that was killed, as GitHub does after minutes; also one that
    is opened late.
    """
    if service.state()["sessions"]:
        end_session(service)
    return not service.state()["sessions"]


@pytest.mark.spec(
    "GitHub 8: restart: own leases are listed, each node is asked; running jobs go on"
)
def test_running_job_survives_a_killed_daemon(
    site: Site, service: Emulator, program: Program, pool: Pool
) -> None:
    program.behave(seconds=6)
    config = site.config()
    first = site.run(config)
    wait_for(lambda: service.set_id("set") is not None, 60, "the set")
    wait_connected(service)
    service.add_job("set")
    wait_for(lambda: service.jobs("running"), 60, "the job")
    [lease] = pool.leases()
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    _dropped(service)
    site.run(config)
    wait_for(lambda: service.jobs("completed"), 60, "the end of the job")
    site.wait_empty()
    assert len(program.started()) == 1
    assert f"(lease {lease.id}) is adopted" in site.log()


@pytest.mark.spec("GitHub 8: an orderly stop withdraws what waits; what runs goes on")
def test_stop_withdraws_leases_that_wait(site: Site, service: Emulator, pool: Pool) -> None:
    process = site.run(site.config())
    wait_for(lambda: service.set_id("set") is not None, 60, "the set")
    wait_connected(service)
    with pool.lease(*["small"] * 6, for_="1h"):
        job = service.add_job("set")
        wait_for(lambda: len(pool.leases()) == 2, 30, "a lease that waits")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        wait_for(lambda: len(pool.leases()) == 1, 10, "only ours")
        assert service.state()["sessions"] == []
        service.call("POST", f"/jobs/{job}/complete", {"result": "canceled"})


@pytest.mark.spec("GitHub 2: GitHub App: JWT, installation token, then as with a token")
def test_app_logs_in(site: Site, tmp_path: pathlib.Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    path = tmp_path / "app.pem"
    path.write_bytes(text)
    path.chmod(0o600)
    with emulator("--app-installation-id", "77") as service:
        config = site.config(url=service.config_url)
        config["github"] = {
            "url": service.config_url,
            "app": {"client-id": "Iv1.x", "installation": 77, "key-file": str(path)},
        }
        made = _made(site, config)
        assert made.service.group("default") == 1 and made.service.find("set", 1) is None
        wrong = {
            **config,
            "github": {**config["github"], "app": {**config["github"]["app"], "installation": 78}},
        }
        with pytest.raises(listener.ServiceError, match="status 40"):
            _made(site, wrong).service.find("set", 1)


def _made(site: Site, config: dict[str, object]) -> GitHub:
    import threading

    from nodepool.adapters.github.program import PROGRAM
    from nodepool.adapters.runners.program import Pools

    checked = SCHEMA(config)
    return GitHub(checked, Pools(checked["nodepool"], PROGRAM), threading.Event())


@pytest.mark.spec("GitHub 2: revoked token: the reason is shown, running jobs go on")
def test_revoked_token_is_reported_and_replaced_without_a_restart(
    site: Site, service: Emulator, tmp_path: pathlib.Path
) -> None:
    token = tmp_path / "github.token"
    good = token.read_text()
    token.write_text("ghp_revoked")
    daemon = site.start()
    wait_for(lambda: "status 401" in str(daemon.status()["trouble"]), 30, "the reason")
    assert "ghp_revoked" not in str(daemon.status())
    token.write_text(good)
    wait_for(lambda: daemon.status()["trouble"] == [], 60, "it listens")


@pytest.mark.spec("commands status and remove; /metrics")
def test_commands_show_and_remove(site: Site, service: Emulator, program: Program) -> None:
    program.behave(seconds=3600)
    config = site.config({"name": "set", "min": 1})
    site.run(config)
    path = site.write(config)

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [
            sys.executable,
            "-m",
            "nodepool.adapters.github.program",
            "--config",
            str(path),
            *words,
        ]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)

    wait_for(lambda: "1 idle" in command("status").stdout, 60, "the warm runner")
    assert "set (label small): wanted 1 of 10; 1 idle" in command("status").stdout
    with urllib.request.urlopen(f"http://{config['listen']}/metrics", timeout=20) as answer:
        assert 'nodepool_github_runners{fleet="set",state="idle"} 1.0' in answer.read().decode()
    with urllib.request.urlopen(f"http://{config['listen']}/status", timeout=20) as answer:
        assert json.load(answer)["fleets"][0]["runners"][0]["state"] == "idle"
    site.stop()
    assert "no daemon answers at" in command("status").stderr
    assert command("remove", "other").stderr.strip() == "there is no scale set other"
    assert "set: deleted" in command("remove", "set").stdout
    assert service.set_id("set") is None


def test_time_claims_of_the_app_token() -> None:
    key = rsa.generate_private_key(65537, 2048)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    from nodepool.adapters.github.service import app_token

    claims = jwt.decode(app_token("Iv1.x", text), key.public_key(), algorithms=["RS256"])
    now = datetime.datetime.now().timestamp()
    assert (
        claims["iss"] == "Iv1.x"
        and claims["iat"] <= now - 59
        and now < claims["exp"] <= claims["iat"] + 600
    )

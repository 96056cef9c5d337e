"""The daemon is killed before and after each of its calls: the job runs once, and nothing is
left over.
"""

from __future__ import annotations

import signal
import urllib.parse

import pytest

from nodepool.client import Pool
from tests.conftest import wait_for
from tests.integration.gitea.conftest import Daemon
from tests.support.fault_proxy import FaultProxy, Forward, Reply, Request
from tests.support.gitea import Forge

pytestmark = [pytest.mark.gitea, pytest.mark.full]

#: Side of the call, method, and end of its path.
CALLS = {
    "lease": ("pool", "POST", "/leases"),
    "registration-token": ("gitea", "POST", "/registration-token"),
    "register": ("gitea", "POST", "/Register"),
    "renew": ("pool", "POST", "/renew"),
    "return": ("pool", "DELETE", ""),
}


def port_of(url: str) -> int:
    port = urllib.parse.urlsplit(url).port
    assert port is not None
    return port


@pytest.mark.spec(
    "Gitea 7, 8: killed at each step: continue or clean up; nothing is stored elsewhere"
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_killed_daemon_neither_loses_nor_repeats_a_job(
    daemon: Daemon, gitea: Forge, call: str, when: str
) -> None:
    side, method, end = CALLS[call]

    def matches(request: Request) -> bool:
        return request.method == method and request.path.partition("?")[0].endswith(end)

    def kill(request: Request, forward: Forward) -> Reply | None:
        answer = forward(request) if when == "after" else None
        assert daemon.process is not None
        daemon.process.kill()
        return answer

    real = daemon.pool
    with (
        FaultProxy(("127.0.0.1", port_of(gitea.url))) as forge,
        FaultProxy(("127.0.0.1", port_of(real.url))) as pool,
    ):
        daemon.pool = Pool(pool.url, real.token, real.key_file)
        fault = {"gitea": forge, "pool": pool}[side].fail(matches, kill)
        process = daemon.spawn(url=forge.url)
        done = daemon.folder / "done"
        repository = daemon.run({"check": f"echo once >> {done}; sleep 1"})
        wait_for(lambda: fault.used, 60, "the call")
        assert process.wait(20) == -signal.SIGKILL
        daemon.spawn(url=forge.url)
        assert daemon.ended(repository, 90) == {"check": "success"}
        assert done.read_text() == "once\n"
        daemon.idle(90)
        daemon.stop()


@pytest.mark.spec("Gitea 7: a crash during a job: the next start adopts the runner")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_job_continues_without_the_daemon(daemon: Daemon, gitea: Forge, number: int) -> None:
    process = daemon.spawn()
    repository = daemon.run({"check": f"until [ -e {daemon.folder}/go ]; do sleep 0.1; done"})
    wait_for(lambda: gitea.states(repository) == {"check": "in_progress"}, 60, "the job runs")
    process.send_signal(number)
    process.wait(40)
    [lease] = daemon.pool.leases()
    before = len(daemon.log.read_text())
    daemon.spawn()
    wait_for(lambda: lease.id in daemon.log.read_text()[before:], 30, "adoption")
    assert [one.id for one in daemon.pool.leases()] == [lease.id]
    (daemon.folder / "go").touch()
    assert daemon.ended(repository) == {"check": "success"}
    daemon.idle(90)

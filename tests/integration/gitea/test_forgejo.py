"""Jobs of an imitation of Forgejo on leased nodes; not tried against the real server."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

from nodepool.client import Pool
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.integration.gitea.conftest import NODES, Daemon
from tests.support.forgejo import LookAlike


@pytest.fixture
def forgejo() -> Iterator[LookAlike]:
    found = LookAlike()
    with found.proxy:
        yield found


@pytest.fixture
def daemon(
    forgejo: LookAlike, pool: Pool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Daemon]:
    made = Daemon(forgejo, pool, tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.stop()


def start(daemon: Daemon) -> None:
    program = daemon.folder / "forgejo-runner"
    program.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={REPOSITORY}\nexec {sys.executable} -m "
        'tests.support.forgejo "$@"\n'
    )
    program.chmod(0o755)
    daemon.start(instance={"type": "forgejo"}, command=f"{program} one-job")


@pytest.mark.spec("Forgejo 6: each job gets its own runner, by its handle")
def test_each_job_gets_its_own_runner(daemon: Daemon, forgejo: LookAlike) -> None:
    names = [f"job-{number}" for number in range(NODES + 2)]
    forgejo.add(*names, label=daemon.label)
    start(daemon)
    wait_for(
        lambda: {job["status"] for job in forgejo.jobs.values()} == {"success"}, 90, "all jobs"
    )
    daemon.idle()
    assert sorted(handle for handle, _runner in forgejo.ran) == sorted(forgejo.jobs)
    assert len({runner for _handle, runner in forgejo.ran}) == len(names)
    assert daemon.service is not None
    assert (daemon.service.fleets[0].done, daemon.service.fleets[0].failures) == (len(names), 0)
    made = [
        request
        for request in forgejo.proxy.requests
        if request.operation == "POST /api/v1/admin/actions/runners"
    ]
    assert len(made) == len(names)


@pytest.mark.spec("Forgejo 6: status 2: the job is gone, the node is returned")
def test_job_that_was_canceled_before_its_runner_came_is_no_failure(
    daemon: Daemon, forgejo: LookAlike
) -> None:
    forgejo.add("check", label=daemon.label)
    taken = forgejo.proxy.fail(
        "POST /start", lambda _request, _forward: forgejo.cancel("handle-check")
    )
    start(daemon)
    wait_for(lambda: taken.used, 60, "the runner asks")
    wait_for(lambda: daemon.pool.leases() == [], 60, "the node is returned")
    assert daemon.service is not None and daemon.service.fleets[0].failures == 0
    [runner] = forgejo.runners()
    assert runner["name"].startswith("np-"), "which the server keeps: it is removed later"
    assert forgejo.ran == []

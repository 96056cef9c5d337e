"""Drains: runners that wait for a job leave, and jobs wait in the queue of the forge."""

from __future__ import annotations

import time

import pytest

from nodepool.status.drains import remaining
from nodepool.zk.drains import Drain
from nodepool.zk.mirror import notes
from tests.conftest import wait_for
from tests.integration.gitea.conftest import Daemon
from tests.support.gitea import Forge
from tests.support.launcher import LauncherBench

pytestmark = [pytest.mark.gitea, pytest.mark.full]


def test_jobs_wait_in_the_queue_until_the_drain_ends(
    daemon: Daemon, gitea: Forge, bench: LauncherBench
) -> None:
    service = daemon.start(min=1)
    running = daemon.run({"long": f"until [ -e {daemon.folder}/end ]; do sleep 0.2; done"})
    wait_for(
        lambda: (
            sorted(each.state for each in service.fleets[0].runners()) == ["busy", "idle"]
            and all(each["status"] != "offline" for each in gitea.runners())
        ),
        60,
        "a runner with a job, and one without",
    )
    drain = Drain("label", "small", time.time(), reason="new disks")
    notes.write(bench.zk.kazoo_client, drain)
    wait_for(lambda: len(remaining(bench.zk, drain)) == 1, 25, "the node with the job")
    waiting = daemon.run({"next": "true"})
    wait_for(lambda: "1 jobs wait" in daemon.status(), 20, "the job in the queue")
    assert "no node small until a drain ends: label small is drained: new" in daemon.status()
    (daemon.folder / "end").touch()
    assert daemon.ended(running) == {"long": "success"}
    wait_for(lambda: remaining(bench.zk, drain) == [], 20, "the end of the drain's nodes")
    assert service.fleets[0].runners() == []
    notes.remove(bench.zk.kazoo_client, drain)
    assert daemon.ended(waiting, 25) == {"next": "success"}
    assert service.fleets[0].failures == 0
    # The runner that waits again must not be left over for the next test.
    notes.write(bench.zk.kazoo_client, drain)
    daemon.idle()

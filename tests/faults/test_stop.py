"""The installed nodepool-launcher program: orderly stop with work under way, and the restart
after it.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.faults.launcher import HERE, Bench, LauncherProcess

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]


def start_program(bench: Bench, number: int) -> LauncherProcess:
    """``nodepool-launcher`` itself; the driver comes in through the entry-point group
    ``nodepool.drivers``.
    """
    package = bench.tmp / "site"
    information = package / "diskcloud-1.dist-info"
    if not package.exists():
        information.mkdir(parents=True)
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: diskcloud\nVersion: 1\n"
        )
        (information / "entry_points.txt").write_text(
            "[nodepool.drivers]\ndiskcloud = diskcloud:DiskDriver\n"
        )
        shutil.copytree(HERE / "drivers" / "diskcloud", package / "diskcloud")
    program = pathlib.Path(sys.executable).parent / "nodepool-launcher"
    command = (
        [str(program)] if program.exists() else [sys.executable, "-m", "nodepool.cmd.launcher"]
    )
    launcher = LauncherProcess.__new__(LauncherProcess)
    launcher.prepare(bench, bench.config(), f"program-{number}")
    env = {**os.environ, "PYTHONPATH": f"{package}:{REPOSITORY}"}
    with open(launcher.log, "ab") as out:
        launcher.process = subprocess.Popen(
            [*command, "-f", "-c", str(launcher.config), "-p", str(bench.tmp / f"{number}.pid")],
            stdout=out,
            stderr=out,
            cwd="/",
            env=env,
        )
    bench.launchers.append(launcher)
    bench.wait_ready(launcher)
    return launcher


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_stop_with_launches_under_way(bench: Bench, number: signal.Signals) -> None:
    """Within 10 s although launches and deletions take longer; the restart serves every request."""
    bench.cloud.set(create_delay=0.2, delete_delay=0.1)
    first = start_program(bench, 1)
    zuul = bench.zuul
    early = [zuul.submit("l0") for _ in range(4)]
    zuul.wait_fulfilled(early)
    bench.cloud.set(create_delay=30, delete_delay=30)
    zuul.use(early[:2])
    slow = [zuul.submit("l0") for _ in range(6)]
    zuul.wait_states(slow, lambda states: states["pending"] == 6)
    bench.cloud.set(create_delay=2, delete_delay=0.1)
    quick = [zuul.submit("l0", "l0") for _ in range(4)]
    wait_for(lambda: len(bench.cloud.instances()) >= 18, 10, "all creations under way")
    seconds = first.stop(number)
    assert first.process.returncode == 0
    assert seconds < 10, f"took {seconds:.1f} s"
    text = first.text()
    assert "Traceback" not in text, text[-3000:]
    # Its session has ended: no locks, no registration.
    assert zuul.pools() == []
    # What was nearly ready has been finished, nothing is in a state that needs a time-out to be
    # found.
    states = zuul.states(slow + quick)
    assert states["LOST"] == states["failed"] == 0
    bench.cloud.set(create_delay=0.2, delete_delay=0.1)
    began = time.monotonic()
    second = start_program(bench, 2)
    zuul.wait_fulfilled(slow + quick, 30)
    print(
        f"stopped in {seconds:.1f} s with {dict(states)}; all served "
        f"{time.monotonic() - began:.1f} s after the restart began"
    )
    zuul.use(early[2:] + slow + quick)
    # Those that were abandoned are deleted by their records, not by the search for leaks (60 s).
    bench.wait_nothing_left(15)
    assert bench.check_counts()["leaked"] == 0
    assert second.stop(number) < 10


def test_stop_without_zookeeper(bench: Bench) -> None:
    """A stop while no server answers takes no longer."""
    from tests.support.faults.launcher import Proxy

    proxy = Proxy(int(bench.settings["hosts"].rsplit(":", 1)[1]))
    try:
        bench.cloud.set(create_delay=20)
        launcher = bench.start(bench.config(hosts=proxy.host))
        ids = [bench.zuul.submit("l0") for _ in range(3)]
        bench.zuul.wait_states(ids, lambda states: states["pending"] == 3)
        proxy.set("close")
        wait_for(lambda: "suspended" in launcher.text(), 10, "a noticed interruption")
        assert launcher.stop() < 10
        # Never connected at all.
        starting = bench.start(bench.config(hosts=proxy.host), wait=False)
        wait_for(lambda: proxy.host in starting.text(), 10, "a message that names the server")
        assert starting.stop() < 10
        bench.cloud.set(create_delay=0.1)
        proxy.set("open")
        bench.start(bench.config())
        bench.zuul.wait_fulfilled(ids)
        bench.zuul.use(ids)
        bench.wait_nothing_left()
        bench.check_counts()
    finally:
        proxy.stop()

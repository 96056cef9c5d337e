"""A launcher killed in the foreground, as in a container: its next start does not wait for the
session to time out.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests import REPOSITORY
from tests.support.faults.launcher import HERE, Bench, LauncherProcess

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

REQUESTS = 250
#: Seconds; nobody could wait for it here.
SESSION = 60.0


def start(
    bench: Bench, config: pathlib.Path, again: LauncherProcess | None = None
) -> LauncherProcess:
    """Without a pid file, and with a separate home."""
    launcher = LauncherProcess.__new__(LauncherProcess)
    if again is None:
        launcher.prepare(bench, config, "foreground")
    else:
        launcher.log, launcher.port, launcher.config = again.log, again.port, again.config
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "NODEPOOL_FAULT_DRIVERS": str(HERE / "drivers"),
        "HOME": str(bench.tmp / "home"),
    }
    for name in ("XDG_STATE_HOME", "STATE_DIRECTORY"):
        env.pop(name, None)
    # The directory of the default pid file may be there on this machine; this one is not.
    with open(launcher.log, "ab") as out:
        launcher.process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "serve.py"),
                "-f",
                "-c",
                str(launcher.config),
                "-p",
                str(bench.tmp / "none" / "nodepool.pid"),
            ],
            stdout=out,
            stderr=out,
            cwd="/",
            env=env,
        )
    bench.launchers.append(launcher)
    return launcher


@pytest.mark.spec(
    "issue 11, point 7: 250 requests in work are served at once after a kill in the foreground"
)
def test_kill_in_the_foreground(bench: Bench) -> None:
    (bench.tmp / "home").mkdir()
    bench.cloud.set(create_delay=30, delete_delay=0.1)
    config = bench.config(bench.provider(pool={"max-servers": REQUESTS}), session=SESSION)
    launcher = start(bench, config)
    bench.wait_ready(launcher)
    ids = [bench.zuul.submit("l0") for _ in range(REQUESTS)]
    bench.zuul.wait_states(ids, lambda states: states["pending"] == REQUESTS, 40)
    launcher.kill()
    bench.cloud.set(create_delay=0.1, delete_delay=0.1)
    began = time.monotonic()
    second = start(bench, config, launcher)
    bench.zuul.wait_fulfilled(ids, 40)
    seconds = time.monotonic() - began
    print(f"{REQUESTS} requests served {seconds:.1f} s after the restart")
    assert seconds < SESSION
    assert "Ended the session of the previous process, which was killed" in second.text()
    (state,) = (bench.tmp / "home" / ".local" / "state" / "nodepool").iterdir()
    assert state.stat().st_mode & 0o077 == 0 and state.parent.stat().st_mode & 0o077 == 0

"""SIGKILL of the node manager before every step of making and of removing a sliver (NM-C.7,
NM-C.9.5).
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.faults.launcher import HERE
from tests.support.nodemanager.scene import NmDaemon

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root"),
]
#: More steps than any of the two has.
MOST = 80


class CrashingDaemon(NmDaemon):
    """Ends itself at a step; started again without that wish it must put everything in order."""

    def start_crashing(self, number: int) -> None:
        self.armed = self.tmp / "armed"
        self.armed.unlink(missing_ok=True)
        self.steps = self.tmp / "steps"
        self.steps.unlink(missing_ok=True)
        with open(self.tmp / "log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(HERE / "serve_nm.py"),
                    "-f",
                    "-c",
                    str(self.config),
                    "-p",
                    str(self.tmp / "pid"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": str(REPOSITORY),
                    "NODEPOOL_NM_CRASH": str(number),
                    "NODEPOOL_NM_ARMED": str(self.armed),
                    "NODEPOOL_NM_STEPS": str(self.steps),
                },
            )
        wait_for(self.answers, 30, "the node manager to answer")

    def died(self) -> bool:
        assert self.process is not None
        if self.process.poll() is None:
            return False
        assert self.process.returncode == -signal.SIGKILL, self.log[-2000:]
        return True

    def attempt(self, method: str, *arguments: Any) -> None:
        """A call that the daemon may not survive."""
        try:
            self.client.call(method, *arguments, timeout=30)
        except (RpcError, RpcFault):
            if not self.died():
                wait_for(self.died, 10, "the end of the node manager")

    def last_step(self) -> str:
        return self.steps.read_text().splitlines()[-1] if self.steps.exists() else "(none)"


def record(nm: NmDaemon, network: str) -> dict[str, Any]:
    return {
        "account_type": "sliver",
        "name": "alpha",
        "rspec": {"nm_disk_quota": 102400, "nm_mem_limit": 128},
        "network": network,
        "ssh_keys": nm.key.with_suffix(".pub").read_text(),
    }


def settled(nm: CrashingDaemon, state: str) -> bool:
    """The process has died, or the sliver has come to this state."""
    if nm.died():
        return True
    try:
        found = nm.client.call("WaitSliver", "alpha", state, 5, timeout=10)
    except (RpcError, RpcFault):
        return False
    return bool(found.get("state") == {"gone": "absent"}.get(state, state))


def quiet(nm: CrashingDaemon) -> bool:
    """Whether it has died by the time when no further step comes."""
    last, since = "", time.monotonic()
    while time.monotonic() - since < 0.5 and not nm.died():
        now = nm.last_step()
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(0.01)
    return nm.died()


@pytest.mark.parametrize("what", ["create", "delete"])
@pytest.mark.spec("NM-C.9.5: kill -9 at every step of create and delete")
def test_daemon_killed_at_any_step_completes_it_at_the_next_start(
    tmp_path: pathlib.Path, what: str
) -> None:
    nm = CrashingDaemon(tmp_path, 5)
    seen: list[str] = []
    for number in range(1, MOST):
        nm.start_crashing(number)
        if what == "delete":
            nm.client.call("PutRecord", record(nm, "nat"))
            nm.wait("alpha")
        nm.armed.touch()
        if what == "create":
            nm.attempt("PutRecord", record(nm, "nat"))
        else:
            nm.attempt("DeleteSliver", "alpha")
        wait_for(
            lambda: settled(nm, "ready" if what == "create" else "gone"),
            60,
            f"an end at step {number}",
        )
        crashed = quiet(nm)
        nm.armed.unlink()
        seen.append(nm.last_step())
        if crashed:
            nm.start()
        if what == "create":
            if not nm.client.call(
                "ListSlivers"
            ):  # it died before the record was there: nobody was notified that it is
                nm.client.call("PutRecord", record(nm, "nat"))
            nm.wait("alpha")
            assert nm.ssh("alpha", "echo fine") == "fine\n", seen[-1]
        elif nm.client.call("ListSlivers"):  # it died before the record was deleted
            nm.client.call("DeleteSliver", "alpha")
        if nm.client.call("ListSlivers"):
            nm.client.call("DeleteSliver", "alpha")
        nm.wait("alpha", "gone")
        nm.stop()
        deadline = time.monotonic() + 20
        while (left := nm.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == [], (f"after a crash at {seen[-1]}", left, nm.log[-1500:])
        if not crashed:
            break
    else:
        raise AssertionError(f"more than {MOST} steps: {seen}")
    assert len(seen) > 10, seen

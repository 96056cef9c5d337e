"""The daemon as a unit of systemd: only on hosts that have it as process 1, such as that of
tools/vm.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.pushed import service as pushed_service
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.nodemanager.scene import PROGRAM, NmDaemon

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="units of systemd need root"),
    pytest.mark.skipif(not os.path.isdir("/run/systemd/system"), reason="process 1 is not systemd"),
]


def systemctl(*words: str) -> str:
    done = subprocess.run(
        ["systemctl", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout.strip()


@pytest.fixture(params=["installed", "pushed"])
def unit(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[tuple[str, NmDaemon]]:
    """A node manager that systemd runs, with the unit that comes with Nodepool, or with that of
    a launcher's node managers.
    """
    daemon = NmDaemon(tmp_path)
    if request.param == "installed":
        text = (REPOSITORY / "etc/systemd/nodepool-nodemanager.service").read_text()
    else:
        text = pushed_service.unit(tmp_path, str(REPOSITORY))
    text = re.sub("(?m)^ExecStart=.*$", f"ExecStart={PROGRAM} -f -c {daemon.config}", text)
    # The test has separate directories.
    text = re.sub("(?m)^[A-Z][a-z]+Directory.*\n", "", text)
    name = f"nodepool-test-{os.getpid()}.service"
    path = pathlib.Path("/run/systemd/system", name)
    path.write_text(text)
    try:
        systemctl("daemon-reload")
        systemctl("start", name)
        yield name, daemon
        for sliver in daemon.client.call("ListSlivers"):
            daemon.delete(sliver["name"])
    finally:
        systemctl("stop", name)
        path.unlink()
        systemctl("daemon-reload")
    wait_for(lambda: daemon.left() == [], 10, "all traces to go")


@pytest.mark.spec("NM-C.7: stopping or killing the daemon kills no sliver; the next one adopts it")
def test_restarted_daemon_adopts_its_slivers(unit: tuple[str, NmDaemon]) -> None:
    name, daemon = unit

    def sliver() -> int:
        return int(
            json.loads(daemon.client.call("DumpDatabase"))["local"]["sliver_alpha"]["handle"]["pid"]
        )

    daemon.put("alpha", rspec={"nm_pids_max": 77})
    pid = sliver()
    systemctl("restart", name)
    assert sliver() == pid
    groups = pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    assert name not in str(groups)  # else systemd 252 could not have started it
    if len(groups) == 1:
        assert (
            pathlib.Path("/sys/fs/cgroup", groups[0].split("::/")[1]) / "pids.max"
        ).read_text() == "77\n"
    before = systemctl("show", "--property=MainPID", "--value", name)
    os.kill(int(before), 9)
    wait_for(
        lambda: systemctl("show", "--property=MainPID", "--value", name) not in ("0", before),
        30,
        "another daemon",
    )
    # Returns when the daemon that comes is there.
    systemctl("start", name)
    assert sliver() == pid
    assert daemon.ssh("alpha", "echo", "there") == "there\n"
    daemon.put("beta")
    assert daemon.ssh("beta", "echo", "there") == "there\n"

"""The whole node manager, and the quickstart, of an ordinary user (NM-C.2, NM-C.4)."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.client.rpc import RpcFault
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.nodemanager import user
from tests.support.nodemanager.scene import PROGRAM, NmDaemon

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that nobody else is"),
    pytest.mark.skipif(
        not os.path.exists("/usr/sbin/sshd"), reason="this host has no sshd to run inside slivers"
    ),
]


class UserDaemon(NmDaemon):
    """``nodepool-nodemanager`` of an ordinary user."""

    def start(self, wait: bool = True) -> None:
        with open(self.tmp / "log", "ab") as log:
            self.process = subprocess.Popen(
                user.command(
                    self.tmp.parent,
                    PROGRAM,
                    "-f",
                    "-c",
                    str(self.config),
                    "-p",
                    str(self.tmp / "run" / "pid"),
                ),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        if wait:
            wait_for(self.answers, 30, "the node manager to answer")

    def shell(self, name: str, script: str, check: bool = True) -> str:
        return self.ssh(name, script, user="zuul", check=check)


@pytest.fixture
def home() -> Iterator[pathlib.Path]:
    directory = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-test-user-"))
    directory.chmod(0o755)
    yield user.make_home(directory)
    wait_for(lambda: not user.processes(), 10, "the user's last process to end")
    assert str(directory) not in pathlib.Path("/proc/self/mountinfo").read_text()
    shutil.rmtree(directory)


@pytest.fixture
def nm(home: pathlib.Path) -> Iterator[UserDaemon]:
    daemon = UserDaemon(home, **{"default-rspec": {}})
    for directory in ("state", "run"):
        (daemon.tmp / directory).mkdir()
        os.chown(daemon.tmp / directory, user.USER_ID, user.USER_ID)
    daemon.start()
    try:
        yield daemon
        daemon.clean()
        assert list((daemon.tmp / "state" / "slivers").iterdir()) == []
    finally:
        assert daemon.process is not None
        if daemon.process.poll() is None:
            daemon.stop()


@pytest.mark.spec(
    "NM-C.2, NM-C.4: rootless: sshd -i works without root too: key-only, host keys from the API"
)
def test_login_works_without_root(nm: UserDaemon) -> None:
    found = nm.put("alpha", hostname="alpha")
    assert (found["backend"], found["username"]) == ("rootless", "zuul")
    assert nm.shell("alpha", "id -un; id -u; hostname; pwd").split() == [
        "zuul",
        "1000",
        "alpha",
        "/home/zuul",
    ]
    assert "CapEff:\t0000000000000000" in nm.shell("alpha", "cat /proc/self/status")
    assert "NoNewPrivs:\t1" in nm.shell("alpha", "cat /proc/self/status")
    assert "zuul" not in nm.ssh("alpha", "id -un", user="root", check=False), (
        "there is no root to log in as"
    )
    refused = subprocess.run(
        [
            "ssh",
            "-p",
            str(found["ssh_port"]),
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            f"UserKnownHostsFile={os.devnull}",
            "-o",
            "IdentitiesOnly=yes",
            "-i",
            os.devnull,
            "zuul@127.0.0.1",
            "true",
        ],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert refused.returncode == 255 and "Permission denied (publickey)" in refused.stderr


@pytest.mark.spec("NM-C.4: rootless: terminals, files and exit statuses go through as usual")
def test_terminal_and_files(nm: UserDaemon) -> None:
    found = nm.put("alpha")
    options = [
        "-i",
        str(nm.key),
        "-o",
        "BatchMode=yes",
        "-o",
        f"UserKnownHostsFile={os.devnull}",
        "-o",
        "StrictHostKeyChecking=no",
    ]
    done = subprocess.run(
        ["ssh", "-tt", "-p", str(found["ssh_port"]), *options, "zuul@127.0.0.1", "tty; exit 7"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 7 and "/dev/pts/0" in done.stdout, done
    (nm.tmp / "file").write_text("content\n")
    subprocess.run(
        [
            "scp",
            "-q",
            "-P",
            str(found["ssh_port"]),
            *options,
            str(nm.tmp / "file"),
            "zuul@127.0.0.1:copy",
        ],
        timeout=30,
        check=True,
    )
    assert nm.shell("alpha", "cat copy") == "content\n"


@pytest.mark.spec("NM-C.2: without root: what is missing is said")
def test_what_is_missing_is_reported(nm: UserDaemon) -> None:
    problems = " ".join(nm.client.call("GetCapacity")["problems"])
    assert "limits: rlimits only" in problems and "root inside" in problems
    assert "limits: rlimits only" in nm.log
    with pytest.raises(AssertionError, match="only network none"):
        nm.put("alpha", network="nat")
    with pytest.raises(AssertionError, match="no root inside"):
        nm.put("beta", username="root")


@pytest.mark.spec("NM-C.7: without root too: SIGKILL of the daemon ends no sliver and no session")
def test_sessions_survive_sigkill_of_the_daemon(nm: UserDaemon) -> None:
    record = nm.put("alpha")
    nm.put("beta")
    session = nm.session("alpha", "zuul")
    pids = {
        name: json.loads(nm.client.call("DumpDatabase"))["local"][f"sliver_{name}"]["handle"]["pid"]
        for name in ("alpha", "beta")
    }
    nm.stop(signal.SIGKILL)
    os.kill(pids["beta"], signal.SIGKILL)
    nm.start()
    nm.wait("beta")
    after = nm.client.call("GetRecord", "alpha")
    assert after["state"] == "ready" and after["host_keys"] == record["host_keys"]
    local = json.loads(nm.client.call("DumpDatabase"))["local"]
    assert (
        local["sliver_alpha"]["handle"]["pid"] == pids["alpha"]
        and local["sliver_beta"]["handle"]["pid"] != pids["beta"]
    )
    out, _ = session.communicate("hello\n", timeout=20)
    assert out == "got hello\n" and session.returncode == 0
    assert nm.shell("beta", "echo again") == "again\n"


@pytest.mark.spec(
    "NM-C.2, NM-C.5: a sliver of an ordinary user does not get that user's rights over the API"
)
def test_sliver_of_a_user_does_not_get_that_users_rights(nm: UserDaemon) -> None:
    nm.put("alpha")
    nm.put("beta")
    assert nm.shell("alpha", "ls -A /run/nodepool").split() == []
    call = (
        "import xmlrpc.client as x; s = x.ServerProxy('http://127.0.0.1:812/')\n"
        "print(s.GetRSpec('alpha')['nm_cpu_share'])\n"
        "for call in (lambda: s.GetRSpec('beta'), lambda: s.DeleteSliver('beta'), lambda: "
        "s.DumpDatabase(),\n"
        "             lambda: s.PutRecord({'account_type': 'sliver', 'name': 'x', 'image': "
        "'dir:/home'})):\n"
        "    try: print(call())\n"
        "    except x.Fault as fault: print(fault.faultCode)\n"
    )
    assert nm.shell("alpha", f'python3 -c "{call}"').split() == ["32", "108", "108", "108", "108"]


@pytest.mark.spec(
    "NM-A.1, NM-A.8: without root: Stop, Start; nm_enabled 0 stops what cannot be frozen"
)
def test_stop_disable_and_start(nm: UserDaemon) -> None:
    nm.put("alpha")
    nm.shell("alpha", "echo kept > file; nohup sleep 1000 > /dev/null 2>&1 &")
    nm.client.call("Stop", "alpha")
    nm.wait("alpha", "stopped")
    nm.client.call("Start", "alpha")
    nm.wait("alpha")
    assert nm.shell("alpha", "cat file; pgrep -x sleep").split() == ["kept", "1"], (
        "only process 1 sleeps"
    )
    nm.put("alpha", wait=False, rspec={"nm_enabled": 0})
    wait_for(
        lambda: nm.client.call("GetRecord", "alpha")["state"] == "disabled",
        20,
        "the sliver to be disabled",
    )
    with pytest.raises(RpcFault, match="not enabled"):
        nm.client.call("Start", "alpha")
    nm.put("alpha", wait=False, rspec={"nm_enabled": 1})
    wait_for(
        lambda: nm.client.call("GetRecord", "alpha")["state"] == "ready",
        20,
        "the sliver to be enabled",
    )
    assert nm.shell("alpha", "cat file") == "kept\n"


@pytest.mark.spec("NM-C.8: the quickstart works without root and says what is missing")
def test_quickstart_works_without_root(home: pathlib.Path) -> None:
    result = home / "summary.json"
    done = subprocess.run(
        user.command(
            home,
            sys.executable,
            str(REPOSITORY / "tools" / "demo"),
            "--no-image",
            "--json",
            str(result),
        ),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    logs = "".join(
        f"\n== {path}\n{path.read_text()[-4000:]}" for path in sorted(home.rglob("*.log"))
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "missing on this machine: root inside" in done.stdout and "as zuul" in done.stdout
    summary = json.loads(result.read_text())
    assert [node["driver"] for node in summary["nodes"]] == ["nodemanager"] * 3
    assert summary["left_behind"] == []
    assert summary["limits"] == {
        "memory_hog_killed": True,
        "process_limit_held": True,
        "others_alive": True,
    }

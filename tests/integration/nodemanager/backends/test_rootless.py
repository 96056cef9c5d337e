"""Slivers of an ordinary user: the daemon's part runs as a user without any right, in a separate
program.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.nodemanager import user

USER = user.USER_ID + 100
"""Any id without rights; no account is needed for it."""

PROGRAM = r"""
import base64, json, os, select, sys
from nodepool.nodemanager.backends.base import BackendError, Services, SliverSpec
from nodepool.nodemanager.backends.rootless import RootlessBackend
from nodepool.nodemanager.helper.zygote import Zygote

assert os.geteuid() != 0
backend = RootlessBackend(sys.argv[1], Services(Zygote()))
handles = {}

def run(name, argv):
    reading, writing = os.pipe()
    try:
        process = backend.spawn(handles[name], argv, None, writing, writing).process()
    finally:
        os.close(writing)
    with process:
        text = b""
        while data := os.read(reading, 65536):
            text += data
        return {"text": text.decode(errors="replace"), "status": process.wait(10).status}

for line in sys.stdin:
    order = json.loads(line)
    answer = {}
    try:
        name = order.get("name", "s1")
        script = base64.b64decode(order["script"]) if "script" in order else None
        image, rspec = order.get("image", "host"), order.get("rspec", {})
        keys = order.get("keys", "")
        spec = SliverSpec(name, 1, image, rspec, keys, script, order.get("network", "none"),
                          order.get("username", "zuul"))
        do = order["do"]
        if do == "check":
            answer = {"fatal": [p.remedy for p in backend.check() if p.fatal]}
        elif do == "run":
            answer = run(name, order["argv"])
        elif do in ("create",):
            handles[name] = backend.create(spec)
            answer = handles[name]
        elif do in ("stop", "start", "configure"):
            handles[name] = getattr(backend, do)(spec, handles[name])
            answer = handles[name]
        elif do == "adopt":
            handles[name] = order["handle"]
            answer = {"alive": backend.adopt(spec, order["handle"])}
        elif do == "console":
            answer = {"text": backend.console(spec).decode()}
        elif do == "destroy":
            handle = handles.pop(name, None) if order.get("with_handle", True) else None
            backend.destroy(name, 1, handle)
        elif do == "freeze":
            backend.freeze(spec, handles[name], True)
        elif do == "found":
            answer = {"names": backend.found()}
    except BackendError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
backend.services.zygote.stop()
"""


def readable(path: str) -> bool:
    """May others than root reach it?"""
    here = pathlib.Path(path).resolve()
    return all(
        parent.stat().st_mode & 0o005 == 0o005
        for parent in (here, *here.parents)
        if parent.is_dir()
    )


class Daemon:
    """The program above, as the user; orders in, answers out."""

    def __init__(self, state: pathlib.Path, python: str, path: str) -> None:
        self.process = subprocess.Popen(
            [
                "setpriv",
                f"--reuid={USER}",
                f"--regid={USER}",
                "--clear-groups",
                "--inh-caps=-all",
                "--bounding-set=-all",
                python,
                "-c",
                PROGRAM,
                str(state),
            ],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": path,
                "PYTHONDONTWRITEBYTECODE": "1",
                "LANG": "C.UTF-8",
            },
        )

    def __call__(self, do: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the program ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def shell(self, script: str) -> str:
        answer = self("run", argv=["sh", "-c", script])
        assert "error" not in answer, answer
        return str(answer["text"])

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def interpreter() -> Iterator[tuple[str, str]]:
    """A Python and a path that the user may read; developers keep theirs in root's home."""
    packages = sysconfig.get_paths()["purelib"]
    if readable(sys.executable) and readable(packages) and readable(str(REPOSITORY)):
        yield sys.executable, str(REPOSITORY)
        return
    python = shutil.which("python3", path="/usr/bin:/bin")
    if (
        python is None
        or f"{sys.version_info.major}.{sys.version_info.minor}."
        not in subprocess.run(
            [python, "-V"], capture_output=True, text=True, check=True, timeout=20
        ).stdout
    ):
        pytest.skip("this Python is in root's home, and the system has none of the same version")
    directory = open_directory()
    for name in ("cryptography", "cffi"):
        if (pathlib.Path(packages) / name).exists():
            shutil.copytree(pathlib.Path(packages) / name, directory / name)
    for path in pathlib.Path(packages).glob("_cffi_backend*"):
        shutil.copy(path, directory)
    yield python, f"{user.open_repository(directory)}:{directory}"
    shutil.rmtree(directory)


def open_directory() -> pathlib.Path:
    """One that others can reach. pytest's own are closed, and closed again by each run of pytest
    on this machine.
    """
    directory = pathlib.Path(tempfile.mkdtemp(prefix="nodepool-test-user-"))
    directory.chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def state() -> Iterator[pathlib.Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can become a user without rights")
    directory = open_directory()
    os.chown(directory, USER, USER)
    yield directory / "state"
    shutil.rmtree(directory)


@pytest.fixture
def daemon(state: pathlib.Path, interpreter: tuple[str, str]) -> Iterator[Daemon]:
    made = Daemon(state, *interpreter)
    yield made
    if made.process.poll() is not None:
        made = Daemon(state, *interpreter)
    for name in made("found")["names"]:
        assert made("destroy", name=name) == {}
    assert made("found")["names"] == []
    made.close()
    wait_for(lambda: not user.processes(USER), what="no process of the user left")
    assert [
        line
        for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        if str(state) in line
    ] == []


@pytest.mark.spec("NM-C.2: rootless: one uid, /usr read-only")
def test_sliver_has_one_uid_and_a_readonly_usr(daemon: Daemon) -> None:
    assert daemon("check") == {"fatal": []}
    handle = daemon("create", keys="ssh-ed25519 AAAA me", script="IyEvYmluL3NoCmVjaG8gaGVsbG8K")
    assert handle["backend"] == "rootless"
    assert daemon.shell(
        "id -un; id -u; hostname; cat ~/.ssh/authorized_keys; stat -c %a ~/.ssh "
        "~/.ssh/authorized_keys"
    ).splitlines() == ["zuul", "1000", "s1", "ssh-ed25519 AAAA me", "700", "600"]
    assert "Read-only file system" in daemon.shell("touch /usr/x 2>&1")
    assert daemon.shell("echo 1 > /etc/mine && echo 2 > ~/mine && cat /etc/mine ~/mine") == "1\n2\n"
    wait_for(lambda: daemon("console")["text"] == "hello\n", what="the script's output")


@pytest.mark.spec("NM-C.2 isolation, rootless: no capabilities, own processes only, no host files")
def test_sliver_has_no_capabilities_and_sees_no_host_files(
    daemon: Daemon, state: pathlib.Path
) -> None:
    daemon("create")
    assert 1 < len(daemon.shell("ls -d /proc/[0-9]*").split()) <= 5
    assert "CapEff:\t0000000000000000" in daemon.shell("cat /proc/self/status")
    assert "NoNewPrivs:\t1" in daemon.shell("cat /proc/self/status")
    for path in (str(state), "/etc/shadow-", str(REPOSITORY)):
        assert "No such file" in daemon.shell(f"ls -d {path} 2>&1")
    assert set(daemon.shell("ls /dev").split()) == {
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "tty",
        "ptmx",
        "pts",
        "shm",
        "fd",
        "stdin",
        "stdout",
        "stderr",
    }
    text = daemon.shell(
        "mount -o remount,rw /usr 2>&1; umount /proc/keys 2>&1; unshare -Ur true 2>&1; "
        "echo h > /proc/sysrq-trigger; sudo -n true 2>&1; echo x > /sys/kernel/mm/ksm/run; true"
    )
    assert "uid=0" not in text
    assert "unshare failed: Operation not permitted" in text
    assert daemon.shell("cat /sys/class/net/*/address").split() == ["00:00:00:00:00:00"]


@pytest.mark.spec("NM-C.2: rootless limits: rlimits")
def test_rlimits_are_enforced(daemon: Daemon) -> None:
    daemon("create", rspec={"nm_pids_max": 30, "nm_mem_limit": 128, "nm_disk_quota": 1000})
    limits = daemon.shell(
        "ulimit -f; ulimit -d; python3 -c 'import resource as r; "
        "print(r.getrlimit(r.RLIMIT_NPROC))'"
    )
    assert limits.splitlines() == ["2000", "131072", "(30, 30)"]
    assert "MemoryError" in daemon.shell("python3 -c 'bytearray(300 << 20)' 2>&1")
    assert (
        daemon.shell(
            "for i in $(seq 60); do sleep 5 & done 2>&1 | grep -c 'Cannot fork'; true"
        ).strip()
        != "0"
    )


def test_stop_start_configure(daemon: Daemon) -> None:
    daemon("create")
    daemon.shell("echo kept > ~/note")
    stopped = daemon("stop")
    assert "pid" not in stopped
    assert "does not run" in daemon("run", argv=["true"])["error"]
    daemon("start")
    assert daemon.shell("cat ~/note") == "kept\n"
    daemon("configure", keys="ssh-ed25519 BBBB other")
    assert daemon.shell("cat ~/.ssh/authorized_keys") == "ssh-ed25519 BBBB other\n"


def test_kill_and_adopt(daemon: Daemon, state: pathlib.Path, interpreter: tuple[str, str]) -> None:
    handle = daemon("create")
    daemon.kill()
    second = Daemon(state, *interpreter)
    assert second("adopt", handle=handle) == {"alive": True}
    assert second.shell("hostname") == "s1\n"
    second.kill()
    third = Daemon(state, *interpreter)
    assert third("found") == {"names": ["s1"]}
    assert third("destroy", with_handle=False) == {}
    third.close()
    wait_for(lambda: not user.processes(USER), what="no process of the user left")


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ({"username": "root"}, "no root inside"),
        ({"network": "nat"}, "only network none"),
        ({"image": "tar:/no"}, "no such file"),
    ],
)
def test_impossible_orders_are_refused_with_the_reason(
    daemon: Daemon, order: dict[str, Any], text: str
) -> None:
    assert text in daemon("create", **order)["error"]


def test_freeze_is_refused(daemon: Daemon) -> None:
    daemon("create")
    assert "stop it instead" in daemon("freeze")["error"]


@pytest.mark.spec("NM-C.4: sshd -i works without root too")
def test_ssh_works_without_root(daemon: Daemon) -> None:
    if not os.path.exists("/usr/sbin/sshd"):
        pytest.skip("no sshd on this host")
    daemon("create")
    answer = daemon.shell(
        "/usr/sbin/sshd -t -f /etc/ssh/sshd_config_nodepool 2>&1; echo $?; "
        "echo | timeout 5 /usr/sbin/sshd -i -f /etc/ssh/sshd_config_nodepool 2>&1 | head -c 8"
    )
    assert answer == "0\nSSH-2.0-", answer


def test_creation_is_quick(daemon: Daemon) -> None:
    daemon("create")
    begin = time.perf_counter()
    daemon("create", name="s2")
    assert time.perf_counter() - begin < limit(1)

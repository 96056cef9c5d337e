"""The node manager as one file, and what runs it on a backing node (NM-C.8)."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

import pytest
import yaml

from nodepool.driver.nodemanager.pushed import zipapp
from nodepool.driver.nodemanager.pushed.private_directory import PrivateDirectory
from nodepool.driver.nodemanager.pushed.ssh_link import remote_command
from nodepool.nodemanager.api.identity import Identity
from nodepool.nodemanager.pushed import program as pushed_program
from nodepool.nodemanager.pushed import service as pushed_service
from nodepool.nodemanager.rootfs import ssh_files as sshfiles
from tests.conftest import wait_for


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """Paths of Unix sockets are short."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="np-p-", dir="/tmp"))
    yield folder / "base"
    shutil.rmtree(folder)


class Remote:
    """What a login shell of the other machine would run, here; without any package but those of
    Python itself.
    """

    def __init__(self, base: pathlib.Path, **job: object) -> None:
        python = base.parent / "python3"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        environment = {
            "PATH": f"{base.parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(base.parent),
        }
        self.process = subprocess.Popen(
            ["sh", "-c", remote_command(str(python))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.job = job
        self.base = base

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read(self, timeout: float = 40) -> dict[str, object]:
        assert self.process.stdout is not None and self.process.stderr is not None
        assert select.select([self.process.stdout], [], [], timeout)[0]
        line = self.process.stdout.readline()
        assert line.startswith(b"nodepool:"), (line, self.process.stderr.read())
        found: dict[str, object] = json.loads(line.removeprefix(b"nodepool:"))
        return found

    def load(self, digest: str | None = None) -> dict[str, object]:
        """Push; the first answer."""
        code, loader = zipapp.build(), zipapp.LOADER.encode()
        head = {"sha256": digest or code.digest, "size": len(code.content), "base": str(self.base)}
        self.write(b"%d\n%s%s\n" % (len(loader), loader, json.dumps(head).encode()))
        answer = self.read()
        if answer["state"] == "send":
            self.write(code.content)
        return answer

    def begin(self, action: str) -> dict[str, object]:
        self.write(json.dumps({"action": action, **self.job}).encode() + b"\n")
        return self.read()

    def end(self) -> int:
        self.process.communicate(timeout=20)
        return self.process.returncode


def test_the_file_is_always_the_same_and_has_all_that_is_needed() -> None:
    code = zipapp.build()
    assert hashlib.sha256(code.content).hexdigest() == code.digest and len(code.content) < 1 << 20
    zipapp.build.cache_clear()
    assert zipapp.build() == code
    names = zipfile.ZipFile(io.BytesIO(code.content)).namelist()
    assert {
        "__main__.py",
        "nodepool/nodemanager/pushed/program.py",
        "yaml/__init__.py",
        "kazoo/client.py",
    } <= set(names)
    assert not [
        n
        for n in names
        if (n.startswith("nodepool/") and "/driver/" in n)
        or "/tests/" in n
        or not n.endswith(".py")
    ]


def test_all_modules_can_be_imported_without_any_package(tmp_path: pathlib.Path) -> None:
    """Compiled packages (cryptography, lxml) are for tickets only."""
    path = tmp_path / "code.zip"
    path.write_bytes(zipapp.build().content)
    names = [
        n.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for n in zipfile.ZipFile(path).namelist()
        if n.startswith("nodepool/nodemanager/")
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-s",
            "-c",
            "import sys\nfor n in sys.argv[1:]: __import__(n)",
            *names,
        ],
        env={"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root")
@pytest.mark.spec(
    "NM-C.8: pushed as one zipapp: nothing but Python, the OpenSSH server and util-linux there"
)
def test_life_of_a_pushed_daemon(base: pathlib.Path) -> None:
    job = {
        "owner": "0000000001",
        "since": 10.5,
        "place": "p1",
        "address": "127.0.0.1",
        "idle": 3600,
        "config": {"id-base": 1_900_000_000, "max-slivers": 4},
    }
    remote = Remote(base, **job)
    assert remote.load() == {"state": "send"}
    answer = remote.begin("hold")
    assert (
        answer["state"] == "ready"
        and answer["root"] is True
        and answer["socket"] == f"{base}/p1/run/nodemanager.api"
    )
    place = pushed_program.Place(base, "p1")
    assert place.slivers() == [] and place.pid() is not None
    options = yaml.safe_load(place.read("nodemanager.yaml"))
    assert (
        options["api"] == {"tcp": False}
        and options["host-name"] == "0000000001"
        and options["ssh"]["address"] == "127.0.0.1"
    )
    assert (base / "p1" / "nodemanager.yaml").stat().st_mode & 0o077 == 0
    # A second launcher finds it; nothing is sent or started again.
    pid = place.pid()
    other = Remote(base, **job)
    assert (
        other.load() == {"state": "have"}
        and other.begin("hold")["state"] == "ready"
        and place.pid() == pid
    )
    # It continues without them.
    assert remote.end() == other.end() == 0
    assert place.pid() == pid
    # Another owner has the machine: all begins again.
    older, job = job, {**job, "owner": "0000000002", "since": 11}
    third = Remote(base, **job)
    third.load()
    assert (
        third.begin("hold")["state"] == "ready"
        and place.pid() != pid
        and place.read("owner") == "0000000002"
    )
    third.end()
    # The owner before has not heard of it.
    pid = place.pid()
    for action, expected in (("hold", "failed"), ("remove", "removed")):
        late = Remote(base, **older)
        late.load()
        answer = late.begin(action)
        assert answer["state"] == expected, answer
        assert "belongs to backing node 0000000002 now" in str(
            answer.get("text", "belongs to backing node 0000000002 now")
        )
        late.end()
    assert place.pid() == pid and place.read("owner") == "0000000002"
    # A sliver keeps it.
    place.client.call(
        "PutRecord", {"account_type": "sliver", "name": "a1", "rspec": {"nm_disk_quota": 102400}}
    )
    assert place.client.call("WaitSliver", "a1", "ready", 20, timeout=25)["state"] == "ready"
    remover = Remote(base, **job)
    remover.load()
    assert remover.begin("remove") == {"state": "busy", "text": "a1"}
    remover.end()
    # A daemon that is away is asked all the same.
    os.kill(place.pid() or 0, signal.SIGKILL)
    wait_for(lambda: place.pid() is None)
    remover = Remote(base, **job)
    remover.load()
    assert remover.begin("remove") == {"state": "busy", "text": "a1"}
    remover.end()
    place.client.call("DeleteSliver", "a1")
    place.client.call("WaitSliver", "a1", "gone", 20, timeout=25)
    remover = Remote(base, **job)
    remover.load()
    assert remover.begin("remove") == {"state": "removed"} and remover.end() == 0
    assert not base.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root")
@pytest.mark.spec("NM-C.6: a host cut off for good cleans itself")
def test_daemon_without_its_launcher_removes_itself(base: pathlib.Path) -> None:
    remote = Remote(
        base, owner="1", place="p1", address="127.0.0.1", config={"id-base": 1_900_000_000}, idle=1
    )
    remote.load()
    assert remote.begin("hold")["state"] == "ready"
    remote.end()
    place = pushed_program.Place(base, "p1")
    assert place.pid() is not None
    try:
        wait_for(lambda: not base.exists(), 30, "the end of a daemon that nobody wants")
    except AssertionError as error:
        raise AssertionError(
            f"{error}: {place.pid()}, {[str(p) for p in base.rglob('*')][:30]}, {place.read('log')}"
        ) from None


def test_what_cannot_be_done_is_reported(base: pathlib.Path) -> None:
    remote = Remote(
        base, owner="1", place="p1", address="127.0.0.1", config={"backend": "none-such"}
    )
    remote.load()
    answer = remote.begin("hold")
    assert answer["state"] == "failed" and "unknown backend 'none-such'" in str(answer["text"])
    assert remote.end() == 1
    damaged = Remote(base)
    damaged.load("0" * 64)
    assert damaged.read() == {"state": "failed", "text": "the node manager arrived damaged"}
    damaged.end()
    base.chmod(0o777)
    foreign = Remote(base)
    assert "can be changed by, another user" in str(foreign.load()["text"])
    foreign.end()


def test_account_that_logs_in_with_sudo(
    base: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SSH server connects to the socket as that account, not as root."""
    monkeypatch.setenv("SUDO_UID", "1000")
    order = {"owner": "1", "address": "192.0.2.1", "config": {"ssh": {"ports": "1000-1001"}}}
    options = pushed_program.Place(base, "p1")._options(order)
    expected = {"tcp": False, "controller-uids": [1000]} if os.geteuid() == 0 else {"tcp": False}
    assert options["api"] == expected
    assert options["ssh"] == {
        "address": "192.0.2.1",
        "listen-address": "0.0.0.0",
        "ports": "1000-1001",
    }
    identity = Identity(lambda uid: None, lambda name: None, own_uid=0, controllers=[1000])
    assert identity.of_uid(1000).kind == "controller" and identity.of_uid(1001).kind == "other"


@pytest.mark.parametrize(
    "address,expected",
    [
        ("127.0.0.1", "127.0.0.1"),
        ("192.0.2.1", "0.0.0.0"),
        ("2001:db8::1", "::"),
        ("localhost", "0.0.0.0"),
    ],
)
def test_listen_address_fits_the_address_of_the_node(address: str, expected: str) -> None:
    assert pushed_service.listen_address(address) == expected


def test_unit_of_systemd(tmp_path: pathlib.Path) -> None:
    text = pushed_service.unit(
        pathlib.Path("/var/lib/nodepool-backing/ab%c"), "/var/lib/nodepool-backing/code/x.zip"
    )
    assert 'Environment="PYTHONPATH=/var/lib/nodepool-backing/code/x.zip"' in text
    assert '"-m" "nodepool.nodemanager.pushed.program" "/var/lib/nodepool-backing/ab%%c"' in text
    # With Delegate= systemd before 254 could not start it again while there are slivers.
    assert "KillMode=process" in text and "Delegate=" not in text


def test_host_key_without_the_compiled_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    private, public = sshfiles.new_host_key()
    path = tmp_path / "key"
    path.write_bytes(private)
    path.chmod(0o600)
    found = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout
    assert found.split()[:2] == public.split()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError):
        sshfiles.new_host_key()


def test_directories_of_processes_that_have_ended(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path) if len(str(tmp_path)) < 60 else None)
    first = PrivateDirectory()
    gone, new = (
        first.path.parent / "nodepool-backing-gone",
        first.path.parent / "nodepool-backing-new",
    )
    gone.mkdir()
    new.mkdir()
    for path in (first.path, gone):
        os.utime(path, (0, 0))
    second = PrivateDirectory()
    assert (
        first.path.exists()
        and new.exists()
        and second.path.stat().st_mode & 0o077 == 0
        and not gone.exists()
    )
    first.remove()
    second.remove()
    new.rmdir()
    assert not first.path.exists()


def test_what_is_mounted_is_not_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d/sub").mkdir(parents=True)
    monkeypatch.setattr(pushed_service, "REMOVE_TIMEOUT", 0.1)
    monkeypatch.setattr(pushed_service, "mounts_below", lambda directory: [f"{directory}/sub"])
    monkeypatch.setattr("nodepool.nodemanager.kernel.syscalls.umount", lambda target: None)
    with pytest.raises(OSError, match="is still mounted"):
        pushed_service.remove_tree(tmp_path / "d")
    assert (tmp_path / "d/sub").exists()

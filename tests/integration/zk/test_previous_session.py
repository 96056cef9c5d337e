"""The locks of a killed process do not outlive it when it is started again."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from nodepool.process.service import make_daemon_parser, session_file
from nodepool.zk import ZooKeeperClient
from nodepool.zk.connection.previous_session import SessionFile
from tests.conftest import Chroot, wait_for
from tests.support.deadline import limit
from tests.support.faults.launcher import Proxy

HOLDER = """
import sys, time
from nodepool.process.service import make_daemon_parser, session_file
from nodepool.zk import ZooKeeperClient
from nodepool.zk.connection.previous_session import SessionFile
hosts, ca, cert, key, path = sys.argv[1:]
client = ZooKeeperClient(hosts, timeout=60, tls_cert=cert, tls_key=key, tls_ca=ca)
client.session_file = SessionFile(path)
client.connect(timeout=20)
client.client.create("/mark", ephemeral=True)
print("ready", flush=True)
time.sleep(60)
"""


def start_holder(chroot: Chroot, path: pathlib.Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLDER,
            chroot.connection,
            chroot.ca,
            chroot.cert,
            chroot.key,
            str(path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return process


def connect(chroot: Chroot, path: pathlib.Path) -> ZooKeeperClient:
    client = ZooKeeperClient(
        chroot.connection, timeout=60, tls_cert=chroot.cert, tls_key=chroot.key, tls_ca=chroot.ca
    )
    client.session_file = SessionFile(str(path))
    client.connect(timeout=20)
    chroot.clients.append(client)
    return client


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait(10)
    if process.stdout is not None:
        process.stdout.close()


@pytest.mark.spec(
    "issue: SIGKILL and restart, first decision <= 1 s, whatever the session time-out"
)
def test_the_session_of_a_killed_process_is_ended(
    zk_chroot: Chroot, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "session"
    process = start_holder(zk_chroot, path)
    end(process)
    started = time.monotonic()
    client = connect(zk_chroot, path)
    assert client.client is not None
    assert client.client.exists("/mark") is None
    assert time.monotonic() - started < limit(10), "the time-out is 60 s"
    assert os.stat(path).st_mode & 0o077 == 0
    client.disconnect()
    assert path.read_bytes() == b""


def test_session_that_could_not_be_closed_is_ended_by_the_next_process(
    zk_chroot: Chroot, tmp_path: pathlib.Path
) -> None:
    """A launcher is stopped while ZooKeeper cannot be reached, and started afterwards."""
    path = tmp_path / "session"
    proxy = Proxy(int(zk_chroot.hosts.rpartition(":")[2]))
    chroot = dataclasses.replace(zk_chroot, hosts=proxy.host)
    try:
        client = connect(chroot, path)
        assert client.client is not None
        client.client.create("/mark", ephemeral=True)
        proxy.set("close")
        wait_for(lambda: client.suspended)
        client.disconnect()
        proxy.set("open")
        stopped = ZooKeeperClient("127.0.0.1:9", timeout=60, insecure=True)
        stopped.session_file = SessionFile(str(path))
        with pytest.raises(TimeoutError):  # a start while it still cannot be reached
            stopped.connect(timeout=0)
        following = connect(chroot, path)
        assert following.client is not None
        assert following.client.exists("/mark") is None
    finally:
        proxy.stop()


def test_a_living_process_keeps_its_session(zk_chroot: Chroot, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "session"
    process = start_holder(zk_chroot, path)
    try:
        remembered = path.read_bytes()
        client = connect(zk_chroot, path)
        assert client.client is not None
        assert client.client.exists("/mark") is not None
        client.disconnect()
        assert path.read_bytes() == remembered
    finally:
        end(process)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"id": 1}', b'{"hosts": "x", "id": "y", "password": "zz"}']
)
def test_a_broken_file_does_no_harm(
    zk_chroot: Chroot, tmp_path: pathlib.Path, content: bytes
) -> None:
    path = tmp_path / "session"
    path.write_bytes(content)
    client = connect(zk_chroot, path)
    assert client.connected
    wait_for(lambda: b"password" in path.read_bytes() and b"zz" not in path.read_bytes())


def test_a_directory_that_is_missing_does_no_harm(
    zk_chroot: Chroot, tmp_path: pathlib.Path
) -> None:
    assert connect(zk_chroot, tmp_path / "missing" / "too" / "session").connected


@pytest.mark.spec(
    "issue 11, point 7: what ran on another machine, or before a boot, may live on there"
)
def test_the_session_of_another_machine_is_not_changed(
    zk_chroot: Chroot, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "session"
    process = start_holder(zk_chroot, path)
    remembered = path.read_bytes()
    try:
        # Over a volume in a network the lock of the file does not show it.
        copy = tmp_path / "elsewhere"
        copy.write_bytes(remembered)
        for name, content in (("other", "another-kernel\n"), ("empty", "")):
            boot = tmp_path / name
            boot.write_text(content)
            monkeypatch.setattr("nodepool.base.boot.BOOT_ID", str(boot))
            client = connect(zk_chroot, copy)
            assert client.client is not None
            assert client.client.exists("/mark") is not None
            client.disconnect()
            copy.write_bytes(remembered)
        monkeypatch.setattr("nodepool.base.boot.BOOT_ID", str(tmp_path / "missing"))
        assert SessionFile(str(copy)).acquire() is None
    finally:
        end(process)


def arguments(tmp_path: pathlib.Path, *options: str) -> argparse.Namespace:
    return make_daemon_parser("nodepool-launcher", "", str(tmp_path / "run" / "x.pid")).parse_args(
        list(options)
    )


@pytest.mark.spec(
    "issue 11, point 7: a place for it in the foreground, too; none is shared by two launchers of "
    "one machine"
)
def test_where_the_session_is_remembered(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)

    def where(*options: str) -> pathlib.Path:
        return pathlib.Path(session_file("nodepool-launcher", arguments(tmp_path, *options)))

    assert where("-f").parent == tmp_path / "home" / "state" / "nodepool"
    (tmp_path / "run").mkdir()
    assert where("-f").parent == tmp_path / "run"
    monkeypatch.setenv("STATE_DIRECTORY", f"{tmp_path}:{tmp_path}/images")
    assert where("-f").parent == tmp_path
    assert where("-f", "--state-dir", str(tmp_path / "own")).parent == tmp_path / "own"
    assert where("-f") == where()
    others = [
        where(),
        where("-c", "/other"),
        where("-s", "/secure"),
        where("-p", "/other.pid"),
        pathlib.Path(session_file("nodepool-builder", arguments(tmp_path))),
    ]
    assert len(set(others)) == len(others)

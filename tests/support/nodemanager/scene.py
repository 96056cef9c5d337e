"""A real node manager daemon with directories, ports and separate user ids, and the counting
of what it leaves.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nodepool.nodemanager.client.rpc import Client, RpcError, RpcFault
from nodepool.nodemanager.host import group_name
from tests.conftest import wait_for
from tests.support import cgroups
from tests.support.deadline import limit
from tests.support.ports import ID_SPAN, id_base, reserve

PROGRAM = str(pathlib.Path(sys.executable).with_name("nodepool-nodemanager"))


class NmDaemon:
    """``nodepool-nodemanager`` in the foreground."""

    def __init__(self, tmp_path: pathlib.Path, number: int = 0, **options: Any) -> None:
        self.tmp = tmp_path / f"nm{number}"
        self.tmp.mkdir()
        self.key = self.tmp / "key"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)],
            check=True,
            timeout=30,
        )
        self.first_port = reserve(120)
        self.config = self.tmp / "nodemanager.yaml"
        self.options = {
            "state-dir": str(self.tmp / "state"),
            "run-dir": str(self.tmp / "run"),
            "host-name": f"host{number}",
            "id-base": id_base(number),
            "max-slivers": 120,
            "ssh": {"ports": f"{self.first_port}-{self.first_port + 119}"},
            "api": {"tcp": 0},
            # So that many fit on a small machine.
            "default-rspec": {"nm_mem_limit": 192},
            **options,
        }
        self.write_config()
        self.arguments: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.client = Client(f"unix:{self.tmp}/run/nodemanager.api")

    def write_config(self, **changes: Any) -> None:
        self.options |= changes
        self.config.write_text(yaml.safe_dump(self.options))

    @property
    def log(self) -> str:
        return (self.tmp / "log").read_text() if (self.tmp / "log").exists() else ""

    def start(self, wait: bool = True) -> None:
        with open(self.tmp / "log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    PROGRAM,
                    "-f",
                    "-c",
                    str(self.config),
                    "-p",
                    str(self.tmp / "pid"),
                    *self.arguments,
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        if wait:
            wait_for(self.answers, 30, f"the node manager to answer; its log:\n{self.log}")

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log
        try:
            return bool(self.client.call("GetCapacity", timeout=limit(2)))
        except (RpcError, RpcFault):
            return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(limit(20))

    def put(self, name: str, wait: bool = True, **fields: Any) -> dict[str, Any]:
        rspec = fields.pop("rspec", {})
        self.client.call(
            "PutRecord",
            {
                "account_type": "sliver",
                "name": name,
                "rspec": {"nm_disk_quota": 102400, **rspec},
                "ssh_keys": self.key.with_suffix(".pub").read_text(),
                **fields,
            },
        )
        return self.wait(name) if wait else {}

    def wait(self, name: str, state: str = "ready", timeout: float = 30) -> dict[str, Any]:
        timeout = min(300.0, limit(timeout))
        found: dict[str, Any] = self.client.call(
            "WaitSliver", name, state, timeout, timeout=timeout + 5
        )
        wanted = {"gone": "absent"}.get(state, state)
        assert found.get("state") == wanted, (found, self.log[-3000:])
        return found

    def delete(self, name: str) -> None:
        self.client.call("DeleteSliver", name)
        self.wait(name, "gone")

    def ssh(
        self, name: str, *command: str, timeout: float = 30, user: str = "root", check: bool = True
    ) -> str:
        """Output of a command in a sliver, its host key checked."""
        found = self.client.call("GetRecord", name)
        known = self.tmp / f"known-{name}"
        place = (
            found["ssh_address"]
            if found["ssh_port"] == 22
            else f"[{found['ssh_address']}]:{found['ssh_port']}"
        )
        known.write_text("".join(f"{place} {key}\n" for key in found["host_keys"]))
        done = subprocess.run(
            [
                "ssh",
                "-i",
                str(self.key),
                "-p",
                str(found["ssh_port"]),
                "-o",
                "BatchMode=yes",
                "-o",
                f"ConnectTimeout={limit(10):.0f}",
                "-o",
                f"UserKnownHostsFile={known}",
                "-o",
                "StrictHostKeyChecking=yes",
                f"{user}@{found['ssh_address']}",
                *command,
            ],
            capture_output=True,
            text=True,
            timeout=limit(timeout),
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if check:
            assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return done.stdout

    def session(self, name: str, user: str = "root") -> subprocess.Popen[str]:
        """A login that has begun; given a line "hello" it says "got hello" and ends."""
        found = self.client.call("GetRecord", name)
        session = subprocess.Popen(
            [
                "ssh",
                "-i",
                str(self.key),
                "-p",
                str(found["ssh_port"]),
                "-o",
                "BatchMode=yes",
                "-o",
                "StrictHostKeyChecking=no",
                "-o",
                f"UserKnownHostsFile={os.devnull}",
                f"{user}@{found['ssh_address']}",
                "echo begun; read line; echo got $line",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert session.stdout is not None
        assert session.stdout.readline() == "begun\n"
        return session

    def clean(self) -> None:
        """Remove all slivers and end."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            names = {sliver["name"] for sliver in self.client.call("ListSlivers")}
            # Their deletion, which others have requested, must not end in the middle.
            for folder in {each.name for each in self.tmp.glob("state/slivers/*/")} - names:
                self.wait(folder, "gone")
            for name in names:
                try:
                    self.client.call("DeleteSliver", name)
                except RpcFault:  # kept by a source that the test ends with the daemon
                    continue
                self.wait(name, "gone")
            self.stop()

    # -- what it leaves

    def left(self) -> list[str]:
        """Mounts, processes, loop devices and cgroups of this node manager."""
        mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        found = [line.split()[4] for line in mounts if str(self.tmp) in line]
        base = int(self.options["id-base"])
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    uid = entry.stat().st_uid
                    if base <= uid < base + ID_SPAN:
                        found.append(f"process {entry.name}")
                except OSError:
                    continue
        group = group_name(str(self.tmp / "state"))
        found += [str(path) for path in cgroups.named(group)]
        for path in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                if str(self.tmp) in path.read_text():
                    found.append(str(path))
            except OSError:
                continue
        return found


def make_daemon(tmp_path: pathlib.Path, **options: Any) -> Iterator[NmDaemon]:
    """For a fixture: a running daemon; afterwards nothing of it may be left."""
    if os.geteuid() != 0:
        pytest.skip("native slivers need root")
    yield from run_daemon(NmDaemon(tmp_path, **options))


def run_daemon(daemon: NmDaemon) -> Iterator[NmDaemon]:
    """The same for one that is made already."""
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.clean()
        deadline = time.monotonic() + 10
        while (left := daemon.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == [], (left, daemon.log[-3000:])

"""tools/quickstart as a whole on this machine, with daemons that die (users 18)."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.deadline import limit

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the native backend needs root")


class Kept:
    """A demonstration that was left running."""

    def __init__(self, tmp_path: pathlib.Path) -> None:
        self.json = tmp_path / "summary.json"
        self.output = tmp_path / "output"
        self.work = tmp_path / "work"
        self.work.mkdir()
        with open(self.output, "wb") as stream:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(REPOSITORY / "tools" / "demo"),
                    "--no-image",
                    "--keep",
                    "--json",
                    str(self.json),
                    "--work",
                    str(self.work),
                ],
                stdout=stream,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_running(self) -> None:
        wait_for(
            lambda: "Ctrl-C stops everything" in self.text or self.process.poll() is not None,
            120,
            "it is running",
        )
        assert self.process.poll() is None, self.text

    def kill(self, name: str) -> None:
        """One of its daemons, as the kernel does it when memory is short."""
        os.kill(
            int((self.work / f"{name}.pid").read_text())
            if (self.work / f"{name}.pid").exists()
            else self.child(name),
            signal.SIGKILL,
        )

    def child(self, name: str) -> int:
        for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = entry.read_bytes().decode().split("\0")
            except OSError:
                continue
            if any(part.endswith(f"nodepool-{name}") for part in command) and any(
                str(self.work) in part for part in command
            ):
                return int(entry.parent.name)
        raise AssertionError(f"no {name}")

    def nodepool(self, *arguments: str) -> str:
        done = subprocess.run(
            [
                str(pathlib.Path(sys.executable).with_name("nodepool")),
                "-c",
                str(self.work / "nodepool.yaml"),
                *arguments,
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=limit(120),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def left(self) -> list[str]:
        """Mounts, loop devices and processes of it."""
        found = [
            line
            for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
            if str(self.work) in line
        ]
        for path in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                found += [path.read_text()] if str(self.work) in path.read_text() else []
            except OSError:
                continue
        return found


@pytest.fixture
def kept(tmp_path: pathlib.Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    if kept.process.poll() is None:
        kept.process.terminate()
        kept.process.wait(limit(60))


def test_users_18_a_launcher_that_dies_is_noticed(kept: Kept) -> None:
    kept.wait_running()
    assert len(json.loads(kept.json.read_text())["nodes"]) == 3, "written before the end, too"
    kept.kill("launcher")
    assert kept.process.wait(limit(60)) == 1
    assert "nodepool-launcher was killed by signal 9; read its log" in kept.text
    assert "Left behind" not in kept.text and kept.left() == []
    assert re.search(rf"The logs are in {kept.work}; when you have read them: rm -r", kept.text)


def test_users_18_slivers_of_a_killed_node_manager_are_removed(kept: Kept) -> None:
    kept.wait_running()
    kept.nodepool("request", "create", "host", "--wait", f"{limit(60):.0f}")
    assert kept.left(), "there is a sliver with mounts"
    kept.kill("nodemanager")
    assert kept.process.wait(limit(90)) == 1
    assert "nodepool-nodemanager was killed by signal 9" in kept.text
    assert "Left behind" not in kept.text and kept.left() == []


@pytest.mark.core
def test_a_signal_for_all_of_it(kept: Kept) -> None:
    """As Ctrl-C at a terminal, and what ``timeout`` sends: the node manager may not end before
    its slivers are removed.
    """
    kept.wait_running()
    kept.nodepool("request", "create", *["host"] * 4, "--wait", f"{limit(60):.0f}")
    assert kept.left(), "there are slivers with mounts"
    os.killpg(kept.process.pid, signal.SIGINT)
    kept.process.wait(limit(90))
    assert "All stopped; nothing left behind" in kept.text, kept.text
    assert "Left behind" not in kept.text and kept.left() == []

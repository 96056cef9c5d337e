"""``nodepool dev``: real daemons, real slivers, as started by a user."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import yaml

from nodepool.lab.dev.files import Directory
from tests.conftest import wait_for


class Dev:
    """One run of the command; its output is read from a file."""

    def __init__(self, directory: pathlib.Path, *arguments: str) -> None:
        self.directory = directory
        self.out = directory.parent / "out"
        command = [
            sys.executable,
            "-m",
            "nodepool.cmd.nodepoolcmd",
            "dev",
            "--directory",
            str(directory),
            *arguments,
        ]
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    @property
    def output(self) -> str:
        return self.out.read_text()

    def wait_ready(self) -> str:
        """Return the id of the node that it introduces."""
        wait_for(
            lambda: "is ready" in self.output or self.process.poll() is not None,
            what="first node",
            timeout=60,
        )
        found = re.search(r"Node (\d+) is ready", self.output)
        assert found is not None, self.output
        return found[1]

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def daemons(self) -> list[tuple[int, str]]:
        """Process ids and command lines of the children."""
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)]
        lines = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.splitlines()
        return [(int(line.split()[0]), line) for line in lines]

    def remains(self) -> list[str]:
        """Command lines of processes that know the directory; slivers have it in their
        environment, or are found as mounts.
        """
        found = [
            line
            for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
            if str(self.directory) in line
        ]
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    text = (
                        pathlib.Path(f"/proc/{entry}/cmdline").read_bytes()
                        + pathlib.Path(f"/proc/{entry}/environ").read_bytes()
                    )
                except OSError:
                    continue
                if str(self.directory).encode() in text:
                    found.append(text.replace(b"\0", b" ").decode(errors="replace"))
        return found


Start = Callable[..., Dev]


@pytest.fixture
def dev(tmp_path: pathlib.Path) -> Iterator[Start]:
    runs: list[Dev] = []

    def start(*arguments: str) -> Dev:
        runs.append(Dev(tmp_path / "dev", *arguments))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.end()
    # What was killed on purpose is cleared away by one that is not.
    if (tmp_path / "dev").exists() and runs:
        (tmp_path / "dev" / "kept").unlink(missing_ok=True)
        last = Dev(tmp_path / "dev")
        wait_for(
            lambda: "Pages:" in last.output or last.process.poll() is not None,
            what="start",
            timeout=60,
        )
        last.end()


def ssh(run: Dev, node: str, command: str) -> str:
    argv = ["ssh", "-F", str(run.directory / "ssh_config"), "-o", "BatchMode=yes", node, command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.core
def test_user_logs_in_to_the_first_node_and_nothing_is_left(dev: Start) -> None:
    run = dev()
    node = run.wait_ready()
    assert ssh(run, node, "hostname") == f"np{node}"
    for name in ("key", "key.pem", "nodepool-dev.lock"):
        assert (run.directory / name).stat().st_mode & 0o077 == 0
    assert run.directory.stat().st_mode & 0o077 == 0
    assert run.end() == 0
    assert "Everything has ended" in run.output
    assert not run.directory.exists()
    assert run.remains() == []


def test_killed_one_leaves_no_daemon_and_the_next_continues_with_its_node(dev: Start) -> None:
    run = dev()
    node = run.wait_ready()
    run.end(signal.SIGKILL)
    wait_for(
        lambda: not [line for line in run.remains() if "nodepool.lab.dev.child" in line],
        what="daemons ended",
        timeout=30,
    )
    again = dev()
    assert again.wait_ready() == node
    assert "using the existing data" in again.output
    assert ssh(again, node, "true") == ""
    assert again.end(signal.SIGTERM) == 0
    assert again.remains() == [] and not again.directory.exists()


def test_kept_one_starts_again_where_no_slivers_can_be_made(dev: Start) -> None:
    """The second run cannot have slivers: it says so, with the reason, and has fake nodes."""
    run = dev("--keep")
    first = run.wait_ready()
    assert run.end() == 0
    assert run.remains() == []
    manager = run.directory / "nodemanager.yaml"
    manager.write_text(yaml.safe_dump({**yaml.safe_load(manager.read_text()), "backend": "absent"}))
    again = dev()
    assert again.wait_ready() > first, "a node whose sliver is gone was introduced"
    assert re.search(r"Nodes are FAKE, records without machines: .*absent", again.output), (
        again.output
    )
    assert "driver: nodemanager" in (run.directory / "nodepool.yaml.old").read_text()
    assert again.end() == 0
    assert again.directory.exists() and "is kept" in again.output


def test_one_directory_serves_one_run_and_others_are_not_touched(
    dev: Start, tmp_path: pathlib.Path
) -> None:
    run = dev("--fake")
    run.wait_ready()
    command = [sys.executable, "-m", "nodepool.cmd.nodepoolcmd", "dev", "--directory"]
    second = subprocess.run(
        [*command, str(run.directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode != 0 and f"another nodepool dev uses {run.directory}" in second.stderr
    (tmp_path / "mine" / "lock").mkdir(parents=True)
    other = subprocess.run(
        [*command, str(tmp_path / "mine")], capture_output=True, text=True, timeout=60, check=False
    )
    assert other.returncode != 0 and "not a directory of nodepool dev" in other.stderr
    assert (tmp_path / "mine" / "lock").exists()


@pytest.mark.parametrize(
    "name",
    [
        "launcher",
        pytest.param("zookeeper", marks=pytest.mark.full),
        pytest.param("nodemanager", marks=pytest.mark.full),
    ],
)
def test_daemon_that_ends_is_named_and_its_log_is_kept(dev: Start, name: str) -> None:
    run = dev()
    run.wait_ready()
    module = {"zookeeper": "nodepool.lab.zkserver"}.get(name, f"nodepool.cmd.{name}")
    (victim,) = (pid for pid, command in run.daemons() if module in command)
    os.kill(victim, signal.SIGKILL)
    assert run.process.wait(60) == 1
    assert f"{name} has ended ({run.directory}/{name}.log)" in run.output
    assert (run.directory / f"{name}.log").exists()


def test_interrupted_removal_of_the_directory_can_be_repeated(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    first = Directory(tmp_path / "run", kept=False)
    for name in ("a", "z"):
        (tmp_path / "run" / name).mkdir()
    monkeypatch.setattr(
        "shutil.rmtree", lambda *_, **__: None
    )  # killed before anything was removed
    first.close()
    monkeypatch.undo()
    second = Directory(tmp_path / "run", kept=False)
    assert second.existed
    second.close()
    assert not (tmp_path / "run").exists()

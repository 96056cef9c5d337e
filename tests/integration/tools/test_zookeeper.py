"""tools/zookeeper: its server ends with ``run``, and outlives ``start``."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import REPOSITORY
from tests.conftest import load_tool

TOOL = str(REPOSITORY / "tools" / "zookeeper")
#: Prints where the server's files are, and ends when nobody holds the other end of its input.
COMMAND = "import os, sys; print(os.environ['NODEPOOL_ZK_CA'], flush=True); sys.stdin.read()"


@contextlib.contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], pathlib.Path, int]]:
    """``run``, the directory and a pidfd of its server."""
    with subprocess.Popen(
        [sys.executable, TOOL, "run", "--", sys.executable, "-c", COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "the server does not start"
        folder = pathlib.Path(process.stdout.readline().strip()).parent.parent
        server = os.pidfd_open(json.loads((folder / "settings.json").read_text())["pid"])
        try:
            yield process, folder, server
        finally:
            os.close(server)
            process.stdin.close()
            process.wait(30)
            shutil.rmtree(folder, ignore_errors=True)


def ended(server: int, timeout: float = 20.0) -> bool:
    return bool(select.select([server], [], [], timeout)[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_run_takes_its_server_along(number: signal.Signals) -> None:
    with running() as (process, folder, server):
        process.send_signal(number)
        assert ended(server)
        process.wait(30)
        assert folder.exists() == (number == signal.SIGKILL)


def test_start_leaves_its_server(tmp_path: pathlib.Path) -> None:
    def tool(action: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, TOOL, action, "--dir", str(tmp_path), *more],
            stdout=subprocess.PIPE,
            text=True,
            timeout=90,
        )

    server = os.pidfd_open(json.loads(tool("start").stdout)["pid"])
    try:
        assert not ended(server, 0.2)
        assert tool("status").returncode == 0
        assert tool("stop", "--purge").returncode == 0
        assert ended(server, 0)
    finally:
        os.close(server)


def test_stopped_server_is_waited_for(tmp_path: pathlib.Path) -> None:
    """Otherwise the interpreter warns at its end that the process is still running."""
    tool = load_tool("zookeeper")
    tool.start(tmp_path, bound=True)
    (process,) = tool.processes
    tool.stop(tmp_path)
    assert process.returncode is not None

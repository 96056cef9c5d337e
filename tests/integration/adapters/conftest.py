"""The pool of leases, with a real sshd, for the programs of other CI systems."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping

import pytest

from nodepool.client import Pool
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.integration.lease.conftest import places
from tests.support.launcher import LauncherBench
from tests.support.sshd import SSHServer, ssh_server

#: Runs a text in a shell, with more variables and with nodepool and ssh as a user has them; returns
#: what it has written.
Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the home directory of those who log in to nodes."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def sshd(home: pathlib.Path) -> Iterator[SSHServer]:
    # Whoever logs in is there, and not in the home directory of the user who runs the tests.
    options = [
        "Subsystem sftp /usr/lib/openssh/sftp-server",
        f"SetEnv HOME={home}",
        f'ForceCommand cd {home} && eval "$SSH_ORIGINAL_COMMAND"',
    ]
    with ssh_server(kinds=["ed25519"], options=options) as server:
        yield server


@pytest.fixture
def pool(bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path) -> Iterator[Pool]:
    with places(bench, sshd, tmp_path, label="small-noble") as made:
        yield made


@pytest.fixture
def shell(
    pool: Pool, bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path
) -> Iterator[Shell]:
    """A user's shell on a machine with the configuration file; at the end, no lease may be left."""
    # Its path must be short, as that of a socket is.
    user = pathlib.Path(tempfile.mkdtemp(prefix="user-", dir="/tmp"))
    programs, work = user / "bin", tmp_path / "work"
    programs.mkdir()
    work.mkdir()
    command = (
        f"PYTHONPATH={REPOSITORY} exec {sys.executable} -m nodepool.cmd.nodepoolcmd -c "
        f'{bench.tmp}/nodepool.yaml "$@"'
    )
    (programs / "nodepool").write_text(f"#!/bin/sh\n{command}\n")
    (programs / "nodepool").chmod(0o755)
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("NODEPOOL", "XDG", "PYTHON"))
    }
    agent = user / "agent"
    environment = {
        **kept,
        "HOME": str(user),
        "SSH_AUTH_SOCK": str(agent),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }

    def run(
        text: str, variables: Mapping[str, str] | None = None, path: str = ""
    ) -> subprocess.CompletedProcess[str]:
        own = {**environment, **(variables or {})}
        own["PATH"] = f"{programs}:{path}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", text],
            cwd=work,
            env=own,
            check=False,
            timeout=110,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    with subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(agent)], stdout=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(agent.exists, 10, "the agent")
            key = "~/.ssh/id_ed25519"
            assert (
                run(f"install -D -m 600 {sshd.client_key} {key} && ssh-add {key}").returncode == 0
            )
            yield run
            wait_for(lambda: pool.leases() == [], 20, "every lease returned")
        finally:
            process.terminate()
    shutil.rmtree(user)

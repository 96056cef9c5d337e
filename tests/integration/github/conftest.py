"""A pool of places on one host that a real sshd serves, an emulator of GitHub's service, and
daemons between them.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from nodepool.adapters.github import listener
from nodepool.adapters.github.program import PROGRAM, SCHEMA, GitHub
from nodepool.adapters.runners import fleet, runner
from nodepool.adapters.runners.drains import Follower
from nodepool.adapters.runners.program import Pools
from nodepool.client import Pool
from tests.conftest import wait_for
from tests.integration.lease.conftest import places, sshd
from tests.support.github import TOKEN, Emulator, Program, emulator
from tests.support.launcher import LauncherBench
from tests.support.ports import reserve
from tests.support.sshd import SSHServer

__all__ = ["sshd"]
PLACES = 6


@pytest.fixture
def service() -> Iterator[Emulator]:
    with emulator() as made:
        yield made


@pytest.fixture
def program(tmp_path: pathlib.Path, service: Emulator) -> Program:
    return Program(tmp_path / "actions-runner", service.url)


@pytest.fixture
def pool(bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path) -> Iterator[Pool]:
    with places(bench, sshd, tmp_path, PLACES, "small", "none") as made:
        yield made


class Site:
    """Makes configurations and daemons."""

    def __init__(
        self, directory: pathlib.Path, pool: Pool, service: Emulator, program: Program
    ) -> None:
        self.directory, self.pool, self.service, self.program = directory, pool, service, program
        self._daemons: list[tuple[GitHub, threading.Event]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for name, text in (("pool.token", pool.token or ""), ("github.token", TOKEN)):
            path = directory / name
            path.write_text(text)
            path.chmod(0o600)

    def config(self, *sets: dict[str, Any], url: str = "") -> dict[str, Any]:
        """Return a configuration; each set has label ``small`` and the stand-in for the runner."""
        always = {"label": "small", "folder": str(self.program.folder)}
        return {
            "nodepool": {
                "url": self.pool.url,
                "token-file": f"{self.directory}/pool.token",
                "ssh-key": self.pool.key_file,
            },
            "github": {
                "url": url or self.service.config_url,
                "token-file": f"{self.directory}/github.token",
            },
            "scale-sets": [{**always, **one} for one in sets or ({"name": "set"},)],
            "listen": f"127.0.0.1:{reserve()}",
        }

    def start(self, *sets: dict[str, Any], url: str = "") -> GitHub:
        """Start a daemon within this process."""
        config, stopping = SCHEMA(self.config(*sets, url=url)), threading.Event()
        pools = Pools(config["nodepool"], PROGRAM)
        pools.open()
        made = GitHub(config, pools, stopping)
        self._daemons.append((made, stopping))
        Follower(made.fleets, pools(""), stopping).start()
        made.start()
        return made

    def write(self, config: dict[str, Any]) -> pathlib.Path:
        path = self.directory / "github.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def run(self, config: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Start a daemon as a process."""
        argv = [
            sys.executable,
            "-m",
            "nodepool.adapters.github.program",
            "--config",
            str(self.write(config)),
            "run",
        ]
        with (self.directory / "daemon.log").open("ab") as log:
            process = subprocess.Popen(
                argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=dict(os.environ)
            )
        self._processes.append(process)
        return process

    def log(self) -> str:
        return (self.directory / "daemon.log").read_text()

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        self._processes.clear()
        daemons, self._daemons = self._daemons, []
        for made, stopping in daemons:
            stopping.set()
            for one in made.fleets:
                one.stop()
            made.join(5)
            for one in made.fleets:
                for each in one.runners():
                    each.join(60)

    def wait_empty(self) -> None:
        """Wait until nothing is left over: no job, no runner, no lease, nothing on the node."""
        wait_for(
            lambda: self.service.jobs("available", "assigned", "running") == [], 60, "all jobs done"
        )
        wait_for(lambda: self.service.state()["runners"] == [], 60, "no runner registered")
        wait_for(lambda: self.pool.leases() == [], 60, "no lease")
        folder = pathlib.Path("~root").expanduser() / runner.FOLDER
        names = set(self.program.started())
        wait_for(
            lambda: not folder.exists() or not names & {each.name for each in folder.iterdir()},
            30,
            "no folder on the node",
        )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (runner, "CHECK", 2),
        (runner, "LINGER", 0.2),
        (fleet, "FAILED_PAUSE", (0.2, 1.0)),
        (fleet, "UNUSED_PAUSE", (0.5, 5.0)),
        (listener, "CONFLICT", 0.5),
        (listener, "PAUSE", 0.2),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def site(
    quick: None, tmp_path: pathlib.Path, pool: Pool, service: Emulator, program: Program
) -> Iterator[Site]:
    made = Site(tmp_path, pool, service, program)
    try:
        yield made
    finally:
        made.stop()
        for lease in pool.leases():
            lease.give_back()


Start = Callable[..., GitHub]

"""A real Gitea, a launcher with a host for five nodes, and the daemon between them."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from nodepool.adapters.gitea import program
from nodepool.adapters.runners import runner
from nodepool.adapters.runners.drains import Follower
from nodepool.adapters.runners.program import Listener, Pools, read_config
from nodepool.client import Pool
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.integration.lease.conftest import places
from tests.support.gitea import Forge, running
from tests.support.launcher import LauncherBench
from tests.support.sshd import SSHServer, ssh_server

RUNNER = f"{sys.executable} {REPOSITORY}/tests/support/gitea_runner.py daemon"
#: Nodes of the pool.
NODES = 5


@pytest.fixture(scope="session")
def gitea_server() -> Iterator[Forge]:
    with running() as found:
        yield found


@pytest.fixture
def gitea(gitea_server: Forge) -> Iterator[Forge]:
    """The server; tests share it, so each has to leave no runner."""
    yield gitea_server
    left = gitea_server.runners()
    for each in left:
        gitea_server.call("DELETE", f"/admin/actions/runners/{each['id']}")
    assert left == []


@pytest.fixture(scope="module")
def sshd() -> Iterator[SSHServer]:
    with ssh_server(kinds=["ed25519"]) as server:
        yield server


@pytest.fixture
def pool(bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path) -> Iterator[Pool]:
    with places(bench, sshd, tmp_path, NODES) as made:
        yield made


class Daemon:
    """The daemon, in this process unless `spawn` starts it.

    :ivar name: of the label that its jobs have, unlike those of other tests.
    """

    def __init__(
        self, gitea: Forge, pool: Pool, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.gitea, self.pool, self.folder = gitea, pool, folder
        self.label = f"l{os.urandom(4).hex()}"
        self.service: program.Gitea | None = None
        self.listener: Listener | None = None
        self._stopping = threading.Event()
        self._pools: Pools | None = None
        self._monkeypatch = monkeypatch
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "daemon.log"

    def _write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    def config(
        self,
        token: str | None = None,
        url: str | None = None,
        instance: dict[str, Any] | None = None,
        **runners: Any,
    ) -> str:
        """Write the configuration; return its path."""
        entry = {
            "name": "main",
            "url": url or self.gitea.url,
            "token-file": self._write("token", token or self.gitea.server.token),
            "interval": "1s",
            **(instance or {}),
            "runners": [
                {
                    "runs-on": self.label,
                    "label": "small",
                    "max": NODES,
                    "command": RUNNER,
                    **runners,
                }
            ],
        }
        nodepool = {
            "url": self.pool.url,
            "token-file": self._write("pool", self.pool.token or ""),
            "ssh-key": str(self.pool.key_file),
        }
        content = {"nodepool": nodepool, "listen": "127.0.0.1:0", "instances": [entry]}
        return self._write("gitea.yaml", yaml.safe_dump(content))

    def start(self, **options: Any) -> program.Gitea:
        """Start it in this process."""
        self._monkeypatch.setattr(runner, "CHECK", 1)
        self._monkeypatch.setenv("RUNTIME_DIRECTORY", str(self.folder / "run"))
        config = read_config(self.config(**options), program.SCHEMA)
        self._pools = Pools(config["nodepool"], program.PROGRAM)
        self.service = program.Gitea(config, self._pools, self._stopping)
        self.listener = Listener(str(config["listen"]), self.service, program.PROGRAM)
        self._pools.open()
        self.listener.start()
        Follower(self.service.fleets, self._pools(""), self._stopping).start()
        self.service.start()
        return self.service

    def stop(self) -> None:
        """As SIGTERM does; then wait until no runner is left."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
            self.process = None
        if self.service is None or self.listener is None or self._pools is None:
            return
        self._stopping.set()
        for each in self.service.fleets:
            each.stop()
        self.service.join(10)
        self.listener.stop()
        for each in self.service.fleets:
            for one in each.runners():
                one.join(10)
        self._pools.close()

    def spawn(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start the program."""
        command = [
            sys.executable,
            "-m",
            "nodepool.adapters.gitea.program",
            "--config",
            self.config(**options),
            "run",
        ]
        environment = {**os.environ, "RUNTIME_DIRECTORY": str(self.folder / "run")}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
        return self.process

    def run(self, scripts: dict[str, str]) -> str:
        """Push a workflow whose jobs have our label; return the repository."""
        return self.gitea.repository(
            {name: ([self.label], script) for name, script in scripts.items()}
        )

    def ended(self, repository: str, timeout: float = 60.0) -> dict[str, str]:
        """Wait for the end of all jobs; return their results."""
        live = {"queued", "waiting", "in_progress", "pending"}

        def results() -> dict[str, str]:
            found = self.gitea.states(repository)
            return {} if live & set(found.values()) else found

        found: dict[str, str] = wait_for(results, timeout, "the end of all jobs")
        return found

    def idle(self, timeout: float = 60.0) -> None:
        """Wait until neither a lease nor a registration is left."""
        wait_for(lambda: self.pool.leases() == [], timeout, "no lease")
        wait_for(lambda: self.gitea.runners() == [], timeout, "no registration")

    def status(self) -> str:
        assert self.listener is not None
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.listener.port}/status", timeout=10
        ) as answer:
            return str(answer.read().decode())


Start = Callable[..., program.Gitea]


@pytest.fixture
def daemon(
    gitea: Forge, pool: Pool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Daemon]:
    made = Daemon(gitea, pool, tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.stop()

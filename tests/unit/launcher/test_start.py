"""A start of the launcher that fails leaves nothing behind and can be repeated."""

from __future__ import annotations

import pathlib
import threading
from types import SimpleNamespace

import pytest

from nodepool.cmd.launcher import LauncherService
from nodepool.launcher.launcher import NodePool
from nodepool.launcher.requests.assignment import Assignment
from nodepool.process import repl

CONFIG = """
zookeeper-insecure: true
zookeeper-servers: [{host: 127.0.0.1, port: 1}]
webapp: {port: 0, listen_address: 127.0.0.1}
labels: []
providers: []
"""


def test_web_server_that_never_ran_leaves_no_socket(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pool: object) -> None:
        raise OSError("port 3000 is in use")

    monkeypatch.setattr(repl, "ReplServer", refuse)
    path, place = tmp_path / "nodepool.yaml", tmp_path / "api.sock"
    path.write_text(f"{CONFIG}access: {{socket: {place}}}\n")
    arguments = SimpleNamespace(
        secure=None,
        config=str(path),
        webapp=True,
        repl=True,
        state_dir=str(tmp_path),
        pidfile=str(tmp_path / "pid"),
    )
    service = LauncherService(arguments)
    with pytest.raises(OSError, match="port 3000"):
        service.start()
    assert place.exists()
    service.stop()
    assert not place.exists()


def test_worker_that_cannot_start_is_started_at_the_next_attempt(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def start(self: Assignment) -> None:
        attempts.append(self)
        if len(attempts) == 1:
            raise RuntimeError("can't start new thread")
        threading.Thread.start(self)

    monkeypatch.setattr(Assignment, "start", start)
    path = tmp_path / "nodepool.yaml"
    path.write_text(CONFIG)
    pool = NodePool(None, str(path))
    monkeypatch.setattr(pool.events, "all_synced", lambda: None)
    with pytest.raises(RuntimeError):
        pool._start_workers()
    pool._start_workers()
    assert len(attempts) == 2 and pool.cleanup.is_alive()
    pool.stop()

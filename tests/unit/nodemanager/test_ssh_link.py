"""The connection to a backing node, with a program in place of the SSH client."""

from __future__ import annotations

import logging
import os
import pathlib
import queue
import time
from collections.abc import Callable

import pytest

from nodepool.driver.nodemanager.pushed.ssh_link import Link, LinkBusy, LinkError
from nodepool.driver.nodemanager.pushed.target import Target
from tests.support.deadline import limit

TARGET = Target(
    owner="0000000001",
    place="p",
    address="192.0.2.1",
    port=22,
    username="root",
    host_keys=("ssh-ed25519 AAAA",),
    python="python3",
    key_file="/key",
)
#: Answers the loader, says it is ready, and runs until its input ends.
READY = """echo $$ > "$DIRECTORY/pid"; echo Welcome; echo 'nodepool:{"state": "have"}'
echo 'nodepool:{"state": "ready", "socket": "/far"}'; cat > /dev/null"""


@pytest.fixture
def ssh(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a script as the SSH client, and the status with which it forwards sockets."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DIRECTORY", str(tmp_path))

    def install(script: str, forwards: int = 0) -> None:
        program = tmp_path / "ssh.new"
        program.write_text(
            f'#!/bin/sh\ncase "$*" in *"-O forward"*) echo no way >&2; exit {forwards};; '
            f"esac\n{script}\n"
        )
        program.chmod(0o755)
        program.rename(tmp_path / "ssh")  # a shell may be reading the other one

    return install


class Scene:
    def __init__(self, tmp_path: pathlib.Path) -> None:
        self.changes: queue.Queue[bool] = queue.Queue()
        self.link = Link(TARGET, tmp_path, logging.getLogger("test"), self.changes.put)

    def wait_change(self) -> bool:
        return self.changes.get(timeout=limit(10))


def test_link_that_stops_ends_its_client_soon(
    tmp_path: pathlib.Path, ssh: Callable[..., None]
) -> None:
    ssh(READY)
    scene = Scene(tmp_path)
    scene.link.start()
    assert scene.wait_change() is True
    assert scene.link.problem == ""
    assert scene.link.down_for() == 0
    started = time.monotonic()
    scene.link.stop()
    scene.link.join()
    assert time.monotonic() - started < limit(3)
    assert not pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    assert not list(tmp_path.glob(f"{TARGET.owner}.*"))
    assert scene.changes.empty()


def test_link_connects_again_with_the_reason_in_the_meantime(
    tmp_path: pathlib.Path, ssh: Callable[..., None]
) -> None:
    ssh("echo Host key verification failed. >&2; exit 255")
    scene = Scene(tmp_path)
    scene.link.start()
    assert scene.wait_change() is False
    assert scene.link.problem == "Host key verification failed."
    ssh(READY, forwards=1)
    while "cannot be forwarded: no way" not in scene.link.problem:
        assert scene.wait_change() is False
    ssh(READY)
    while not scene.wait_change():
        pass
    assert scene.link.problem == ""
    scene.link.stop()
    scene.link.join()


def test_removal_reports_why_it_failed(tmp_path: pathlib.Path, ssh: Callable[..., None]) -> None:
    link = Scene(tmp_path).link
    answers = """echo 'nodepool:{"state": "have"}'; echo 'nodepool:%s'; cat > /dev/null"""
    ssh(answers % '{"state": "busy", "text": "np1, np2"}')
    with pytest.raises(LinkBusy, match="np1, np2"):
        link.remove()
    ssh(answers % '{"state": "failed", "text": "it belongs to another"}')
    with pytest.raises(LinkError, match="it belongs to another"):
        link.remove()
    ssh(answers % '{"state": "removed"}')
    link.remove()
    assert not list(tmp_path.glob(f"{TARGET.owner}.*"))


def test_machine_that_does_not_answer_in_time_is_left(
    tmp_path: pathlib.Path, ssh: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.driver.nodemanager.pushed.ssh_link.REMOVE_TIMEOUT", 0.2)
    ssh("""echo 'nodepool:{"state": "have"}'; cat > /dev/null""")
    with pytest.raises(LinkError, match="no answer in time"):
        Scene(tmp_path).link.remove()

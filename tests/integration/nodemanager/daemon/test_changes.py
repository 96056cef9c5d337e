"""Slivers that run although what their record says cannot be brought about inside."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from nodepool.driver.nodemanager.adapter import NOT_RUNNING
from tests.conftest import wait_for
from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="native slivers need root"),
]


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


def another_key(tmp_path: pathlib.Path) -> str:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "another")],
        check=True,
        timeout=30,
    )
    return (tmp_path / "another.pub").read_text()


@pytest.mark.spec(
    "issue 10, F16: a job that makes ~/.ssh a link does not end its sliver at the next change of "
    "keys or restart"
)
def test_keys_that_cannot_be_written(nm: NmDaemon, tmp_path: pathlib.Path) -> None:
    nm.put("alpha")
    session = nm.session("alpha")
    nm.ssh("alpha", "mv .ssh kept && ln -s kept .ssh")
    keys = nm.key.with_suffix(".pub").read_text() + another_key(tmp_path)
    nm.put("alpha", wait=False, ssh_keys=keys)
    wait_for(lambda: nm.client.call("GetRecord", "alpha")["error"], what="the reason")
    found = nm.client.call("GetRecord", "alpha")
    assert found["state"] == "ready" and found["state"] not in NOT_RUNNING
    assert ".ssh" in found["error"] and "link" in found["error"]
    # WaitSliver, and thus launchers, see that it runs; so do its users.
    assert nm.wait("alpha")["error"] == found["error"]
    assert nm.ssh("alpha", "echo in") == "in\n"
    assert session.communicate("hello\n", timeout=20)[0] == "got hello\n"
    # It starts again with the keys that it has, and says what is wrong.
    nm.client.call("Stop", "alpha")
    nm.wait("alpha", "stopped")
    nm.client.call("Start", "alpha")
    assert "link" in nm.wait("alpha")["error"]
    assert nm.ssh("alpha", "echo again") == "again\n"
    # After a restart of the daemon, too; with the next change all is well.
    nm.stop()
    nm.start()
    wait_for(
        lambda: "link" in nm.client.call("GetRecord", "alpha")["error"],
        what="the reason after the restart",
    )
    nm.ssh("alpha", "rm .ssh && mv kept .ssh")
    nm.client.call("Start", "alpha")
    wait_for(
        lambda: not nm.client.call("GetRecord", "alpha")["error"], what="the keys to be written"
    )
    assert len(nm.ssh("alpha", "cat .ssh/authorized_keys").splitlines()) == 2


@pytest.mark.spec("issue 10, F16: texts chosen inside do not reach terminals and logs as they are")
def test_names_with_control_characters(nm: NmDaemon) -> None:
    nm.put("alpha")
    # A directory where a file is to be written; its name is reported as it is to the log, the
    # record and the table.
    nm.ssh(
        "alpha",
        "rm -rf /etc/rc.vinit; mkdir /etc/rc.vinit; rm -rf .ssh; "
        "home=$(printf '/root/a\\033[2Jb\\233c\\nforged: line'); mkdir -p \"$home\"; : > "
        '"$home/.ssh"; '
        "printf 'root:x:0:0:root:%s:/bin/sh\\n' \"$(printf '/root/a\\033[2Jb\\302\\233c')\" > "
        "/etc/passwd; "
        'mkdir -p "$(printf \'/root/a\\033[2Jb\\302\\233c\')"; : > "$(printf '
        "'/root/a\\033[2Jb\\302\\233c/.ssh')\"",
    )
    nm.put("alpha", wait=False, ssh_keys="")
    wait_for(lambda: nm.client.call("GetRecord", "alpha")["error"], what="the reason")
    error = nm.client.call("GetRecord", "alpha")["error"]
    assert "a\ufffd[2Jb\ufffdc" in error
    for text in (error, nm.log):
        assert "\x1b" not in text and "\x9b" not in text

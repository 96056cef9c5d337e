"""The node manager pushed to an account without any right (NM-C.2, NM-C.8)."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from nodepool.driver.nodemanager.pushed import zipapp
from nodepool.driver.nodemanager.pushed.ssh_link import remote_command
from nodepool.nodemanager.client.rpc import Client
from tests.conftest import wait_for
from tests.support.nodemanager import user
from tests.support.ports import reserve

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that nobody else is"),
]


@pytest.fixture
def home() -> Iterator[pathlib.Path]:
    directory = pathlib.Path(tempfile.mkdtemp(prefix="np-u-", dir="/tmp"))
    directory.chmod(0o755)
    yield user.make_home(directory)
    wait_for(lambda: not user.processes(), 10, "the user's last process to end")
    shutil.rmtree(directory)


def run(home: pathlib.Path, action: str) -> tuple[list[dict[str, object]], subprocess.Popen[bytes]]:
    """What a launcher would have run there; the answers."""
    code, loader = zipapp.build(), zipapp.LOADER.encode()
    process = subprocess.Popen(
        user.command(home, "sh", "-c", remote_command(sys.executable)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    head = {"sha256": code.digest, "size": len(code.content), "base": None}
    process.stdin.write(b"%d\n%s%s\n" % (len(loader), loader, json.dumps(head).encode()))
    process.stdin.flush()
    answers = [json.loads(process.stdout.readline().removeprefix(b"nodepool:"))]
    first = reserve(60)
    job = {
        "action": action,
        "owner": "0000000001",
        "since": 1.0,
        "place": "p",
        "address": "127.0.0.1",
        "idle": 3600,
        "config": {"ssh": {"ports": f"{first}-{first + 59}"}},
    }
    process.stdin.write(
        (code.content if answers[0]["state"] == "send" else b"") + json.dumps(job).encode() + b"\n"
    )
    process.stdin.flush()
    answers.append(json.loads(process.stdout.readline().removeprefix(b"nodepool:")))
    return answers, process


@pytest.mark.spec("NM-C.8: without root on the backing node slivers are rootless")
def test_pushed_to_an_ordinary_user(home: pathlib.Path) -> None:
    answers, process = run(home, "hold")
    assert answers[0] == {"state": "send"}
    base = home / ".local/state/nodepool-backing"
    assert answers[1] == {
        "state": "ready",
        "socket": f"{base}/p/run/nodemanager.api",
        "root": False,
    }
    client = Client(f"unix:{base}/p/run/nodemanager.api")
    assert client.call("GetCapacity")["backend"] == "rootless"
    client.call("PutRecord", {"account_type": "sliver", "name": "a1", "username": "zuul"})
    assert client.call("WaitSliver", "a1", "ready", 20, timeout=25)["state"] == "ready"
    process.communicate(timeout=20)
    client.call("DeleteSliver", "a1")
    assert client.call("WaitSliver", "a1", "gone", 20, timeout=25)["state"] == "absent"
    answers, process = run(home, "remove")
    assert answers == [{"state": "have"}, {"state": "removed"}]
    process.communicate(timeout=20)
    assert not base.exists()

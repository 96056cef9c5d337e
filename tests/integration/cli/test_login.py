"""``nodepool ssh`` logs in to a real sshd with the data of the node's record only."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError
from nodepool.zk.records import Node
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot
from tests.support.sshd import SSHServer, ssh_server

Make = Callable[..., str]


@pytest.fixture(scope="module")
def sshd() -> Iterator[SSHServer]:
    with ssh_server(kinds=["ed25519"]) as server:
        yield server


@pytest.fixture
def file(zk_chroot: Chroot) -> str:
    return zk_chroot.config({"labels": [], "providers": []})


@pytest.fixture
def make(zk_chroot: Chroot, sshd: SSHServer) -> Make:
    """Store a node that the sshd serves, with these changes; return its id."""
    zk = ZooKeeper(zk_chroot.connect(), enable_cache=False)

    def make(**changes: Any) -> str:
        node = Node()
        good = {
            "state": "in-use",
            "type": ["small"],
            "provider": "rack",
            "pool": "main",
            "connection_type": "ssh",
            "interface_ip": "127.0.0.1",
            "connection_port": sshd.port,
            "username": "root",
            "host_keys": list(sshd.host_keys),
        }
        for name, value in {**good, **changes}.items():
            setattr(node, name, value)
        zk.storeNode(node)
        return str(node.id)

    return make


@pytest.fixture(autouse=True)
def temporary(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_command_runs_on_the_node_and_its_status_is_returned(
    file: str,
    make: Make,
    sshd: SSHServer,
    temporary: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = ["-c", file, "ssh", "-i", str(sshd.client_key), make().lstrip("0") or "0"]
    assert nodepoolcmd.main([*argv, "--", "echo", "well", "-n"]) == 0
    assert capfd.readouterr().out == "well -n\n"
    assert nodepoolcmd.main([*argv, "--", "exit 7"]) == 7
    assert list(temporary.iterdir()) == [], "the file with the host keys is removed"


def test_machine_with_other_host_keys_is_refused(
    file: str, make: Make, sshd: SSHServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with ssh_server(kinds=["ed25519", "rsa"]) as other:
        (key,) = [key for key in other.host_keys if key.startswith("ssh-rsa")]
    argv = ["-c", file, "ssh", "-i", str(sshd.client_key), make(host_keys=[key])]
    assert nodepoolcmd.main([*argv, "--", "echo", "well"]) == 255
    captured = capfd.readouterr()
    assert "well" not in captured.out and "verification failed" in captured.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"state": "building", "interface_ip": None},
            "has no address yet: it is being launched; see `nodepool explain",
        ),
        ({"state": "deleting"}, "is deleting: its machine is being deleted"),
        ({"state": "failed"}, "is failed: its machine is being deleted"),
        ({"connection_type": "winrm"}, "is used by winrm, not by SSH"),
        ({"connection_type": "kubectl"}, "is used by kubectl, not by SSH"),
        ({"connection_port": {"token": "secret"}}, "has no SSH port"),
        ({"host_keys": []}, "has no host keys; see the option `host-key-checking` of its pool"),
        ({"host_keys": ["damaged\nkey"]}, "has no host keys"),
        ({"interface_ip": "-oProxyCommand=true"}, "has no usable address or user name"),
    ],
)
def test_node_that_cannot_be_reached_is_refused_with_the_reason(
    file: str, make: Make, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CommandError) as caught:
        nodepoolcmd.main(["-c", file, "ssh", make(**changes), "--", "true"])
    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_unknown_node_is_refused(file: str) -> None:
    with pytest.raises(CommandError, match="Node 77 not found"):
        nodepoolcmd.main(["-c", file, "ssh", "77"])

"""A ZooKeeper whose access control lists permit only reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.security import OPEN_ACL_UNSAFE, make_acl

from nodepool.cmd import nodepoolcmd
from nodepool.exceptions import NOT_PERMITTED
from nodepool.process.program import run_console
from nodepool.web.http import as_answer
from nodepool.zk.records import READY, Node
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot, wait_for
from tests.support.launcher import LauncherBench, config, provider


def permit(kazoo: Any, path: str, acls: Any) -> None:
    for name in kazoo.get_children(path):
        permit(kazoo, f"{path}/{name}", acls)
    kazoo.set_acls(path, acls)


@pytest.fixture
def read_only(zk_chroot: Chroot) -> Iterator[Any]:
    """A facade for a tree with one node that may not be changed."""
    zk = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    kazoo = zk.kazoo_client
    node = Node()
    node.state, node.type, node.provider = READY, ["fake-label"], "cloud"
    zk.storeNode(node)
    permit(kazoo, "/nodepool", [make_acl("world", "anyone", read=True, admin=True)])
    yield zk
    permit(kazoo, "/nodepool", OPEN_ACL_UNSAFE)


@pytest.mark.parametrize(
    "words",
    [
        ("hold", "0000000000"),
        ("delete", "0000000000"),
        ("token", "create", "ci", "--role", "borrow"),
    ],
)
def test_refused_command_names_what_to_permit(
    zk_chroot: Chroot, read_only: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    path = zk_chroot.config({"labels": [{"name": "fake-label"}], "providers": []})
    assert nodepoolcmd.main(["-c", path, "list"]) == 0
    assert run_console("nodepool", lambda: nodepoolcmd.main(["-c", path, *words]), False) == 1
    assert NOT_PERMITTED in capsys.readouterr().err


def test_launcher_that_may_not_write_names_the_cause_without_a_traceback(
    bench: LauncherBench, read_only: Any, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = bench.make(config(provider(labels=["fake-label"])))
    launcher.start()
    wait_for(lambda: f"The launcher cannot proceed: {NOT_PERMITTED}" in caplog.text)
    launcher.stop()
    assert "Traceback" not in caplog.text


def test_call_that_zookeeper_refuses_is_not_answered_as_an_outage(read_only: Any) -> None:
    with pytest.raises(Exception) as refused:
        read_only.kazoo_client.create("/nodepool/x")
    assert as_answer(refused.value, "/", is_call=True).text == NOT_PERMITTED

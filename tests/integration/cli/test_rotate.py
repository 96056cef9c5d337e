"""``nodepool rotate``."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError
from nodepool.zk.rotations import Rotation
from tests.conftest import wait_for
from tests.integration.cli.test_observe import Shell
from tests.support.launcher import LauncherBench, config, provider

LABEL = ("label", "fake-label")
FREE: dict[str, Any] = {"state": "ready", "allocated_to": None}


@pytest.fixture
def shell(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> Shell:
    given = config(provider(), labels={"fake-label": {"min-ready": 2}})
    bench.start(given)
    wait_for(bench.zk.readReports)
    bench.wait_nodes(2, **FREE)
    return Shell(bench.config(given), capsys)


def test_rotation_replaces_the_idle_nodes_and_ends(shell: Shell, bench: LauncherBench) -> None:
    before = {node.id for node in bench.nodes()}
    said = shell("rotate", *LABEL, "--wait", "--reason", "new flavor")
    assert said.startswith("label fake-label: idle nodes are replaced. Nodes left: ")
    assert "the rotation of label fake-label has ended" in said
    after = {node.id for node in bench.wait_nodes(2, **FREE)}
    assert not before & after
    assert shell.json("rotate", "list", "--format", "json") == []
    wait_for(lambda: "rotation of label fake-label: new flavor" in shell("events"))


def test_rotation_is_explained_listed_and_canceled(shell: Shell, bench: LauncherBench) -> None:
    bench.cloud("fake-provider").pause_creates = True
    shell("rotate", *LABEL, "--reason", "new flavor")
    (left,) = bench.wait_nodes(1, **FREE)
    (row,) = shell.json("rotate", "list", "--format", "json")
    assert (row["kind"], row["name"], row["reason"], row["nodes"]) == (*LABEL, "new flavor", 1)
    assert "free; it is replaced: rotation of label fake-label: new flavor" in shell(
        "explain", "node", left.id
    )
    assert "its idle nodes are kept" in shell("rotate", "cancel", *LABEL)
    bench.resume_creates("fake-provider")
    assert left.id in {node.id for node in bench.wait_nodes(2, **FREE)}
    assert shell("explain", "node", left.id).count("replaced") == 0


def test_second_operator_is_informed_about_the_first(shell: Shell, bench: LauncherBench) -> None:
    bench.cloud("fake-provider").pause_creates = True
    shell("rotate", *LABEL)
    (first,) = bench.zk.readNotes(Rotation)
    assert nodepoolcmd.main(["-c", shell.path, "rotate", *LABEL]) == 0
    assert f"{first.by} was already rotating label fake-label" in shell.capsys.readouterr().err
    (second,) = bench.zk.readNotes(Rotation)
    assert second.zxid > first.zxid > 0
    bench.resume_creates("fake-provider")
    wait_for(lambda: not bench.zk.readNotes(Rotation), 60)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["rotate", "label", "fake-lable"], "did you mean fake-label"),
        (["rotate", "cancel", *LABEL], "there is no rotation of label fake-label"),
    ],
)
def test_unknown_names_are_refused(shell: Shell, arguments: list[str], text: str) -> None:
    with pytest.raises(CommandError, match=text):
        shell(*arguments)

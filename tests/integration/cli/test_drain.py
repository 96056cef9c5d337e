"""``nodepool drain`` and ``undrain``."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.base import hostnames
from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands import drain
from nodepool.cmd.commands.context import CommandError
from nodepool.zk.drains import Drain
from nodepool.zk.history import HistoryReader
from nodepool.zk.mirror import notes
from tests.conftest import wait_for
from tests.integration.cli.test_observe import Shell
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench, config, provider

#: The pool of the fake provider.
POOL = ("pool", "fake-provider-main")


@pytest.fixture
def shell(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> Shell:
    given = config(provider())
    launcher = bench.start(given)
    wait_for(lambda: bench.zk.readReports() and launcher.ready)
    return Shell(bench.config(given), capsys)


def test_drain_waits_for_the_last_node(shell: Shell, bench: LauncherBench) -> None:
    request, _nodes = bench.fulfilled("fake-label")
    (node,) = bench.zuul.accept(request)
    ended: list[int] = []

    def run() -> None:
        arguments = ["drain", *POOL, "--wait", "--reason", "new disks"]
        ended.append(nodepoolcmd.main(["-c", shell.path, *arguments]))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: bench.zk.readNotes(Drain))
        request = bench.submit("fake-label")
        wait_for(
            lambda: (
                "pool fake-provider-main is drained: new disks"
                in shell("explain", "request", request)
            )
        )
        assert not ended
    finally:
        bench.zuul.give_back(node)
        thread.join(limit(30))
    assert ended == [0]
    (row,) = shell.json("drain", "list", "--format", "json")
    assert (row["kind"], row["name"], row["reason"], row["nodes"]) == (*POOL, "new disks", 0)
    assert "pool fake-provider-main is drained" in shell("problem-list")
    assert "is used again" in shell("undrain", *POOL)
    bench.wait_request(request, "fulfilled")
    assert "pool fake-provider-main is drained" not in shell("problem-list")


@pytest.mark.parametrize(
    "what",
    [("provider", "fake-provider"), POOL, ("label", "fake-label"), ("launcher", hostnames.short())],
)
def test_drained_pool_names_the_drain_instead_of_a_limit(
    shell: Shell, what: tuple[str, str]
) -> None:
    shell("drain", *what, "--reason", "new disks")
    shown = f"{' '.join(what)} is drained: new disks"
    answer, suggestion, *others = shell("explain", "provider", "fake-provider").splitlines()
    assert answer == f"provider fake-provider: runs: {shown}"
    assert suggestion == f"  suggestion: `nodepool undrain {' '.join(what)}` ends it"
    (pool,) = [line for line in others if line.startswith("  fake-provider-main on ")]
    assert pool.endswith(f": {shown}")
    assert f": {shown}\n" in shell("explain", "label", "fake-label").partition("  nodes: ")[2]
    (row,) = shell.json("pools", "--format", "json")
    assert row["full"] == shown
    shell("undrain", *what)
    assert shown not in shell("explain", "provider", "fake-provider")


def test_idle_node_that_is_kept_is_explained_by_the_drain(
    shell: Shell, bench: LauncherBench
) -> None:
    request, (node,) = bench.fulfilled("fake-label")
    shell("drain", *POOL, "--keep-idle", "--reason", "new disks")
    shown = "pool fake-provider-main is drained: new disks"
    assert shown not in shell("explain", "node", node.id)
    bench.zuul.cancel(request)
    wait_for(lambda: bench.node(node.id).allocated_to is None)
    answer, suggestion = shell("explain", "node", node.id).splitlines()[:2]
    assert answer == f"node {node.id}: free: {shown}"
    assert suggestion == "  suggestion: `nodepool undrain pool fake-provider-main` ends it"


def test_drained_image_is_explained_by_the_drain(shell: Shell, bench: LauncherBench) -> None:
    bench.store_image("some-image", "fake-provider")
    notes.write(bench.zk.kazoo_client, Drain("image", "some-image", 0.0, "no network"))
    answer, suggestion = shell("explain", "image", "some-image").splitlines()[:2]
    shown = "image some-image is drained: no network"
    assert answer == f"image some-image: 1 upload can be used: {shown}"
    assert suggestion == "  suggestion: `nodepool undrain image some-image` ends it"


def test_second_drain_names_the_first_operator(shell: Shell, bench: LauncherBench) -> None:
    shell("drain", *POOL, "--reason", "disks")
    (first,) = bench.zk.readNotes(Drain)
    arguments = ["drain", *POOL, "--until", "2h", "--keep-idle"]
    assert nodepoolcmd.main(["-c", shell.path, *arguments]) == 0
    said = shell.capsys.readouterr().err
    (second,) = bench.zk.readNotes(Drain)
    assert (second.since, second.keep_idle) == (first.since, True)
    assert second.until > first.since
    assert f"already drained by {first.by}: disks; this is replaced" in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["drain", "pool", "fake-provider-mian"], "did you mean fake-provider-main"),
        (["drain", "host", "nowhere"], "no running launcher has host nowhere; known: none"),
        (["undrain", *POOL], "is not drained; see `nodepool drain list`"),
    ],
)
def test_unknown_names_are_refused(shell: Shell, arguments: list[str], text: str) -> None:
    with pytest.raises(CommandError, match=text.replace("(", "\\(")):
        shell(*arguments)


@pytest.mark.parametrize("text", ["yesterday", "2020-01-01T08:00", "-1h", "1e400"])
def test_time_must_be_in_the_future(
    shell: Shell, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        shell("drain", *POOL, f"--until={text}")
    assert "must be a time such as 90m" in capsys.readouterr().err


def test_end_of_a_drain_is_in_the_audit_log_with_its_kind(
    shell: Shell, bench: LauncherBench
) -> None:
    shell("drain", *POOL)
    shell("undrain", *POOL)
    events = HistoryReader().read_all(bench.zk.kazoo_client, 0.0)
    found = [(event["action"], event["target"]) for event in events if "action" in event]
    name = " ".join(POOL)
    assert found == [("drain pool", name), ("undrain", name)]


def test_drain_continues_waiting_while_the_connection_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a complete mirror nodes cannot be counted."""
    states = [False, True]

    class Zk:
        node_tree = SimpleNamespace(listeners=[])
        note_tree = SimpleNamespace(listeners=[])
        synced = property(lambda _zk: states[0])

    def left(zk: Any) -> None:
        assert zk.synced

    def wait(_event: threading.Event, _seconds: float) -> bool:
        return states.pop(0)

    monkeypatch.setattr(threading.Event, "wait", wait)
    context: Any = SimpleNamespace(live=Zk())
    drain.wait(context, "pool a-b", left)
    assert states == [True]

"""``nodepool status``, ``explain``, ``events``, filters and tables that fit."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support import manual
from tests.support.launcher import LauncherBench, config, provider


class Shell:
    def __init__(self, path: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys = path, capsys

    def __call__(self, *arguments: str) -> str:
        self.capsys.readouterr()
        assert nodepoolcmd.main(["-c", self.path, *arguments]) == 0
        return self.capsys.readouterr().out

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments))


@pytest.fixture
def shell(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> Shell:
    bench.quota(instances=2)
    given = config(provider(labels=["fake-label", "other-label"]))
    bench.start(given)
    return Shell(bench.config(given), capsys)


@pytest.mark.spec(
    "issue: explain request: candidates, the one reason that stops each, how old, what would help, "
    "place in line"
)
def test_explain_a_waiting_request(shell: Shell, bench: LauncherBench) -> None:
    bench.fulfilled("fake-label")
    bench.fulfilled("fake-label")
    first, second = bench.submit("fake-label"), bench.submit("fake-label")
    wait_for(
        lambda: "instances: 1 needed, 0 of 2 left" in shell("explain", "request", first),
        30,
        "the reason is told",
    )
    found = shell.json("explain", "request", first, "--json")
    (candidate,) = [each for each in found["candidates"] if "needed" in each["verdict"]]
    assert (
        candidate["name"].startswith("fake-provider-main on ")
        and "raise" in candidate["help"]
        and candidate["age"] >= 0
    )
    assert found["facts"]["queue position"] == "1"
    assert shell.json("explain", "request", second, "--json")["facts"]["queue position"] == "2"
    waiting = shell.json("status", "--json")["waiting_requests"]
    assert {i for group in waiting for i in group["ids"]} == {first, second}
    assert all(candidate["verdict"] in group["reason"] for group in waiting)
    text = shell("status")
    assert (
        text.startswith("Health: ")
        and "  2 requests waiting up to " in text
        and waiting[0]["cause"] in text
    )
    assert f"    ids: {first}, {second}\n" in text and "instances 2 of 2" in text
    assert text.startswith(f"Health: {shell.json('status', '--json')['health']['word']}")


@pytest.mark.spec(
    "issue: explain request: failed ones tell why; other kinds; what is unknown is an error"
)
def test_explain_names_the_job_of_a_request(shell: Shell, bench: LauncherBench) -> None:
    request = bench.submit("nowhere")
    bench.wait_request(request, "failed")
    text = shell("explain", request)
    assert "\n  job: j\n  " in text and "pipeline: check\n" in text and "buildset: bs\n" in text


def test_explain_covers_all_types_of_objects(shell: Shell, bench: LauncherBench) -> None:
    request_id = bench.submit("nosuch")
    bench.wait_request(request_id, "failed")
    assert "nosuch" in shell("explain", "request", request_id).splitlines()[0]
    served, (node,) = bench.fulfilled("other-label")
    text = shell("explain", "node", node.id.lstrip("0") or "0")
    assert text.startswith(f"node {node.id}: given to a request") and f"request: {served}" in text
    assert "1 ready" in shell("explain", "label", "other-label")
    text = shell("explain", "provider", "fake-provider")
    assert text.startswith("provider fake-provider: runs") and "call rate: " in text
    bench.store_image("some-image", "fake-provider")
    assert "1 upload can be used" in shell("explain", "image", "some-image")
    for kind in ("request", "label", "node", "image", "provider"):
        with pytest.raises(CommandError, match=f"{kind} nosuch-thing is not known"):
            shell("explain", kind, "nosuch-thing")
    # Without a kind: by id, with a note if several have the name, and options between.
    assert shell("explain", node.id.lstrip("0") or "0").startswith(
        f"node {node.id}: given to a request"
    )
    assert (
        shell.json("explain", "request", "--json", request_id)["answer"]
        == shell.json("explain", request_id, "--json")["answer"]
    )
    bench.store_image("other-label", "fake-provider")
    label, image = shell("explain", "other-label").split("\n\n")
    assert label.startswith("label other-label: ") and image.startswith("image other-label: ")
    with pytest.raises(
        CommandError,
        match=r"other-label has several meanings \(label, image\); name one: `nodepool explain "
        r"label",
    ):
        shell("explain", "other-label", "--json")
    with pytest.raises(CommandError, match="nosuch-thing is not known: it is neither"):
        shell("explain", "nosuch-thing")


def _shape(text: str) -> list[str]:
    """Return the fixed words at the beginning of the lines, up to the table of daemons."""
    lines = text.partition("Launchers and builders:")[0].strip().splitlines()
    return [re.sub(r"\d+", "N", line).partition(":")[0].partition(" up to ")[0] for line in lines]


def test_sample_of_status_in_the_manual_has_the_lines_of_the_program(
    shell: Shell, bench: LauncherBench
) -> None:
    bench.fulfilled("fake-label")
    bench.fulfilled("fake-label")
    for _ in range(4):
        bench.submit("fake-label")
    wait_for(
        lambda: "(+1 more)" in shell("status") and "2 of 2 instances in use" in shell("status"),
        30,
        "the cause of all",
    )
    sample = manual.page("observe").partition("$ nodepool status\n")[2].partition("\n    ...")[0]
    assert _shape(shell("status")) == _shape(textwrap.dedent(sample))


@pytest.mark.spec("issue: nodepool hosts, tenants, pools: tables in all formats, with filters")
def test_pools_and_tenants_are_listed(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        **config(provider(labels=["fake-label", "other-label"])),
        "tenant-resource-limits": [{"tenant-name": "acme", "max-servers": 3}],
    }
    bench.start(given)
    shell = Shell(bench.config(given), capsys)
    wait_for(lambda: shell.json("pools", "--format", "json"), 30, "the pool is registered")
    (pool,) = shell.json("pools", "--format", "json", "--provider", "fake-provider")
    assert (pool["pool"], pool["labels"], pool["nodes"]) == (
        "main",
        ["fake-label", "other-label"],
        0,
    )
    assert shell.json("pools", "--format", "json", "--provider", "nosuch") == []
    assert shell("pools", "--format", "csv").splitlines()[1].startswith("fake-provider,main,")
    assert "fake-provider" in shell("pools") and "- provider: fake-provider" in shell(
        "pools", "--format", "yaml"
    )
    assert shell("hosts", "--format", "csv") == "host,provider,launcher,state,used,nodes,problem\n"
    wait_for(
        lambda: "instances 0 of 3" in shell("tenants", "--tenant", "acme"),
        30,
        "the tenant is reported",
    )
    assert "acme" not in shell("tenants", "--tenant", "nosuch")


@pytest.mark.spec(
    "issue: success rate, launch and waiting time over the last hours: also those before a restart "
    "of the launcher"
)
def test_charts_after_a_restart(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.statistics.RECALL_AFTER", 0.0)
    pool = bench.start(config(provider()))
    wait_for(lambda: pool.statistics.elected, what="elected")
    bench.fulfilled("fake-label")
    wait_for(
        lambda: sum(row["ready"] for row in pool.trends.chart()) == 1,
        what="the launch in the chart",
    )
    wait_for(
        lambda: any(e.get("state") == "fulfilled" for e in pool.feed.since(0)[0]),
        what="the end of the request",
    )
    bench.stop(pool)
    after = bench.start(config(provider()))
    wait_for(
        lambda: sum(row["ready"] for row in after.trends.chart()) == 1,
        what="the launch in the chart",
    )
    (row,) = [row for row in after.trends.chart() if row["ready"]]
    assert row["launch"] > 0 and row["wait"] > 0
    assert after.trends.labels()["fake-label"]["launch"] > 0


@pytest.mark.spec(
    "issue: history: asked, accepted, create call, boot, scan, handed over, used, deleted; also "
    "when it is gone"
)
def test_history_shows_the_whole_life_of_a_deleted_object(
    shell: Shell, bench: LauncherBench
) -> None:
    request_id, (node,) = bench.fulfilled("fake-label", tenant_name="acme")
    pool = bench.pools[0]
    bench.zuul.accept(request_id)
    # What is written twice before it is read is seen once.
    wait_for(
        lambda: any(e.get("state") == "in-use" for e in pool.feed.since(0)[0]),
        what="it is seen in use",
    )
    bench.zuul.give_back(node.id)
    bench.wait_gone(node.id)
    wait_for(lambda: pool.statistics.elected, what="elected")
    wait_for(
        lambda: any(e["type"] == "node-removed" for e in pool.feed.since(0)[0]),
        what="the last event",
    )
    pool.history.flush(pool.zk.kazoo_client, True, at_once=True)
    found = shell.json("explain", "node", node.id, "--json")
    assert re.fullmatch(r"deleted \d+ s ago", found["answer"]) and found["gone"] is True
    facts = {
        key: found["facts"].get(key)
        for key in ("labels", "request", "tenant", "project", "job", "buildset")
    }
    assert facts == {
        "labels": "fake-label",
        "request": request_id,
        "tenant": "acme",
        "project": "p",
        "job": "j",
        "buildset": "bs",
    }
    assert "in-use (was ready) (tenant acme, project p)" in " ".join(
        event["text"] for event in found["history"]
    )
    served = shell.json("explain", "request", request_id, "--json")
    assert re.fullmatch(r"served: its requestor accepted the nodes \d+ s ago", served["answer"])
    assert (served["facts"]["nodes"], served["facts"]["job"]) == (node.id, "j")
    told = [
        (event["type"], event.get("state") or event.get("step", "")[:9])
        for event in found["history"]
    ]
    for each in (
        ("node-created", "init"),
        ("node-changed", "building"),
        ("node-step", "attempt 1"),
        ("node-step", "server is"),
        ("node-changed", "ready"),
        ("node-changed", "in-use"),
        ("node-changed", "used"),
        ("node-changed", "deleting"),
        ("node-removed", ""),
    ):
        assert each in told, told
    times = [event["time"] for event in found["history"]]
    assert times == sorted(times)
    asked = shell.json("explain", "request", request_id, "--json")["history"]
    assert [event["type"] for event in asked if event["type"].startswith("request")] == [
        "request-submitted",
        "request-changed",
        "request-changed",
        "request-removed",
    ]
    assert re.match(
        rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {time.strftime('%Z')}  ",
        shell("events", "--node", node.id),
    )
    lines = [
        json.loads(line)
        for line in shell(
            "events", "--json", "--node", node.id, "--type", "node-changed"
        ).splitlines()
    ]
    assert [line["state"] for line in lines] == ["building", "ready", "in-use", "used", "deleting"]


@pytest.mark.spec("issue: lists have filters and fit a terminal; piped output as in 11.0.0")
def test_filters_and_width(
    shell: Shell, bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fulfilled("fake-label")
    _, (other,) = bench.fulfilled("other-label")
    assert [
        row["id"] for row in shell.json("list", "--label", "other-label", "--format", "json")
    ] == [other.id]
    assert shell.json("list", "--state", "used", "--format", "json") == []
    assert (
        len(
            shell.json(
                "list", "--state", "used,ready", "--provider", "fake-provider", "--format", "json"
            )
        )
        == 2
    )
    with pytest.raises(CommandError, match="there is no state foo; known are aborted, "):
        shell("--strict", "list", "--state", "foo")
    assert (
        len(
            shell.json(
                "list",
                "--state",
                "used",
                "--state",
                "ready",
                "--provider",
                "fake-provider",
                "--format",
                "json",
            )
        )
        == 2
    )
    (request,) = shell.json("request-list", "--label", "other-label", "--format", "json")
    assert request["node_types"] == ["other-label"]
    piped = shell("list").splitlines()
    assert [cell.strip() for cell in piped[1].strip("|").split("|")] == [
        "ID",
        "Provider",
        "Label",
        "Server ID",
        "Public IPv4",
        "IPv6",
        "State",
        "Age",
        "Locked",
    ]
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for arguments in (["list"], ["request-list"], ["status"]):
        assert max(map(len, shell(*arguments).splitlines())) <= 60, arguments
    assert "Server ID" in shell("list", "-o", "wide")


@pytest.mark.spec(
    "issue: events --follow --json, list --watch and top: from ZooKeeper, until interrupted"
)
@pytest.mark.parametrize(
    "arguments",
    [["events", "--follow", "--json"], ["list", "--watch", "--format", "json"], ["top"]],
)
def test_followed_listings_end_when_interrupted(
    shell: Shell, bench: LauncherBench, arguments: list[str], tmp_path: pathlib.Path
) -> None:
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "nodepool.cmd.nodepoolcmd", "-c", shell.path, *arguments],
            stdout=file,
            stderr=subprocess.DEVNULL,
        )
    try:
        # Until it has begun to follow, and then until what came later is printed.
        wait_for(
            lambda: bench.ready_node("fake-provider", "main", "fake-label") and output.read_text(),
            30,
            "the first word",
        )
        node = bench.ready_node("fake-provider", "main", "other-label")
        told = node.id if arguments[0] != "top" else f"{len(bench.nodes())} ready"
        wait_for(lambda: told in output.read_text(), 30, "what has changed")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()


@pytest.mark.spec("issue: nodepool top: live, on a terminal, as wide as that is")
@pytest.mark.parametrize(("lines", "end"), [(40, "q"), (6, "INT")])
def test_top_on_a_terminal(shell: Shell, bench: LauncherBench, lines: int, end: str) -> None:
    bench.ready_node("fake-provider", "main", "fake-label")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (lines, 80))
    process = subprocess.Popen(
        [sys.executable, "-m", "nodepool.cmd.nodepoolcmd", "-c", shell.path, "top"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        | {"TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(theirs)
    read: list[str] = []

    def listen() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(ours, 65536):
                read.append(data.decode())

    def plain() -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(read))

    reader = threading.Thread(target=listen, name="terminal", daemon=True)
    reader.start()
    try:
        wait_for(lambda: "Nodes: 1 (1 ready)" in plain(), 30, "the first picture")
        bench.ready_node("fake-provider", "main", "fake-label")
        wait_for(
            lambda: "Nodes: 2 (2 ready)" in plain(), 30, "another one, as something has changed"
        )
        if end == "q":
            os.write(ours, b"q")
            assert process.wait(30) == 0
        else:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        os.close(ours)
    whole = plain()
    (text, after) = whole.partition("\x1b[?1049h")[2].split("\x1b[?1049l")
    assert "Nodes:" not in after, "the terminal has its content again"
    first = next(each for each in text.split("\x1b[H") if "Nodes: 1" in each)
    shown = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", each).rstrip() for each in first.splitlines()]
    assert len(shown) <= lines and max(map(len, shown)) <= 80, shown
    assert lines == 6 or "Problems: none" in first
    assert (f"lines 1-{lines - 1} of " in text) is (lines == 6), shown


def test_samples_of_the_tutorial_have_the_lines_of_the_program(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers, the login and what is shortened apart."""
    text = (REPOSITORY / "doc" / "tutorial.rst").read_text()
    bench.quota(instances=1)
    given = config(provider("here", labels=["host"], driver="fake"))
    pool = bench.start(given)
    wait_for(lambda: pool.statistics.elected, what="elected")
    shell = Shell(bench.config(given), capsys)

    def shape(line: str) -> str:
        return re.sub(r"\S+@\S+ port \S+|\d[\d.]*", "N", line).strip()

    def sample(command: str) -> list[str]:
        found = (
            list(itertools.takewhile(lambda line: re.match(r" {4}[^$]", line), after.splitlines()))
            for after in text.split(f"    $ np {command}\n")[1:]
        )
        lines = next(filter(None, found))
        return [shape(line) for line in lines if line.strip() != "..."]

    def compare(command: str, printed: str) -> None:
        lines = [shape(line) for line in printed.splitlines()]
        for expected in sample(command):
            assert any(line.startswith(expected.removesuffix("...")) for line in lines), (
                expected,
                printed,
            )

    wait_for(lambda: "No problems" in shell("status"), what="the first pass")
    compare("status", shell("status"))
    compare(
        "lease host --for 1h --purpose tutorial",
        shell("lease", "host", "--for", "1h", "--purpose", "tutorial"),
    )
    (node,) = bench.nodes()
    shell("lease", "return")
    bench.wait_gone(node.id)
    wait_for(
        lambda: any(event["type"] == "node-removed" for event in pool.feed.since(0)[0]),
        what="the last event",
    )
    pool.history.flush(pool.zk.kazoo_client, True, at_once=True)
    compare("explain node 4", shell("explain", "node", node.id))
    bench.fulfilled("host", requestor="nodepool-cli")
    second, third = (
        bench.submit("host", requestor="nodepool-cli", priority="100") for _number in range(2)
    )
    wait_for(
        lambda: f"{second} comes first, which waits" in shell("explain", "request", third),
        30,
        "the reason",
    )
    lines = [
        line
        for line in sample("explain request 100-0000000009")
        if not line.startswith("estimated wait")
    ]
    printed = [shape(line) for line in shell("explain", "request", third).splitlines()]
    assert [
        line
        for line in lines
        if not any(one.startswith(line.removesuffix("...")) for one in printed)
    ] == []

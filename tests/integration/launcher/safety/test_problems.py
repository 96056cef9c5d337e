"""What does not work is shown in /ready and by ``nodepool problem-list`` until it works (fake
clouds).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodepool.base.problems import LONGEST, MOST_PUBLISHED, LabelProblems, Problem, as_record_list
from nodepool.cmd import nodepoolcmd
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.statistics.INTERNAL_INTERVAL", 0.2)
    monkeypatch.setattr(
        "nodepool.driver.statemachine.provider.StateMachineProvider.ERROR_LABEL_RETRY", 0.2
    )


def listed(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """As the command prints it."""
    capsys.readouterr()
    assert (
        nodepoolcmd.main(
            ["-c", str(bench.tmp / "nodepool.yaml"), "problem-list", "--format", "json"]
        )
        == 0
    )
    return list(json.loads(capsys.readouterr().out))


def test_label_problems_are_published_until_they_are_solved(
    bench: LauncherBench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nodepool import exceptions

    labels = [
        {"name": "good", "cloud-image": "fake-image", "min-ram": 8192},
        {"name": "flavorless", "cloud-image": "fake-image", "flavor-name": "gone"},
        {"name": "refused", "cloud-image": "fake-image", "min-ram": 8192, "key-name": "gone"},
    ]
    pool = bench.start(
        config(provider(pools=[{"name": "main", "labels": labels}], **{"launch-retries": 1}))
    )
    adapter = bench.adapter("fake-provider")
    create = adapter._createServer

    def refuse(*args: Any, key_name: str | None = None, **kw: Any) -> Any:
        if key_name:
            raise exceptions.LaunchNodepoolException(
                "provider fake-provider, pool main, label refused: no key gone (option key-name)"
            )
        return create(*args, key_name=key_name, **kw)

    monkeypatch.setattr(adapter, "_createServer", refuse)
    for name in ("flavorless", "refused"):
        bench.wait_request(bench.submit(name), "failed")
    bench.fulfilled("good")
    ready, lines = pool.getReadiness()
    assert ready
    assert any(
        line.startswith("provider fake-provider, label refused: no key gone (option key-name). ")
        for line in lines
    )
    (line,) = [
        line for line in lines if line.startswith("provider fake-provider, label flavorless: ")
    ]
    assert "'gone' (option flavor-name)" in line
    assert not any("label good" in line for line in lines)
    rows = wait_for(lambda: listed(bench, capsys), what="problems are published")
    assert [(row["provider"], row["label"]) for row in rows] == [
        ("fake-provider", "flavorless"),
        ("fake-provider", "refused"),
    ]
    monkeypatch.setattr(adapter, "_createServer", create)
    bench.fulfilled("refused")
    wait_for(
        lambda: {row["label"] for row in listed(bench, capsys)} == {"flavorless"},
        what="one is mended",
    )


def test_a_change_of_problems_disturbs_nobody(bench: LauncherBench) -> None:
    pool = bench.start(config(provider()))
    before = pool.assignment.queue.changes.declines
    announced: list[tuple[str, bool]] = []
    pool.zk.component_tree.listeners.append(lambda *change: announced.append(change))
    manager = pool.getProviderManager("fake-provider")
    manager.label_problems.note("fake-label", "launch", "made up")
    wait_for(
        lambda: any(content.get("problems") for content in bench.zk.getLaunchers()),
        what="problems are published",
    )
    wait_for(
        lambda: any(content.get("problems") for content in pool.zk.getLaunchers()),
        what="problems are seen",
    )
    assert (pool.assignment.queue.changes.declines, announced) == (before, [])


def test_a_provider_that_does_not_start(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nodepool.driver.statemachine.provider import StateMachineProvider

    start = StateMachineProvider.start

    def fail(self: Any, zk_conn: Any) -> None:
        if self.provider.name == "fake-two":
            raise RuntimeError("no\nluck")
        start(self, zk_conn)

    monkeypatch.setattr(StateMachineProvider, "start", fail)
    content = config(provider("fake-one"), provider("fake-two"))
    pool = bench.start(content)
    bench.fulfilled("fake-label")
    assert pool.getReadiness() == (True, ["provider fake-two: not running: no luck"])
    monkeypatch.setattr(StateMachineProvider, "start", start)
    bench.config(content)
    wait_for(lambda: pool.getReadiness() == (True, []), what="the provider runs")


def test_too_many_problems_are_shortened() -> None:
    """What ZooKeeper does not take would cut the launcher off, again and again."""
    problems = [
        Problem("\u2026" * LONGEST, f"provider-{number}", "label") for number in range(1000)
    ]
    found = as_record_list(problems)
    assert len(json.dumps(found)) < 700_000
    assert found[:-1] == [problem.record() for problem in problems[:MOST_PUBLISHED]]
    assert found[-1]["problem"].startswith("and 800 more; ")
    assert as_record_list(problems[:3]) == [problem.record() for problem in problems[:3]]


def test_problem_texts_are_short_single_lines() -> None:
    problems = LabelProblems("p")
    problems.note("a", "launch", "x" * 1000)
    problems.note("b", "launch", "provider p, pool main, label b: two\nlines")
    problems.note("b", "image", "no image")
    assert [str(problem) for problem in problems.listed()][1:] == [
        "provider p, label b: no image. Suggestion: correct the image of the label, or upload the "
        "image to the cloud",
        "provider p, label b: two lines. Suggestion: repair what the message names; each request "
        "for the label retries",
    ]
    assert len(problems.listed()[0].text) == LONGEST
    problems.clear("b", "launch")
    assert [problem.text for problem in problems.listed()][1:] == ["no image"]

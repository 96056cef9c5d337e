"""What a launcher publishes: once, again after a failure, and less when it is too large."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from nodepool.base.clock import SYSTEM
from nodepool.config.model import Config
from nodepool.launcher import report
from nodepool.launcher.report import Reporter
from nodepool.launcher.trends import Trends
from nodepool.zk import reading, reports


def test_configuration_is_published_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    kazoo = SimpleNamespace(client_id=(1, b""))
    state: Any = SimpleNamespace(
        config=Config(), zk=SimpleNamespace(kazoo_client=kazoo), clock=SYSTEM, identifier="nl01-1"
    )
    reporter = Reporter(state, Trends(), list, lambda: (True, []), dict)
    written: list[str] = []
    removed: list[str] = []
    fails: list[Exception] = [ConnectionLoss()]

    def write(_kazoo: Any, where: str, _content: Any) -> None:
        if fails:
            raise fails.pop()
        written.append(where)

    monkeypatch.setattr(reports, "write", write)
    monkeypatch.setattr(reading, "remove", lambda _kazoo, where: removed.append(where))
    with pytest.raises(ConnectionLoss):
        reporter.publish_config()
    for _ in range(2):
        reporter.publish_config()
    assert written == ["/nodepool/launcher-configs/nl01-1"], (
        "what could not be written is written later, and once"
    )
    kazoo.client_id = (2, b"")
    reporter.publish_config()
    assert len(written) == 2, "another session"
    state.config = Config()
    fails.append(ValueError("too large"))
    with pytest.raises(ValueError, match="too large"):
        reporter.publish_config()
    reporter.publish_config()
    assert len(written) == 2, "it is not made again each second"
    assert removed == written[:1], (
        "nobody sees the configuration before, which is not in force any more"
    )


def test_too_large_report_is_replaced_by_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kazoo, tree = SimpleNamespace(client_id=(1, b"")), SimpleNamespace(reports={})
    zk = SimpleNamespace(kazoo_client=kazoo, report_tree=tree, request_tree={})
    state: Any = SimpleNamespace(config=None, zk=zk, clock=SYSTEM, identifier="nl01-1")
    reporter = Reporter(state, Trends(), list, lambda: (True, []), lambda: {"warnings": []})
    content = reporter.compose()
    hosts = [
        {"name": f"h{number}", "problem": random.randbytes(700).hex()} for number in range(1000)
    ]
    written: list[dict[str, Any]] = []

    def write(_kazoo: Any, _where: str, shown: dict[str, Any]) -> None:
        written.append(reports.parse(reports.serialize(shown)))

    monkeypatch.setattr(reports, "write", write)
    monkeypatch.setattr(reporter, "compose", lambda: content)
    monkeypatch.setattr("nodepool.launcher.report.INTERVAL", -1)
    for key, left in ((None, "metal"), ("hosts", "metal"), ("strange", None)):
        entry: dict[str, Any] = {"driver": "nodemanager", "hosts": []}
        content = {**content, "providers": {"metal": {**entry, **({key: hosts} if key else {})}}}
        reporter.publish()
        assert list(written[-1]["providers"]) == ([left] if left else [])
        assert bool(key) == any(
            "too large for ZooKeeper" in line for line in written[-1]["details"]
        )
    assert len(written) == 3


def test_change_soon_after_a_report_is_published_without_another_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, written = [100.0], []
    zk = SimpleNamespace(
        kazoo_client=None, report_tree=SimpleNamespace(reports={}), request_tree={}
    )
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    state: Any = SimpleNamespace(config=None, zk=zk, clock=clock, identifier="nl01-1")
    reporter = Reporter(state, Trends(), list, lambda: (True, []), lambda: {"warnings": []})
    monkeypatch.setattr(reports, "write", lambda _kazoo, _where, _content: written.append(now[0]))
    reporter.publish()
    assert reporter.seconds_left(waiting=False) == math.inf
    assert reporter.seconds_left(waiting=True) == report.INTERVAL
    now[0] += 0.5
    reporter.publish()
    assert written == [100.0]
    assert reporter.seconds_left(waiting=False) == report.INTERVAL - 0.5, (
        "nothing else may wake the thread"
    )
    now[0] += report.INTERVAL
    reporter.publish()
    assert written == [100.0, 102.5]


@pytest.mark.parametrize(
    ("waiting", "pause"),
    [(0, report.INTERVAL), (5000, 2.0), (20_000, 8.0), (100_000, report.MOST_INTERVAL)],
)
def test_report_with_thousands_of_requests_is_composed_less_often(
    monkeypatch: pytest.MonkeyPatch, waiting: int, pause: float
) -> None:
    zk = SimpleNamespace(
        kazoo_client=None, report_tree=SimpleNamespace(reports={}), request_tree={}
    )
    clock = SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 100.0)
    state: Any = SimpleNamespace(config=None, zk=zk, clock=clock, identifier="nl01-1")
    rows: list[Any] = [(f"200-{i:010}", ("small",), "requested", ()) for i in range(waiting)]
    reporter = Reporter(state, Trends(), lambda: rows, lambda: (True, []), lambda: {"warnings": []})
    monkeypatch.setattr(reports, "write", lambda *_arguments: None)
    reporter.publish()
    assert reporter.seconds_left(waiting=True) == pause

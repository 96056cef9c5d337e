"""What a launcher publishes: once, again after a failure, and less when it is too large."""

from __future__ import annotations

import json
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
    assert reporter.seconds_left(waiting=False) == math.inf


@pytest.mark.parametrize(
    "hosts", [[{"name": object()}], [{"cores": math.inf}], [{("a", "b"): 1}], None, [SystemExit]]
)
def test_provider_whose_hosts_are_not_json_harms_its_own_entry_only(hosts: Any) -> None:
    manager = SimpleNamespace(describeHosts=lambda: hosts, cloud_calls=None)
    given = SimpleNamespace(name="p", driver=SimpleNamespace(name="d"), max_concurrency=1, pools={})
    config = SimpleNamespace(
        providers={"p": given},
        provider_managers={"p": manager},
        providers_not_running=set(),
        not_running_labels={},
        labels={},
        provider_failures={},
        provider_errors={},
        diskimages={},
        tenant_resource_limits={},
    )
    zk = SimpleNamespace(request_tree={})
    state: Any = SimpleNamespace(config=config, clock=SYSTEM, zk=zk, getPoolWorkers=lambda name: [])
    entry = Reporter(state, Trends(), list, lambda: (True, []), lambda: {"warnings": []}).compose()[
        "providers"
    ]["p"]
    assert entry["driver"] == "d" and entry["error"] and "hosts" not in entry
    json.dumps(entry)


def test_report_lists_so_many_kinds_of_waiting_requests_and_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "MOST_GROUPS", 3)
    monkeypatch.setattr(report, "MOST_IDS", 4)
    waiting: Any = [
        (f"100-{number}", (f"label-{number // 2}",), "requested", ()) for number in range(10)
    ]
    state: Any = SimpleNamespace(config=None, clock=SYSTEM, zk=SimpleNamespace(request_tree={}))
    groups = Reporter(
        state, Trends(), lambda: waiting, lambda: (True, []), lambda: {"warnings": []}
    ).compose()["waiting"]
    assert [(group["labels"], group["count"], len(group["ids"])) for group in groups] == [
        (["label-0"], 2, 2),
        (["label-1"], 2, 2),
        (["label-2"], 2, 0),
    ]

"""Measures and their representation."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from typing import Any

import pytest

from nodepool import status
from nodepool.lab.whatif.demand import Demand
from nodepool.lab.whatif.measures import Measures, percentile
from nodepool.lab.whatif.report import chart, tables


class Scene:
    """A node that is launched for 10 s, idle for 20 s and used for 30 s, by a request that
    waited 40 s.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[tuple[str, list[str]]] = []
        self.measures = Measures(
            lambda: self.now, lambda name, nodes: self.ended.append((name, nodes))
        )
        self.measures.begin()
        self.measures.submitted("200-1", Demand(0.0, ("a", "b"), 30.0, "web"))
        self.measures.submitted("200-2", Demand(0.0, ("b",), 30.0))
        self.node("building")
        self.now = 10.0
        self.node("ready")
        self.measures.sample()
        self.now = 30.0
        self.node("in-use")
        self.now = 40.0
        self.request("200-1", "fulfilled")
        self.request("200-2", "failed")
        self.now = 60.0
        self.measures.observe(0, 0, [["delete", "/nodepool/nodes/1"]])

    def node(self, state: str) -> None:
        record = {"state": state, "type": ["a"], "provider": "cloud"}
        self.measures.observe(0, 0, [["set", "/nodepool/nodes/1", json.dumps(record)], []])

    def request(self, name: str, state: str, requestor: str = "simulate") -> None:
        record = {"state": state, "requestor": requestor, "nodes": ["1"]}
        self.measures.observe(0, 0, [["set", f"/nodepool/requests/{name}", json.dumps(record)]])


def test_waiting_times_are_grouped_by_label_and_tenant() -> None:
    summary = Scene().measures.summary()
    expected: dict[str, Any] = {
        "requests": 1,
        "failed": 0,
        "unserved": 0,
        "p50": 40.0,
        "p95": 40.0,
        "worst": 40.0,
    }
    assert summary["labels"]["a"] == summary["tenants"]["web"] == expected
    assert summary["labels"]["b"] == expected | {"requests": 2, "failed": 1}
    assert summary["tenants"][""]["worst"] is None


def test_machine_hours_are_split_by_use() -> None:
    found = Scene().measures.summary()["machines"]["provider cloud"]
    assert found == pytest.approx(
        {"in_use": 30 / 3600, "idle": 20 / 3600, "changing": 10 / 3600, "utilization": 0.5}
    )


def test_time_before_the_first_request_does_not_count() -> None:
    scene = Scene()
    scene.node("ready")
    scene.now = 100.0
    scene.measures.begin()
    scene.now = 136.0
    assert scene.measures.summary()["machines"]["all"]["idle"] == pytest.approx((20 + 36) / 3600)


def test_ends_of_requests_are_reported_once_with_their_nodes() -> None:
    scene = Scene()
    scene.request("200-1", "fulfilled")
    scene.request("200-3", "fulfilled", "NodePool:min-ready")
    assert scene.ended == [("200-1", ["1"]), ("200-2", [])]


def test_request_that_never_ends_is_unserved() -> None:
    scene = Scene()
    scene.measures.submitted("200-9", Demand(60.0, ("a",), 1.0))
    assert scene.measures.open == 1
    assert scene.measures.summary()["labels"]["a"]["unserved"] == 1


@pytest.mark.parametrize(("part", "expected"), [(0.5, 2.0), (0.95, 4.0), (1.0, 4.0), (0.0, 1.0)])
def test_percentile_is_one_of_the_values(part: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], part) == expected


def test_tables_show_both_runs_and_labels_of_only_one() -> None:
    now, changed = Scene().measures.summary(), Scene().measures.summary()
    changed["labels"]["new"] = changed["labels"].pop("a")
    text = "\n".join(
        status.output(results, "table")
        for _title, results in tables({"now": now, "what-if": changed})
    )
    header = text.splitlines()[1]
    assert "p95 (now)" in header
    assert "p95 (what-if)" in header
    assert {"a", "b", "new"} <= {
        line.split()[1] for line in text.splitlines() if line.startswith("| ")
    }


def test_label_called_all_has_a_separate_row_from_the_total() -> None:
    summary = Scene().measures.summary()
    summary["labels"]["all"] = summary["labels"].pop("a")
    rows = next(iter(tables({"now": summary})))[1].rows
    assert [(row["name"], row["requests"]) for row in rows] == [("all", 1), ("b", 2), ("all", 2)]


def test_chart_is_valid_and_has_a_panel_for_each_run() -> None:
    root = xml.etree.ElementTree.fromstring(
        chart({"now": Scene().measures.summary(), "<&": Scene().measures.summary()})
    )
    names = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"now", "<&"} <= set(names)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 8

"""Traces from files and from the history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nodepool.lab.whatif.demand import Demand, TraceError, from_history, read_csv, write_csv


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_trace_starts_at_zero_and_is_ordered_by_time(tmp_path: Path) -> None:
    text = "time,labels,duration,tenant,priority\n130,small large,60,web,100\n100,small,30.5,,\n"
    assert read_csv(written(tmp_path / "t.csv", text)).requests == [
        Demand(0.0, ("small",), 30.5, None, 200, 0),
        Demand(30.0, ("small", "large"), 60.0, "web", 100, 0),
    ]


def test_times_may_be_dates_which_are_utc_without_a_zone(tmp_path: Path) -> None:
    text = "time,labels,duration\n2026-11-02T08:00:00,a,1\n2026-11-02T10:00:00+01:00,a,1\n"
    assert [request.time for request in read_csv(written(tmp_path / "t.csv", text)).requests] == [
        0.0,
        3600.0,
    ]


def test_written_trace_is_read_unchanged(tmp_path: Path) -> None:
    requests = [Demand(0.0, ("a", "b"), 1.25, "t", 300, 7), Demand(5.5, ("a",), 0.0)]
    write_csv(str(tmp_path / "t.csv"), requests)
    assert read_csv(str(tmp_path / "t.csv")).requests == requests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,labels\n1,a\n", "missing: duration"),
        ("time,labels,duration,color\n1,a,1,red\n", "unknown columns color"),
        ("time,labels,duration\n", "contains no requests"),
        ("time,labels,duration\n1,a,1\nsoon,a,1\n", ":3: Invalid isoformat string: 'soon'"),
        ("time,labels,duration\n1, ,1\n", ":2: labels: at least one label is required"),
        ("time,labels,duration\n1,a,-1\n", ":2: duration: -1 s is not between 0"),
        ("time,labels,duration\n1,a,nan\n", ":2: duration: nan s is not between 0"),
        ("time,labels,duration\ninf,a,1\n", ":2: time: inf is not a time"),
        ("time,labels,duration\n1,a,1,2\n", ":2: more values than columns"),
        ("time,labels,duration,priority\n1,a,1,high\n", ":2: invalid literal for int"),
    ],
)
def test_errors_name_the_line_and_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path / "t.csv", text)
    with pytest.raises(TraceError) as info:
        read_csv(path)
    assert str(info.value).startswith(path)
    assert message in str(info.value)


@pytest.mark.parametrize(("days", "refused"), [(30, False), (31, True)])
def test_long_time_without_requests_is_refused(tmp_path: Path, days: int, refused: bool) -> None:
    path = written(tmp_path / "t.csv", f"time,labels,duration\n5,a,1\n{5 + days * 86400},a,1\n")
    if refused:
        with pytest.raises(
            TraceError, match="no request for 31 days, from 0 s after the first one"
        ):
            read_csv(path)
    else:
        assert len(read_csv(path).requests) == 2


def test_byte_order_mark_of_spreadsheets_is_accepted(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "\ufefftime,labels,duration\n0,a,1\n")
    assert read_csv(path).requests == [Demand(0.0, ("a",), 1.0)]


def test_missing_file_is_named() -> None:
    with pytest.raises(TraceError, match=r"/no/such\.csv"):
        read_csv("/no/such.csv")


# -- history


def request(time: float, name: str, **fields: Any) -> dict[str, Any]:
    fields = {"labels": ["small"], "requestor": "zuul", **fields}
    return {"type": "request-submitted", "time": time, "request": name, **fields}


def node(time: float, name: str, before: str, state: str) -> dict[str, Any]:
    return {
        "type": "node-changed",
        "time": time,
        "node": name,
        "before": before,
        "state": state,
        "labels": ["small"],
    }


def fulfilled(time: float, name: str, *nodes: str) -> dict[str, Any]:
    return {
        "type": "request-changed",
        "time": time,
        "request": name,
        "state": "fulfilled",
        "nodes": list(nodes),
    }


HISTORY = [
    request(100.0, "100-0000000001", tenant="web"),
    {"type": "node-created", "time": 101.0, "node": "1", "state": "building", "labels": ["small"]},
    node(141.0, "1", "building", "ready"),
    fulfilled(141.0, "100-0000000001", "1"),
    node(142.0, "1", "ready", "in-use"),
    request(150.0, "300-0000000002", requestor="NodePool:min-ready"),
    node(202.0, "1", "in-use", "used"),
    request(210.0, "300-0000000003"),
]


def test_history_gives_demand_with_use_tenant_and_priority() -> None:
    trace = from_history(HISTORY)
    assert trace.requests[0] == Demand(0.0, ("small",), 60.0, "web", 100)
    assert len(trace.requests) == 2, "requests for min-ready nodes are not demand"


def test_history_gives_launch_times() -> None:
    assert from_history(HISTORY).launch_times == {"small": [40.0]}


def test_requests_that_have_not_ended_use_the_median_of_their_label() -> None:
    trace = from_history(HISTORY)
    assert trace.requests[1] == Demand(110.0, ("small",), 60.0, None, 300)
    assert trace.estimated == 1


def test_node_deleted_while_in_use_ends_its_use() -> None:
    events = [
        *HISTORY[:6],
        {"type": "node-removed", "time": 162.0, "node": "1", "before": "in-use"},
    ]
    assert from_history(events).requests[0].duration == 20.0


@pytest.mark.parametrize("count", [0, 3])
def test_history_without_a_used_node_is_refused(count: int) -> None:
    with pytest.raises(TraceError, match="history contains no request"):
        from_history(HISTORY[:count])

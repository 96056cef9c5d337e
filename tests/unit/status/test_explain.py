"""Places in line, expected waits, and what is shown of a cloud's calls."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.status import explain as explain_module
from nodepool.status.cluster import calls_of
from nodepool.status.explain import Explanation, expected_wait, places, rates
from nodepool.status.known import seconds_text
from nodepool.status.results import use_text
from nodepool.zk.records import NodeRequest
from tests.support.mirror import report

LABELS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3)


def request(
    number: int, labels: list[str], priority: int = 100, state: str = "requested", relative: int = 0
) -> NodeRequest:
    made = NodeRequest(f"{priority}-{number:010}")
    made.state, made.node_types, made.relative_priority = state, labels, relative
    return made


@given(
    st.lists(
        st.tuples(
            LABELS,
            st.sampled_from((100, 200)),
            st.sampled_from(("requested", "pending", "fulfilled")),
            st.integers(0, 2),
        ),
        max_size=12,
    )
)
def test_queue_position_counts_earlier_requests_for_shared_labels(
    given: list[tuple[list[str], int, str, int]],
) -> None:
    """As many come before it as want one of its labels and are served first."""
    requests = [request(number, *entry) for number, entry in enumerate(given)]
    waiting = [each for each in requests if each.state != "fulfilled"]

    def before(one: NodeRequest) -> int:
        return sum(
            1
            for other in waiting
            if set(other.node_types) & set(one.node_types) and other.priority < one.priority
        )

    assert places(requests) == {each.id: 1 + before(each) for each in waiting}


def test_a_request_with_a_strange_name_has_no_place() -> None:
    strange = request(1, ["a"])
    strange.id = "nonsense"
    assert places([strange, request(2, ["a"])]) == {"100-0000000002": 1}


def test_expected_wait_is_that_of_the_slowest_label() -> None:
    """By the slowest label; by the launcher that has served most; unknown when nobody knows it
    of one of them.
    """
    first = report(lately={"a": {"a_minute": 2.0}, "b": {"a_minute": 30}})
    served = rates(
        [
            first,
            report(lately={"a": {"a_minute": 6.0}, "c": {"a_minute": "x"}, "d": {"a_minute": 0}}),
        ]
    )
    assert served == {"a": 6.0, "b": 30}
    assert expected_wait(served, ["a"], 3) == 30.0
    assert expected_wait(served, ["b", "a"], 1) == 10.0
    assert expected_wait(served, ["a", "c"], 1) is None
    assert expected_wait(served, [], 1) is None


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, (None, None, None)),
        ({"calls": None}, (None, None, None)),
        ({"calls": {"paces": [], "last_error": 5}}, (None, None, None)),
        ({"calls": {"paces": {"read": "2/s", "write": "2/s"}}}, ("2/s", None, None)),
        (
            {"calls": {"paces": {"read": "2/s", "write": "0.5/s of 2/s (throttled)"}}},
            ("read 2/s, write 0.5/s of 2/s (throttled)", None, None),
        ),
        (
            {
                "calls": {
                    "last_error": {
                        "operation": "create",
                        "kind": "quota",
                        "message": "too\nmany",
                        "time": 5.0,
                    }
                }
            },
            (None, "create (quota): too many", 5.0),
        ),
        (
            {
                "calls": {
                    "last_error": {
                        "operation": "create",
                        "kind": "quota",
                        "message": "m",
                        "time": "x",
                    }
                }
            },
            (None, "create (quota): m", None),
        ),
    ],
)
def test_calls_show_rate_and_last_error(
    given: dict[str, Any], expected: tuple[object, ...]
) -> None:
    assert (
        tuple(calls_of(report(providers={"p": given})["providers"]["p"]["calls"]).values())
        == expected
    )


def test_fields_begin_no_new_lines() -> None:
    found = Explanation("node", "1", "ready", facts=[("comment", "x\nnode 2: forged\x1b[2J")])
    assert found.text() == "node 1: ready\n  comment: x\\nnode 2: forged\\x1b[2J"


def test_moments_of_the_history_have_milliseconds_and_a_time_zone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "XYZ-2")
    time.tzset()
    found = Explanation(
        "node", "1", "ready", history=[{"type": "node-removed", "time": 86400.25, "node": "1"}]
    )
    assert "    1970-01-02 02:00:00.250 XYZ  " in found.text()
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("resource", "used", "limit", "text"),
    [
        ("ram", 163840, 1000000, "160 of 977 GiB"),
        ("disk", 70.9233, 100, "70.9 of 100 GiB"),
        ("cores", 0.1, 1.9, "0.1 of 1.9"),
        ("instances", 2, 1000000, "2 of 1,000,000"),
    ],
)
def test_use_of_a_limit_has_units(resource: str, used: float, limit: float, text: str) -> None:
    assert use_text(resource, used, limit) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.121, "0.12 s"), (9.97, "10 s"), (299.4, "4 min 59 s")]
)
def test_measured_durations_read_naturally(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_node_managers_report_nothing_of_nodes_of_others() -> None:
    created = {"type": "node-created", "time": 1.0, "node": "1", "provider": "aws"}
    kill = {"type": "node-killed", "time": 2.0, "node": "1", "provider": "aws", "pid": 1}
    evil = [
        {"type": kind, "time": 3.0, "node": "1", "provider": "evil"}
        for kind in ("node-killed", "node-usage")
    ]
    history: Any = Mock(read=lambda *_: [created, evil[0]])
    found = explain_module._history(Mock(), history, [kill, evil[1]], "node", "1")
    assert found == [created, kill]

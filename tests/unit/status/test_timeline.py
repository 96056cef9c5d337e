"""The steps of a request."""

from __future__ import annotations

from typing import Any

from nodepool.status.timeline import steps_of


def event(time: float, kind: str, state: str | None = None, **more: Any) -> dict[str, Any]:
    return {"time": time, "type": kind, "state": state, **more}


def test_served_request_has_all_steps_with_durations() -> None:
    events = [
        event(10.0, "request-submitted", "requested"),
        event(10.5, "request-changed", "pending"),
        event(11.0, "node-created", "init", node="1"),
        event(11.1, "node-created", "init", node="2"),
        event(12.0, "node-changed", "building"),
        event(20.0, "node-changed", "ready"),
        event(25.0, "node-changed", "ready"),
        event(25.2, "request-changed", "fulfilled"),
        event(26.0, "request-removed", before="fulfilled"),
        event(27.0, "node-changed", "in-use"),
        event(27.1, "node-changed", "in-use"),
        event(90.0, "node-changed", "used"),
        event(99.0, "node-changed", "used"),
    ]
    assert [(each["step"], each["time"], each["took"]) for each in steps_of(reversed(events))] == [
        ("requested", 10.0, None),
        ("accepted", 10.5, 0.5),
        ("launch started", 11.0, 0.5),
        ("nodes ready", 25.0, 14.0),
        ("fulfilled", 25.2, 0.2),
        ("in use", 27.0, 1.8),
        ("returned", 99.0, 72.0),
    ]


def test_node_that_existed_before_counts_from_the_request() -> None:
    events = [
        event(1.0, "node-created"),
        event(5.0, "node-changed", "ready"),
        event(10.0, "request-submitted"),
        event(10.2, "request-changed", "fulfilled"),
    ]
    assert [each["step"] for each in steps_of(events)] == ["requested", "fulfilled"]


def test_withdrawn_request_is_canceled() -> None:
    events = [event(1.0, "request-submitted"), event(4.0, "request-removed", before="pending")]
    assert [each["step"] for each in steps_of(events)] == ["requested", "canceled"]


def test_request_from_before_the_history_has_no_steps() -> None:
    assert steps_of([event(1.0, "request-changed", "fulfilled")]) == []

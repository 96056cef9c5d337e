"""What has happened to a request and its nodes, as a few steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nodepool.zk.mirror.feed import Event
from nodepool.zk.records import FAILED, FULFILLED, IN_USE, PENDING, READY, USED

#: Step -> type and state of its events, and whether the last of them counts: of several nodes.
STEPS = (
    ("requested", "request-submitted", None, False),
    ("accepted", "request-changed", PENDING, False),
    ("launch started", "node-created", None, False),
    ("nodes ready", "node-changed", READY, True),
    ("fulfilled", "request-changed", FULFILLED, False),
    ("failed", "request-changed", FAILED, False),
    ("in use", "node-changed", IN_USE, False),
    ("returned", "node-changed", USED, True),
)


def steps_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the steps of a request by time.

    Each has ``step``, ``time``, and ``took``, the seconds since the previous one.

    :param events: of the request and of its nodes; those of nodes before the request do not count.
    """
    ordered = sorted(events, key=lambda event: event["time"])
    begun = next((event["time"] for event in ordered if event["type"] == "request-submitted"), None)
    if begun is None:
        return []
    found: dict[str, float] = {}
    for event in ordered:
        for step, kind, state, last in STEPS:
            if (
                event["time"] >= begun
                and event["type"] == kind
                and state in (None, event.get("state"))
                and (last or step not in found)
            ):
                found[step] = event["time"]
        if event["type"] == "request-removed" and event.get("before") not in (FULFILLED, FAILED):
            found["canceled"] = event["time"]
    times = sorted(found.items(), key=lambda each: each[1])
    earlier = [None, *(time for _step, time in times)]
    return [
        {"step": step, "time": time, "took": None if before is None else round(time - before, 3)}
        for (step, time), before in zip(times, earlier, strict=False)
    ]

"""The demand: who requests which nodes, when, and for how long."""

from __future__ import annotations

import csv
import datetime
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nodepool.status.usage import Use
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import BUILDING, FULFILLED, IN_USE, INIT, READY

COLUMNS = ("time", "labels", "duration", "tenant", "priority", "relative_priority")
NEEDED = COLUMNS[:3]
LAUNCHING = frozenset({INIT, BUILDING})
#: The longest use that a trace may contain, in seconds: longer ones are mistakes, such as
#: milliseconds.
LONGEST_USE = 30 * 86400.0
#: The longest time between two requests of a trace, for the same reason: each hour of it is
#: simulated.
LONGEST_PAUSE = 30 * 86400.0


class TraceError(Exception):
    """The demand cannot be used; the text says where and why."""


@dataclass(frozen=True)
class Demand:
    """One request.

    :param time: seconds since the first request.
    :param duration: seconds from the handover of the nodes to their return.
    :param priority: 100 (high), 200 (normal) or 300 (low), as in the id of the request.
    """

    time: float
    labels: tuple[str, ...]
    duration: float
    tenant: str | None = None
    priority: int = 200
    relative_priority: int = 0


@dataclass
class Trace:
    """The requests, with measured times.

    :param launch_times: measured launch times in seconds by label; empty for a trace from a file.
    :param estimated: requests whose duration is unknown and was replaced by the median of their
        label.
    :param uses: of the nodes; empty for a trace from a file.
    """

    requests: list[Demand]
    launch_times: dict[str, list[float]] = field(default_factory=dict)
    estimated: int = 0
    uses: list[Use] = field(default_factory=list)


def read_csv(path: str) -> Trace:
    """Read a trace.

    :raises TraceError: the file cannot be read, or a line is wrong.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            found = _relative(_rows(file, path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from None
    for before, after in itertools.pairwise(found):
        if after.time - before.time > LONGEST_PAUSE:
            raise TraceError(
                f"{path}: no request for {(after.time - before.time) / 86400:.0f} days, from "
                f"{before.time:.0f} s after the first one; at most {LONGEST_PAUSE / 86400:.0f} are "
                "simulated: correct the times, which are in seconds"
            )
    return Trace(found)


def _rows(file: Iterable[str], path: str) -> list[Demand]:
    reader = csv.DictReader(file)
    names = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = names
    if missing := [name for name in NEEDED if name not in names]:
        raise TraceError(
            f"{path}: the first line must name the columns; missing: {', '.join(missing)}"
        )
    if unknown := [name for name in names if name not in COLUMNS]:
        raise TraceError(
            f"{path}: unknown columns {', '.join(unknown)}; known are {', '.join(COLUMNS)}"
        )
    found = []
    for row in reader:
        try:
            found.append(_demand(row))
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}:{reader.line_num}: {error}") from None
    if not found:
        raise TraceError(f"{path}: contains no requests")
    return found


def _demand(row: Mapping[str, str | None]) -> Demand:
    values = {name: (value or "").strip() for name, value in row.items() if name is not None}
    if None in row:
        raise ValueError("more values than columns")
    labels, duration = tuple(values["labels"].split()), float(values["duration"])
    if not labels:
        raise ValueError("labels: at least one label is required, several are separated by spaces")
    if not 0 <= duration <= LONGEST_USE:
        raise ValueError(f"duration: {duration:g} s is not between 0 and {LONGEST_USE:g} s")
    return Demand(
        _time(values["time"]),
        labels,
        duration,
        values.get("tenant") or None,
        int(values.get("priority") or 200),
        int(values.get("relative_priority") or 0),
    )


def _time(text: str) -> float:
    """Return seconds, from a number or from a date and time."""
    try:
        number = float(text)
    except ValueError:
        moment = datetime.datetime.fromisoformat(text)
        number = (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
    if not math.isfinite(number):
        raise ValueError(f"time: {text} is not a time")
    return number


def _relative(requests: list[Demand]) -> list[Demand]:
    """Return the requests ordered by time, with the first one at 0."""
    first = min(request.time for request in requests)
    return sorted(
        (replace(request, time=request.time - first) for request in requests),
        key=lambda request: request.time,
    )


def write_csv(path: str, requests: Iterable[Demand]) -> None:
    """Write a trace.

    :raises OSError: the file cannot be written.
    """
    with open(path, "w", newline="", encoding="utf8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for each in requests:
            labels = " ".join(each.labels)
            writer.writerow(
                [
                    f"{each.time:.3f}",
                    labels,
                    f"{each.duration:.3f}",
                    each.tenant or "",
                    each.priority,
                    each.relative_priority,
                ]
            )


# -- from the history of the launchers


def from_history(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Return the demand and the launch times that the events of the launchers contain.

    The relative priority of a request is not part of its events.

    :param events: in the order of time.
    :raises TraceError: they contain no request of a user.
    """
    submitted: dict[str, Mapping[str, Any]] = {}
    nodes_of: dict[str, list[str]] = {}
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    created: dict[str, float] = {}
    launches: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kind, time, node = event["type"], float(event["time"]), str(event.get("node"))
        if (
            kind == "request-submitted"
            and event.get("requestor") != MIN_READY
            and event.get("labels")
        ):
            submitted[str(event.get("request"))] = event
        elif kind == "request-changed" and event.get("state") == FULFILLED:
            nodes_of[str(event.get("request"))] = list(event.get("nodes") or ())
        elif kind == "node-created" and event.get("state") in LAUNCHING:
            created[node] = time
        elif kind == "node-changed":
            state, before = event.get("state"), event.get("before")
            if state == READY and before in LAUNCHING and node in created:
                for label in event.get("labels") or ():
                    launches[label].append(time - created[node])
            elif state == IN_USE:
                began[node] = time
            elif before == IN_USE:
                ended[node] = time
        elif kind == "node-removed" and event.get("before") == IN_USE:
            ended[node] = time
    return _of_history(
        submitted,
        nodes_of,
        {node: ended[node] - began[node] for node in ended if node in began},
        launches,
    )


def _of_history(
    submitted: Mapping[str, Mapping[str, Any]],
    nodes_of: Mapping[str, list[str]],
    uses: Mapping[str, float],
    launches: dict[str, list[float]],
) -> Trace:
    if not submitted:
        raise TraceError(
            "the history contains no request of a user; it reaches back one day at most"
        )
    known: dict[str, float] = {}
    by_labels: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for name, event in submitted.items():
        times = [uses[node] for node in nodes_of.get(name, ()) if node in uses]
        if times:
            known[name] = max(times)
            by_labels[tuple(event["labels"])].append(known[name])
    if not known:
        raise TraceError("the history contains no request whose nodes have been used and returned")
    overall = statistics.median(known.values())
    requests = []
    for name, event in submitted.items():
        labels = tuple(event["labels"])
        duration = known.get(name)
        if duration is None:
            duration = statistics.median(by_labels.get(labels) or [overall])
        head = name.partition("-")[0]
        priority = int(head) if "-" in name and head.isdecimal() else 200
        requests.append(
            Demand(float(event["time"]), labels, duration, event.get("tenant"), priority)
        )
    return Trace(_relative(requests), dict(launches), len(submitted) - len(known))

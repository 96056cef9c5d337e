"""Measures of a run, and their summary."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nodepool.lab.whatif.demand import Demand
from nodepool.zk import paths
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import FAILED, FULFILLED, IN_USE, READY, USED

NODES, REQUESTS = f"{paths.NODES}/", f"{paths.REQUESTS}/"
#: Moments at which the series have a value.
SAMPLES = 240
#: States in which somebody uses a node.
_IN_USE = frozenset({IN_USE, USED})


@dataclass
class _Wait:
    demand: Demand
    since: float
    seconds: float | None = None
    failed: bool = False


class Measures:
    """Observes the transactions of the server.

    :param now: virtual seconds.
    :param ended: called with the id of an ended request and its nodes, none if it has failed.
    """

    def __init__(self, now: Callable[[], float], ended: Callable[[str, list[str]], None]) -> None:
        self._now = now
        self._ended = ended
        self._start = math.inf
        self._waits: dict[str, _Wait] = {}
        #: Provider, label, state, and since when.
        self._nodes: dict[str, tuple[str, str, str, float]] = {}
        self._seconds: dict[tuple[str, str, str], float] = defaultdict(float)
        self.series: list[dict[str, float]] = []
        self.open = 0

    def begin(self) -> None:
        """Measure from now on."""
        self._start = self._now()

    def submitted(self, name: str, demand: Demand) -> None:
        self._waits[name] = _Wait(demand, self._now())
        self.open += 1

    # -- transactions

    def observe(self, _zxid: int, _time: int, changes: list[list[Any]]) -> None:
        for change in filter(None, changes):
            kind, path = change[0], change[1]
            if kind == "delete" and path.startswith(NODES):
                self._node(path.removeprefix(NODES), None)
            elif kind in ("create", "set") and change[2] and path.startswith((NODES, REQUESTS)):
                name = path.rpartition("/")[2]
                if path == NODES + name:
                    self._node(name, json.loads(change[2]))
                elif path == REQUESTS + name:
                    self._request(name, json.loads(change[2]))

    def _node(self, name: str, record: dict[str, Any] | None) -> None:
        now = self._now()
        before = self._nodes.pop(name, None)
        if before is not None:
            self._seconds[before[:3]] += max(0.0, now - max(before[3], self._start))
        if record is not None:
            label = record["type"][0] if record["type"] else ""
            self._nodes[name] = (record["provider"], label, record["state"], now)

    def _request(self, name: str, record: dict[str, Any]) -> None:
        if record["requestor"] == MIN_READY or record["state"] not in (FULFILLED, FAILED):
            return
        wait = self._waits.get(name)
        if wait is not None and wait.seconds is None:
            wait.seconds, wait.failed = self._now() - wait.since, record["state"] == FAILED
            self.open -= 1
            self._ended(name, [] if wait.failed else record["nodes"])

    def sample(self) -> None:
        states = [state for _provider, _label, state, _since in self._nodes.values()]
        self.series.append(
            {
                "time": self._now() - self._start,
                "waiting": self.open,
                "machines": len(states),
                "in_use": sum(state in _IN_USE for state in states),
                "idle": states.count(READY),
            }
        )

    # -- summary

    def summary(self) -> dict[str, Any]:
        """Return waiting times and hours of machines, as JSON."""
        for name in list(self._nodes):
            provider, label, state, _since = self._nodes[name]
            self._node(name, {"provider": provider, "type": [label], "state": state})
        waits = list(self._waits.values())
        by_label: dict[str, list[_Wait]] = defaultdict(list)
        by_tenant: dict[str, list[_Wait]] = defaultdict(list)
        for wait in waits:
            by_tenant[wait.demand.tenant or ""].append(wait)
            for label in sorted(set(wait.demand.labels)):
                by_label[label].append(wait)
        hours: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        pairs: dict[tuple[str, str], float] = defaultdict(float)
        for (provider, label, state), seconds in self._seconds.items():
            pairs[provider, label] += seconds / 3600
            what = "in_use" if state in _IN_USE else "idle" if state == READY else "changing"
            for group in (f"provider {provider}", f"label {label}", "all"):
                hours[group][what] += seconds / 3600
        return {
            "hours_simulated": (self._now() - self._start) / 3600,
            "waited_hours": sum(
                self._now() - wait.since if wait.seconds is None else wait.seconds for wait in waits
            )
            / 3600,
            "hours": [[*pair, value] for pair, value in sorted(pairs.items())],
            "all": _waiting(waits),
            "labels": {name: _waiting(found) for name, found in sorted(by_label.items())},
            "tenants": {name: _waiting(found) for name, found in sorted(by_tenant.items())},
            "machines": {name: _machine_hours(found) for name, found in sorted(hours.items())},
            "series": self.series,
        }


def _waiting(waits: Iterable[_Wait]) -> dict[str, Any]:
    """Return counts, and waiting times in seconds.

    For requests that never ended there is only the count.
    """
    waits = list(waits)
    times = sorted(wait.seconds for wait in waits if wait.seconds is not None and not wait.failed)
    return {
        "requests": len(waits),
        "failed": sum(wait.failed for wait in waits),
        "unserved": sum(wait.seconds is None for wait in waits),
        "p50": percentile(times, 0.50),
        "p95": percentile(times, 0.95),
        "worst": percentile(times, 1.0),
    }


def percentile(ordered: list[float], part: float) -> float | None:
    """Return the smallest value that is at least as large as this part of all.

    None if there are no values.
    """
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


def _machine_hours(hours: dict[str, float]) -> dict[str, float]:
    total = sum(hours.values())
    names = ("in_use", "idle", "changing")
    return {name: hours.get(name, 0.0) for name in names} | {
        "utilization": hours.get("in_use", 0.0) / total if total else 0.0
    }

"""Who has used the pool, for how long, how much of it, and at which cost.

From the events of the history: one :class:`Use` for each node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodepool.config.model import Config, ConfigPool
from nodepool.status.results import Results
from nodepool.zk.mirror.feed import USER, Event
from nodepool.zk.records import FULFILLED, IN_USE, READY

#: What uses are grouped by.
GROUPS = ("label", "provider", "tenant", "project", "pipeline", "job", "owner")
#: Values of a node manager that are numbers, see ``WaitEvents``.
MEASURED = ("cpu_usec", "memory_peak", "memory_limit", "oom_kills", "disk_peak")
#: Key of a row -> title.
COLUMNS = {
    "nodes": "Nodes",
    "used_hours": "Used h",
    "idle_hours": "Idle h",
    "launch_hours": "Launching h",
    "wait_p50": "Wait p50",
    "wait_p95": "Wait p95",
    "memory_p50": "Memory p50",
    "memory_p95": "Memory p95",
    "memory_limit": "of",
    "cores_p50": "Cores p50",
    "cores_p95": "Cores p95",
    "kills": "Kills",
    "cost": "Cost",
    "idle_cost": "Idle cost",
}
ADVICE = {
    "job": "Job",
    "label": "Label",
    "advised": "Smallest label",
    "runs": "Runs",
    "memory_peak": "Memory peak",
    "memory_limit": "of",
    "headroom": "Headroom",
    "kills": "Kills",
}
MIB = 1 << 20
#: Part of the highest peak that a label must have in addition; the factor by which a label must be
#: larger than one whose jobs were killed.
HEADROOM, LARGER = 0.15, 1.25
#: Options of labels that name the size of a machine.
_FLAVORS = ("flavor_name", "instance_type")


@dataclass(slots=True)
class Use:
    """What is known of a node. Times are UNIX seconds; None: that is not known, or not yet."""

    node: str
    label: str = ""
    provider: str = ""
    pool: str = ""
    created: float | None = None
    ready: float | None = None
    began: float | None = None
    freed: float | None = None
    removed: float | None = None
    #: Seconds that its request has waited.
    waited: float | None = None
    #: Field of an event -> value, of who has used it.
    user: dict[str, str] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)

    def span(self, begin: float | None, *ends: float | None) -> float:
        """Return the seconds from a time to the first of these that is known."""
        end = _first(*ends)
        return 0.0 if begin is None or end is None else max(0.0, end - begin)

    def seconds(self, now: float) -> tuple[float, float, float]:
        """Return the seconds of its launch, until it was used, and of its use."""
        return (
            self.span(self.created, self.ready, self.removed, now),
            self.span(self.ready, self.began, self.removed, now),
            self.span(self.began, self.freed, self.removed, now),
        )

    def group(self, by: str) -> str:
        return str(getattr(self, by, None) or self.user.get(by, ""))


def _first(*times: float | None) -> float | None:
    return next((each for each in times if each is not None), None)


class Ledger:
    """Collects uses from events, in any order and also if some come again."""

    def __init__(self) -> None:
        self.uses: dict[str, Use] = {}
        self._users: dict[str, dict[str, str]] = {}

    def add(self, event: Event) -> None:
        node = event.get("node")
        if isinstance(node, str):
            use = self.uses.setdefault(node, Use(node))
            self._add(use, event)
            if isinstance(request := event.get("request"), str):
                use.user = {**self._users.get(request, {}), **use.user}
        elif event["type"] == "request-submitted":
            self._users[str(event.get("request"))] = _user(event)
        elif event["type"] == "request-changed" and event.get("state") == FULFILLED:
            for each in event.get("nodes") or ():
                use = self.uses.setdefault(each, Use(each))
                use.waited = event.get("seconds")
                use.user = {**self._users.get(str(event.get("request")), {}), **use.user}
        elif event["type"] == "request-removed":
            self._users.pop(str(event.get("request")), None)

    def _add(self, use: Use, event: Event) -> None:
        kind, state, time = event["type"], event.get("state"), float(event["time"])
        use.provider = use.provider or str(event.get("provider") or "")
        use.pool = use.pool or str(event.get("pool") or "")
        use.label = use.label or ",".join(event.get("labels") or ())
        if kind == "node-created":
            use.created = time
        elif kind == "node-removed":
            use.removed = time
        elif kind == "node-usage":
            use.measured = {
                key: value
                for key in MEASURED
                if isinstance(value := event.get(key), (int, float)) and value >= 0
            }
        elif kind == "node-changed":
            if state == READY:
                use.ready = time
            elif state == IN_USE:
                use.began = _first(use.began, time)
                use.user = {**use.user, **_user(event)}
            elif event.get("before") == IN_USE:
                use.freed = time


def _user(event: Event) -> dict[str, str]:
    return {name: str(event[name]) for name in USER.values() if event.get(name)}


def uses(events: Iterable[Event]) -> list[Use]:
    """Return the uses of all nodes that the events contain, oldest first."""
    ledger = Ledger()
    for event in events:
        ledger.add(event)
    return list(ledger.uses.values())


def _labels(pool: ConfigPool | None) -> dict[str, Any]:
    """Return the labels of a pool with their options; those of ``static`` pools have none."""
    labels = pool.labels if pool is not None else None
    return labels if isinstance(labels, dict) else {}


def price_of(config: Config, use: Use) -> float | None:
    """Return the price of an hour: of its label, else its flavor, else its provider; or None."""
    label, provider = config.labels.get(use.label), config.providers.get(use.provider)
    if label is not None and label.cost.hour is not None:
        return label.cost.hour
    if provider is None:
        return None
    pool = provider.pools.get(use.pool)
    made = _labels(pool).get(use.label)
    flavors = [getattr(made, name, None) for name in _FLAVORS]
    prices = [provider.cost.flavors[name] for name in flavors if name in provider.cost.flavors]
    return prices[0] if prices else provider.cost.hour


def table(
    found: Iterable[Use], by: str, now: float, price: Callable[[Use], float | None]
) -> Results:
    """Return a row for each group, those with the most hours first, and one of all.

    Memory is in bytes, waiting times are in seconds. Cores are the mean of a node's use. Unknown
    values are None.

    :param by: one of :data:`GROUPS`.
    """
    groups: dict[str, list[Use]] = defaultdict(list)
    for use in found:
        groups[use.group(by)].append(use)
    rows = [{by: name or None, **_row(each, now, price)} for name, each in groups.items()]
    rows.sort(key=lambda row: (-row["used_hours"], row[by] or ""))
    if len(rows) > 1:
        everything = [use for each in groups.values() for use in each]
        rows.append({by: "(all)", **_row(everything, now, price)})
    return Results(rows, {by: by.capitalize(), **COLUMNS})


def _row(found: list[Use], now: float, price: Callable[[Use], float | None]) -> dict[str, Any]:
    times = [use.seconds(now) for use in found]
    launching, idle, used = (sum(each) / 3600 for each in zip(*times, strict=True))
    cost: list[float] = []
    idle_cost: list[float] = []
    cores: list[float] = []
    for use, (_launch, unused, busy) in zip(found, times, strict=True):
        if (hour := price(use)) is not None:
            cost.append(hour / 3600 * use.span(_first(use.created, use.ready), use.removed, now))
            idle_cost.append(hour / 3600 * unused)
        if busy > 0 and "cpu_usec" in use.measured:
            cores.append(use.measured["cpu_usec"] / 1e6 / busy)
    waits = [use.waited for use in found if use.waited is not None]
    peaks, limits = _values(found, "memory_peak"), _values(found, "memory_limit")
    return {
        "nodes": len(found),
        "used_hours": round(used, 2),
        "idle_hours": round(idle, 2),
        "launch_hours": round(launching, 2),
        "wait_p50": percentile(waits, 0.5),
        "wait_p95": percentile(waits, 0.95),
        "memory_p50": percentile(peaks, 0.5),
        "memory_p95": percentile(peaks, 0.95),
        "memory_limit": max(limits, default=None),
        "cores_p50": percentile(cores, 0.5, 2),
        "cores_p95": percentile(cores, 0.95, 2),
        "kills": int(sum(_values(found, "oom_kills"))) if peaks else None,
        "cost": round(sum(cost), 2) if cost else None,
        "idle_cost": round(sum(idle_cost), 2) if cost else None,
    }


def _values(found: Iterable[Use], key: str) -> list[float]:
    return [use.measured[key] for use in found if key in use.measured]


def percentile(values: list[float], part: float, digits: int = 3) -> float | None:
    """Return the smallest value that is not less than this part of all; None: there are none."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(part * len(ordered)) - 1)], digits) if ordered else None


def sizes(config: Config) -> dict[str, float]:
    """Return label -> bytes of memory, of the labels whose providers declare it."""
    return {
        name: float(label.ram) * MIB
        for provider in config.providers.values()
        for pool in provider.pools.values()
        for name, label in _labels(pool).items()
        if isinstance(getattr(label, "ram", None), int) and label.ram > 0
    }


def advice(found: Iterable[Use], limits: Mapping[str, float]) -> Results:
    """Return the smallest label that would have sufficed for each job, with the evidence.

    Caches count as used memory: a job that has reached its limit without a kill may need less, so
    no larger label is advised.

    :param limits: label -> bytes of memory, see :func:`sizes`.
    """
    jobs: dict[tuple[str, str], list[Use]] = defaultdict(list)
    for use in found:
        if "memory_peak" in use.measured and use.freed is not None:
            jobs[use.group("job") or use.group("owner"), use.label].append(use)
    rows = []
    for (job, label), each in sorted(jobs.items()):
        peak, kills = max(_values(each, "memory_peak")), int(sum(_values(each, "oom_kills")))
        own = limits.get(label) or max(_values(each, "memory_limit"), default=0.0)
        needed = own * LARGER if kills else min(peak * (1 + HEADROOM), own or math.inf)
        fits = [(size, name != label, name) for name, size in limits.items() if size >= needed]
        best = min(fits, default=None)
        advised = None if best is None else best[2]
        rows.append(
            {
                "job": job or None,
                "label": label,
                "advised": advised,
                "runs": len(each),
                "memory_peak": peak,
                "memory_limit": own or None,
                "headroom": None if best is None or kills else round(1 - peak / best[0], 2),
                "kills": kills,
            }
        )
    return Results(rows, ADVICE)

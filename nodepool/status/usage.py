"""Who has used the pool, for how long, how much of it, and at which cost.

From the events of the history: one :class:`Use` for each node.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodepool.config.model import Config, ConfigPool
from nodepool.status.results import Results
from nodepool.zk.mirror.feed import USER, Event
from nodepool.zk.records import FULFILLED, IN_USE, LARGEST, READY

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
#: What is added up of the uses in a group (times in seconds; ``priced``: nodes with a price; the
#: limit is the largest), and what is collected of them.
NUMBERS = (
    *("nodes", "launching", "idle", "used", "priced", "cost", "idle_cost", "kills"),
    "memory_limit",
)
LISTS = ("waits", "peaks", "cores")
NONE: tuple[tuple[float, ...], ...] = ((),) * len(LISTS)
MIB = 1 << 20
#: Part of the highest peak that a label must have in addition; the factor by which a label must be
#: larger than one whose jobs were killed.
HEADROOM, LARGER = 0.15, 1.25
#: Measured runs of a label that its size can be judged by, at least; half of its runs, too.
FEWEST_RUNS = 20
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
    #: The provider that has measured it.
    source: str = ""

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

    @property
    def last(self) -> float:
        """Return when something is known to have happened to it."""
        times = (self.created, self.ready, self.began, self.freed, self.removed)
        return max((each for each in times if each is not None), default=0.0)

    def group(self, by: str) -> str:
        return str(getattr(self, by, None) or self.user.get(by, ""))


def _first(*times: float | None) -> float | None:
    return next((each for each in times if each is not None), None)


class Ledger:
    """Collects uses from events, in any order and also if some come again."""

    def __init__(self) -> None:
        self.uses: dict[str, Use] = {}
        #: Request -> its user.
        self.users: dict[str, dict[str, str]] = {}

    def add(self, event: Event) -> None:
        node = event.get("node")
        if isinstance(node, str):
            use = self.uses.setdefault(node, Use(node))
            self._add(use, event)
            if isinstance(request := event.get("request"), str):
                use.user = {**self.users.get(request, {}), **use.user}
        elif event["type"] == "request-submitted":
            self.users[str(event.get("request"))] = _user(event)
        elif event["type"] == "request-changed" and event.get("state") == FULFILLED:
            for each in event.get("nodes") or ():
                use = self.uses.setdefault(each, Use(each))
                use.waited = _number(event.get("seconds"))
                use.user = {**self.users.get(str(event.get("request")), {}), **use.user}
        elif event["type"] == "request-removed":
            self.users.pop(str(event.get("request")), None)

    def _add(self, use: Use, event: Event) -> None:
        kind, state, time = event["type"], event.get("state"), float(event["time"])
        provider = str(event.get("provider") or "")
        if kind == "node-usage":
            # A node manager reports what it likes, but not of nodes of other providers.
            if use.provider in ("", provider):
                use.measured, use.source = measured_of(event), provider
            return
        use.provider = use.provider or provider
        if use.source and use.provider and use.source != use.provider:
            use.measured, use.source = {}, ""
        use.pool = use.pool or str(event.get("pool") or "")
        use.label = use.label or ",".join(event.get("labels") or ())
        if kind == "node-created":
            use.created = time
        elif kind == "node-removed":
            use.removed = time
        elif kind == "node-changed":
            if state == READY:
                use.ready = time
            elif state == IN_USE:
                use.began = _first(use.began, time)
                use.user = {**use.user, **_user(event)}
            elif event.get("before") == IN_USE:
                use.freed = time


def measured_of(event: Event) -> dict[str, float]:
    """Return the values of a node manager that are usable."""
    found = {key: _number(event.get(key)) for key in MEASURED}
    return {key: value for key, value in found.items() if value is not None}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < LARGEST else None


def _user(event: Event) -> dict[str, str]:
    return {name: str(event[name]) for name in USER.values() if event.get(name)}


def uses(events: Iterable[Event]) -> list[Use]:
    """Return the uses of all nodes that the events contain, oldest first."""
    ledger = Ledger()
    for event in events:
        ledger.add(event)
    return list(ledger.uses.values())


@dataclass(frozen=True)
class Sufficient:
    """The memory that would have sufficed for all jobs of a label, in bytes.

    :param size: that of the smallest label with it.
    :param peak: the highest of any run.
    :param runs: how many were measured.
    """

    size: float
    peak: float
    runs: int


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
    made = _labels(provider.pools.get(use.pool)).get(use.label)
    flavors = [getattr(made, name, None) for name in _FLAVORS]
    prices = [provider.cost.flavors[name] for name in flavors if name in provider.cost.flavors]
    return prices[0] if prices else provider.cost.hour


@dataclass(slots=True)
class Sums:
    """What a row needs to know of the uses of a group, in the order of these keys."""

    numbers: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NUMBERS, 0.0))
    lists: dict[str, array[float]] = field(
        default_factory=lambda: {key: array("d") for key in LISTS}
    )

    def add(self, use: Use, now: float, price: float | None) -> None:
        launching, idle, used = use.seconds(now)
        hours, measured = (
            use.span(_first(use.created, use.ready), use.removed, now) / 3600,
            use.measured,
        )
        cores = measured["cpu_usec"] / 1e6 / used if used > 0 and "cpu_usec" in measured else None
        costs = (1, price * hours, price / 3600 * idle) if price is not None else (0, 0, 0)
        kills, limit = measured.get("oom_kills", 0), measured.get("memory_limit", 0)
        lists = (
            [] if value is None else [value]
            for value in (use.waited, measured.get("memory_peak"), cores)
        )
        self.count((1, launching, idle, used, *costs, kills, limit), lists)

    def count(self, numbers: Iterable[float], lists: Iterable[Iterable[float]] = NONE) -> None:
        """Add values; by default only the numbers."""
        for key, number in zip(NUMBERS, numbers, strict=True):
            known = self.numbers[key]
            self.numbers[key] = max(known, number) if key == "memory_limit" else known + number
        for key, values in zip(LISTS, lists, strict=True):
            self.lists[key].extend(values)

    def row(self, found: Mapping[str, Sequence[list[float]]]) -> dict[str, Any]:
        """Return the values of its row.

        :param found: of each of :data:`LISTS`, sorted.
        """
        number, priced = self.numbers, self.numbers["priced"] > 0
        return {
            "nodes": int(number["nodes"]),
            "used_hours": round(number["used"] / 3600, 2),
            "idle_hours": round(number["idle"] / 3600, 2),
            "launch_hours": round(number["launching"] / 3600, 2),
            "wait_p50": percentile(found["waits"], 0.5),
            "wait_p95": percentile(found["waits"], 0.95),
            "memory_p50": percentile(found["peaks"], 0.5, None),
            "memory_p95": percentile(found["peaks"], 0.95, None),
            "memory_limit": int(number["memory_limit"]) or None,
            "cores_p50": percentile(found["cores"], 0.5, 2),
            "cores_p95": percentile(found["cores"], 0.95, 2),
            "kills": int(number["kills"]) if any(found["peaks"]) else None,
            "cost": round(number["cost"], 2) if priced else None,
            "idle_cost": round(number["idle_cost"], 2) if priced else None,
        }


def table(
    found: Iterable[Use], by: str, now: float, price: Callable[[Use], float | None]
) -> Results:
    """Return a row for each group, those with the most hours first, and one of all.

    Memory is in bytes, waiting times are in seconds. Cores are the mean of a node's use. Unknown
    values are None.

    :param by: one of :data:`GROUPS`.
    """
    groups: dict[str, Sums] = defaultdict(Sums)
    for use in found:
        groups[use.group(by)].add(use, now, price(use))
    return table_of(groups, by)


def table_of(groups: Mapping[str, Sums], by: str) -> Results:
    """Return the rows as :func:`table`, of the sums of each group."""
    lists: dict[str, list[list[float]]] = {key: [] for key in LISTS}
    rows, everything = [], Sums()
    for name, sums in groups.items():
        for key, values in sums.lists.items():
            lists[key].append(sorted(values))
        rows.append({by: name or None, **sums.row({key: lists[key][-1:] for key in LISTS})})
        everything.count(sums.numbers.values())
    rows.sort(key=lambda row: (-row["used_hours"], row[by] or ""))
    if len(rows) > 1:
        rows.append({by: "(all)", **everything.row(lists)})
    return Results(rows, {by: by.capitalize(), **COLUMNS})


def percentile(found: Iterable[list[float]], part: float, digits: int | None = 3) -> float | None:
    """Return the smallest value that is not less than this part of all; None: there are none.

    :param found: sorted lists, whose values need not be sorted together.
    :param digits: of the result; None: it is a whole number.
    """
    lists = [each for each in found if each]
    if not lists:
        return None
    wanted = max(1, math.ceil(part * sum(map(len, lists))))
    low, high = min(each[0] for each in lists), max(each[-1] for each in lists)
    while low < high:  # both are values; the wanted one is between them
        middle = (low + high) / 2
        middle = low if middle >= high else middle
        ends = [bisect_right(each, middle) for each in lists]
        if sum(ends) >= wanted:
            high = max(each[end - 1] for each, end in zip(lists, ends, strict=True) if end)
        else:
            low = min(each[end] for each, end in zip(lists, ends, strict=True) if end < len(each))
    return round(high, digits)


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
    jobs: dict[tuple[str, str], Sums] = defaultdict(Sums)
    for use in found:
        if "memory_peak" in use.measured and use.freed is not None:
            jobs[use.group("job") or use.group("owner"), use.label].add(use, use.freed, None)
    rows = []
    for (job, label), sums in sorted(jobs.items(), key=lambda each: each[0]):
        peak, kills = int(max(sums.lists["peaks"])), int(sums.numbers["kills"])
        own = limits.get(label) or sums.numbers["memory_limit"]
        needed = own * LARGER if kills else min(peak * (1 + HEADROOM), own or math.inf)
        fits = [(size, name != label, name) for name, size in limits.items() if size >= needed]
        best = min(fits, default=None)
        advised = None if best is None else best[2]
        rows.append(
            {
                "job": job or None,
                "label": label,
                "advised": advised,
                "runs": int(sums.numbers["nodes"]),
                "memory_peak": peak,
                "memory_limit": own or None,
                "headroom": None if best is None or kills else round(1 - peak / best[0], 2),
                "kills": kills,
            }
        )
    return Results(rows, ADVICE)


def sufficient(found: Iterable[Use], limits: Mapping[str, float]) -> dict[str, Sufficient]:
    """Return the labels whose jobs would all have sufficed with the memory of a smaller one.

    :param limits: label -> bytes of memory, see :func:`sizes`.
    """
    found = list(found)
    ended = Counter(use.label for use in found if use.freed is not None)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in advice(found, limits).rows:
        rows[row["label"]].append(row)
    result = {}
    for label, jobs in rows.items():
        runs = sum(row["runs"] for row in jobs)
        size = max(limits.get(row["advised"], math.inf) for row in jobs)
        enough = runs >= FEWEST_RUNS and 2 * runs >= ended[label]
        if enough and size < limits.get(label, 0.0) and not any(row["kills"] for row in jobs):
            result[label] = Sufficient(size, max(row["memory_peak"] for row in jobs), runs)
    return result

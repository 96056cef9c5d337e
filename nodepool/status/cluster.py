"""The whole cluster at a glance: daemons, providers, capacity and waiting requests.

This is the data of ``nodepool status`` and of the overview page.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nodepool import status
from nodepool.base.problems import one_line
from nodepool.reasons import Code
from nodepool.status import causes, drains, known
from nodepool.status.once import Facade, Once
from nodepool.status.results import Results, format_duration
from nodepool.zk.drains import shown
from nodepool.zk.records import LARGEST, PENDING, READY, REQUESTED, Node, NodeRequest

DAEMON_COLUMNS = {
    "kind": "Kind",
    "host": "Host",
    "state": "State",
    "version": "Version",
    "running": "Running",
    "config": "Configuration",
}
PROVIDER_COLUMNS = {
    "provider": "Provider",
    "launcher": "Launcher",
    "driver": "Driver",
    "nodes": "Nodes",
    "limits": "Used of Limits",
    "launching": "Launching",
    "problems": "Problems",
}
POOL_COLUMNS = {
    "provider": "Provider",
    "pool": "Pool",
    "launcher": "Launcher",
    "labels": "Labels",
    "full": "Full",
    "nodes": "Nodes",
    "max_servers": "Max Servers",
    "priority": "Priority",
}
HOST_COLUMNS = {
    "host": "Host",
    "provider": "Provider",
    "launcher": "Launcher",
    "state": "State",
    "used": "Used",
    "nodes": "Nodes",
    "problem": "Problem",
}
TENANT_COLUMNS = {"tenant": "Tenant", "launcher": "Launcher", "limits": "Used of Limits"}
WAITING_COLUMNS = {
    "cause": "Cause",
    "count": "Requests",
    "since": "Longest",
    "labels": "Labels",
    "suggestion": "Suggestion",
}
Clock = Callable[[], float]
MOST_EXPLAINED = 200
"""Groups of equal requests whose cause is looked for in the whole cluster; the others have the
published reason.
"""


def daemons(zk: Facade, clock: Clock = time.time) -> Results:
    """Return launchers (from their reports, if any) and builders."""
    now = clock()
    #: Components name the host only; their reports distinguish launchers of one host.
    reports: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for report in zk.readReports():
        reports[str(report["hostname"])].append(report)
    rows: list[dict[str, Any]] = []
    for content in [*zk.getLaunchers(), *zk.getBuilders()]:
        host, kind = str(content.get("hostname")), str(content.get("kind"))
        found = reports[host].pop(0) if kind == "launcher" and reports[host] else None
        config, started = (found["config"], found["started"]) if found is not None else ({}, None)
        stale = config.get("stale_since")
        rows.append(
            {
                "kind": kind,
                "host": host if found is None else found["name"],
                "state": "not ready"
                if found is not None and not found["ready"]
                else content.get("state"),
                "version": content.get("version"),
                "running": format_duration(now - started) if started is not None else None,
                "config": f"stale for {format_duration(now - stale)}: {config['error']}"
                if stale is not None
                else ("in force" if found else None),
                "details": list(found["details"]) if found else [],
                "file": config.get("file"),
            }
        )
    return Results(rows, DAEMON_COLUMNS)


def providers(zk: Facade) -> Results:
    """Return one row per provider and launcher.

    Providers that only occur in node records have no launcher.
    """
    counts, problems = (
        zk.countNodes().providers,
        Counter(str(row["provider"]) for row in status.problem_rows(zk)),
    )
    down = {
        (provider, host["name"]) for _launcher, provider, host in _hosts(zk) if not host["usable"]
    }
    hosts_down = Counter(provider for provider, _host in down)
    rows: list[dict[str, Any]] = []
    for report in zk.readReports():
        for name, entry in sorted(report["providers"].items()):
            rows.append(
                _provider_row(
                    name, report["name"], entry, counts.get(name, Counter()), problems[name]
                )
            )
        for name, why in sorted(report["not_running"].items()):
            row = _provider_row(
                name, report["name"], None, counts.get(name, Counter()), problems[name]
            )
            rows.append({**row, "driver": f"not running: {why}"})
    listed = {row["provider"] for row in rows}
    registered = {str(pool.provider_name) for pool in zk.getRegisteredPools()}
    for name in sorted((counts.keys() | registered) - listed):
        launcher = "(publishes no report)" if name in registered else None
        rows.append(
            _provider_row(name, launcher, None, counts.get(name, Counter()), problems[name])
        )
    rows = [{**row, "hosts_down": hosts_down[row["provider"]]} for row in rows]
    return Results(sorted(rows, key=lambda row: row["provider"]), PROVIDER_COLUMNS)


def _provider_row(
    name: str, launcher: object, entry: dict[str, Any] | None, counts: Counter[str], problems: int
) -> dict[str, Any]:
    """Return the row of a provider.

    :param entry: of it in the report of the launcher; None: no report has one.
    """
    entry = entry or {
        "driver": None,
        "limits": {},
        "used": {},
        "hosts": [],
        "launching": None,
        "calls": None,
    }
    return {
        "provider": name,
        "launcher": launcher,
        "driver": entry["driver"],
        "nodes": ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none",
        "states": dict(counts),
        "limits": _use(entry["used"], entry["limits"]),
        "used": entry["used"],
        "limit": entry["limits"],
        "hosts": len(entry["hosts"]),
        "launching": entry["launching"],
        "calls": entry["calls"],
        **calls_of(entry["calls"]),
        "problems": problems,
    }


def calls_of(calls: dict[str, Any] | None) -> dict[str, Any]:
    """Return the rates and the last failed call of a provider's cloud; None if unknown.

    ``error_time`` is in UNIX seconds.
    """
    paces, error = (calls["paces"], calls["last_error"]) if calls is not None else ({}, None)
    alike = len(set(paces.values())) == 1
    pace = (
        next(iter(paces.values()))
        if alike
        else ", ".join(f"{lane} {text}" for lane, text in sorted(paces.items()))
    )
    return {
        "pace": pace or None,
        "error": one_line(f"{error['operation']} ({error['kind']}): {error['message']}")
        if error is not None
        else None,
        "error_time": error["time"] if error is not None else None,
    }


def pools(zk: Facade) -> Results:
    """Return registered pools; ``full`` names the limit or drain that pauses a pool, if known."""
    counts = zk.countNodes().pools
    full = {
        (report["name"], one["pool"]): one["headline"] or one["text"]
        for report in zk.readReports()
        for group in report["waiting"]
        for one in group["reasons"]
        if one["code"] == Code.PAUSED.word
    }
    limits = {
        (name, pool): entry["max_servers"]
        for report in zk.readReports()
        for name, provider in report["providers"].items()
        for pool, entry in provider["pools"].items()
    }
    rows: list[dict[str, Any]] = [
        {
            "provider": str(pool.provider_name),
            "pool": str(pool.name),
            "launcher": known.place_of(zk, str(pool.id)).rpartition(" on ")[2],
            "labels": sorted(pool.labels),
            "paused": pool.paused,
            "full": shown(drains.of_pool(zk, pool)),
            "nodes": counts[pool.provider_name, pool.name],
            "max_servers": limits.get((str(pool.provider_name), str(pool.name))),
            "priority": pool.priority,
        }
        for pool in zk.getRegisteredPools()
    ]
    for row in rows:
        pool_name = f"{row['provider']}-{row['pool']}"
        row["full"] = row["full"] or (
            full.get((row["launcher"], pool_name), "waiting for capacity")
            if row["paused"]
            else None
        )
    return Results(sorted(rows, key=lambda row: (row["provider"], row["pool"])), POOL_COLUMNS)


def hosts(zk: Facade) -> Results:
    """Return hosts of node managers and static providers, with their nodes.

    Nodes in use fill the slots of a static host.
    """
    told = _hosts(zk)
    there: dict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in zk.readNodes() if told else ():
        static = (node.hostname, f"{node.username}@{node.hostname} port {node.connection_port}")
        for name in (
            (node.external_id.get("host"),) if isinstance(node.external_id, dict) else static
        ):
            there[str(node.provider), str(name)].append(node)
    rows = [
        {
            "host": host["name"],
            "provider": name,
            "launcher": launcher,
            "state": "usable" if host["usable"] else "not usable",
            "used": _use(
                {"slots": _in_use(there[name, host["name"]]), **host["used"]}, host["limits"]
            ),
            "nodes": sorted(str(node.id) for node in there[name, host["name"]]),
            "problem": host["problem"],
        }
        for launcher, name, host in told
    ]
    return Results(sorted(rows, key=lambda row: (row["provider"], row["host"])), HOST_COLUMNS)


def _hosts(zk: Facade) -> list[tuple[str, str, dict[str, Any]]]:
    """Return launcher, provider and host, as the launchers report them."""
    return [
        (report["name"], name, host)
        for report in zk.readReports()
        for name, provider in report["providers"].items()
        for host in provider["hosts"]
    ]


def _in_use(nodes: Iterable[Node]) -> int:
    return sum(1 for node in nodes if node.state != READY or node.allocated_to)


def tenants(zk: Facade) -> Results:
    """Return limits of tenants and their use, as reported by each launcher."""
    rows = [
        {
            "tenant": tenant,
            "launcher": report["name"],
            "limits": _use(entry["used"], entry["limits"]),
            "used": entry["used"],
            "limit": entry["limits"],
        }
        for report in zk.readReports()
        for tenant, entry in report["tenants"].items()
    ]
    return Results(sorted(rows, key=lambda row: (row["tenant"], row["launcher"])), TENANT_COLUMNS)


def _use(used: Mapping[str, float], limits: Mapping[str, float]) -> str | None:
    return (
        ", ".join(f"{key} {used.get(key, 0):g}/{limit:g}" for key, limit in sorted(limits.items()))
        or None
    )


def by_cause(zk: Facade, clock: Clock = time.time) -> Results:
    """Return waiting requests grouped by cause across launchers, labels and tenants.

    Each request counts once. Causes that end only with somebody's help come first, then the largest
    groups.
    """
    zk = zk if isinstance(zk, Once) else Once(zk)
    named = causes.groups_by_request(zk)
    #: Groups of large reports that do not list all of their requests.
    partial = {
        (tuple(group["labels"]), group["state"]): group
        for report in zk.readReports()
        for group in report["waiting"]
        if group["count"] > len(group["ids"])
    }
    #: Requests with equal labels, state and reasons have the same cause.
    alike: dict[tuple[Any, ...], list[NodeRequest]] = defaultdict(list)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for request in open_requests(zk.readRequests()):
        kind = (tuple(request.node_types), str(request.state))
        found = named.get(request.id or "") or ([partial[kind]] if kind in partial else [])
        key = (kind, *map(id, found))
        groups[key] = found
        alike[key].append(request)
    rows: dict[str, dict[str, Any]] = {}
    for number, (key, requests) in enumerate(sorted(alike.items(), key=lambda item: -len(item[1]))):
        reason = causes.main_reason(one for group in groups[key] for one in group["reasons"])
        listed = next((request for request in requests if request.id in named), requests[0])
        if reason is not None and (number >= MOST_EXPLAINED or listed.id not in named):
            cause = causes.of_published(reason)
        else:
            cause = causes.of_request(zk, listed, clock=clock)
        _add(rows, cause, requests, groups[key])
    now = clock()
    for row in rows.values():
        row["ids"].sort()
        row["labels"], row["state"] = (
            list(row["label_counts"]),
            ", ".join(sorted(row.pop("states"))),
        )
        row["oldest"] = min(row["oldest"], now)
        row["since"] = format_duration(now - row["oldest"])
    return Results(
        sorted(rows.values(), key=lambda row: (not row["problem"], -row["count"])), WAITING_COLUMNS
    )


def waiting_by_cause(zk: Facade) -> Counter[str]:
    """Return the number of waiting requests by cause, named without amounts."""
    found: Counter[str] = Counter()
    for row in by_cause(zk).rows:
        found[row["cause"].partition(": ")[0]] += row["count"]
    return found


def _add(
    rows: dict[str, dict[str, Any]],
    cause: known.Cause,
    requests: list[NodeRequest],
    groups: list[dict[str, Any]],
) -> None:
    key = cause.blocker or cause.text
    row = rows.get(key)
    if row is None:
        row = rows[key] = {
            "key": key,
            "cause": cause.headline or cause.text,
            "count": 0,
            "label_counts": Counter(),
            "tenants": Counter(),
            "ids": [],
            "oldest": LARGEST,
            "reason": cause.text,
            "suggestion": cause.remedy,
            "code": cause.code,
            "codes": [],
            "states": set(),
            "problem": causes.needs_help(cause),
        }
    row["count"] += len(requests)
    row["codes"] = sorted(
        {*row["codes"], *(one["code"] for group in groups for one in group["reasons"])}
    )
    # They have the same labels and the same state.
    row["states"].add(str(requests[0].state))
    row["label_counts"].update(dict.fromkeys(requests[0].node_types, len(requests)))
    for request in requests:
        row["ids"].append(request.id)
        if request.tenant_name:
            row["tenants"][request.tenant_name] += 1
        times = (
            value
            for value in (request.created_time, request.state_time)
            if isinstance(value, (int, float))
        )
        row["oldest"] = min(
            (value for value in times if 0 < value < row["oldest"]), default=row["oldest"]
        )


def states(zk: Facade) -> Counter[str]:
    """Return the number of requests by state."""
    return Counter(str(request.state) for request in zk.readRequests())


def summary(zk: Facade) -> str:
    """Return nodes and requests in one line each."""
    return f"Nodes: {_total(zk.countNodes().states)}\nRequests: {_total(states(zk))}"


def _total(counts: Counter[str]) -> str:
    parts = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return f"{sum(counts.values())}" + (f" ({parts})" if parts else "")


def open_requests(requests: Iterable[NodeRequest]) -> list[NodeRequest]:
    return [request for request in requests if request.state in (REQUESTED, PENDING)]

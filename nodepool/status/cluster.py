"""The whole cluster at a glance: daemons, providers, capacity and waiting requests.

This is the data of ``nodepool status`` and of the overview page.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from nodepool import status
from nodepool.base.problems import one_line
from nodepool.status import causes, known
from nodepool.status.once import Facade, Once
from nodepool.status.results import Results, format_age
from nodepool.zk.records import LARGEST, PENDING, REQUESTED, NodeRequest

DAEMON_COLUMNS = {
    "kind": "Kind", "host": "Host", "state": "State", "version": "Version", "running": "Running", "config": "Configuration",
}  # fmt: skip
PROVIDER_COLUMNS = {
    "provider": "Provider", "launcher": "Launcher", "driver": "Driver", "nodes": "Nodes", "limits": "Used of Limits",
    "launching": "Launching", "problems": "Problems",
}  # fmt: skip
POOL_COLUMNS = {"provider": "Provider", "pool": "Pool", "launcher": "Launcher", "labels": "Labels", "paused": "Full",
                "nodes": "Nodes", "max_servers": "Max Servers", "priority": "Priority"}  # fmt: skip
HOST_COLUMNS = {"host": "Host", "provider": "Provider", "launcher": "Launcher", "state": "State", "used": "Used",
                "nodes": "Slivers (Nodes)", "problem": "Problem"}  # fmt: skip
TENANT_COLUMNS = {"tenant": "Tenant", "launcher": "Launcher", "limits": "Used of Limits"}
WAITING_COLUMNS = {
    "labels": "Labels",
    "count": "Requests",
    "state": "State",
    "since": "For",
    "reason": "Waits Because",
    "suggestion": "Suggestion",
}
Clock = Callable[[], float]
MOST_EXPLAINED = 20
"""Groups of waiting requests whose cause includes the nodes that use the capacity."""


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
        config, started = (found or {}).get("config") or {}, (found or {}).get("started")
        stale = isinstance(config.get("stale_since"), (int, float))
        rows.append(
            {
                "kind": kind,
                "host": host if found is None else found["name"],
                "state": "not ready" if found is not None and not found.get("ready") else content.get("state"),
                "version": content.get("version"),
                "running": format_age(now - started) if isinstance(started, (int, float)) else None,
                "config": f"stale for {format_age(now - config['stale_since'])}: {config.get('error')}" if stale else
                          ("in force" if found else None),
                "details": list(found["details"]) if found else [],
                "file": config.get("file"),
            }
        )  # fmt: skip
    return Results(rows, DAEMON_COLUMNS)


def providers(zk: Facade) -> Results:
    """Return one row per provider and launcher.

    Providers that only occur in node records have no launcher.
    """
    counts, problems = zk.countNodes().providers, Counter(str(row["provider"]) for row in status.problem_list(zk).rows)
    rows: list[dict[str, Any]] = []
    for report in zk.readReports():
        for name, entry in sorted(report["providers"].items()):
            rows.append(_provider_row(name, report["name"], entry, counts.get(name, Counter()), problems[name]))
        for name, why in sorted(report["not_running"].items()):
            row = _provider_row(name, report["name"], {}, counts.get(name, Counter()), problems[name])
            rows.append({**row, "driver": f"not running: {why}"})
    listed = {row["provider"] for row in rows}
    registered = {str(pool.provider_name) for pool in zk.getRegisteredPools()}
    for name in sorted((counts.keys() | registered) - listed):
        launcher = "(publishes no report)" if name in registered else None
        rows.append(_provider_row(name, launcher, {}, counts.get(name, Counter()), problems[name]))
    return Results(sorted(rows, key=lambda row: row["provider"]), PROVIDER_COLUMNS)


def _provider_row(name: str, launcher: object, entry: dict[str, Any], counts: Counter[str], problems: int) -> dict[str, Any]:
    limits, used = _numbers(entry.get("limits")), _numbers(entry.get("used"))
    return {
        "provider": name,
        "launcher": launcher,
        "driver": entry.get("driver"),
        "nodes": ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none",
        "states": dict(counts),
        "limits": _use(used, limits),
        "used": used,
        "limit": limits,
        "launching": entry.get("launching") if isinstance(entry.get("launching"), int) else None,
        "calls": entry.get("calls"),
        **calls_of(entry),
        "problems": problems,
    }


def calls_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the rates and the last failed call of a provider's cloud; None if unknown.

    ``error_time`` is in UNIX seconds.
    """
    calls = entry.get("calls")
    paces, error = (calls.get("paces"), calls.get("last_error")) if isinstance(calls, dict) else (None, None)
    pace = None
    if isinstance(paces, dict) and paces:
        texts = {str(lane): str(text) for lane, text in sorted(paces.items())}
        alike = len(set(texts.values())) == 1
        pace = next(iter(texts.values())) if alike else ", ".join(f"{lane} {text}" for lane, text in texts.items())
    if not isinstance(error, dict):
        return {"pace": pace, "error": None, "error_time": None}
    when = error.get("time")
    return {
        "pace": pace,
        "error": one_line(f"{error.get('operation')} ({error.get('kind')}): {error.get('message')}"),
        "error_time": when if isinstance(when, (int, float)) and abs(when) < LARGEST else None,
    }


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {str(key): number for key, number in value.items() if isinstance(number, (int, float)) and abs(number) < 1e18}


def pools(zk: Facade) -> Results:
    counts = zk.countNodes().pools
    limits = {
        (name, pool): (entry.get("max_servers") if isinstance(entry, dict) else None)
        for report in zk.readReports()
        for name, provider in report["providers"].items()
        for pool, entry in (provider.get("pools") or {}).items()
    }
    rows = [
        {
            "provider": str(pool.provider_name),
            "pool": str(pool.name),
            "launcher": known.place_of(zk, str(pool.id)).rpartition(" on ")[2],
            "labels": sorted(pool.labels),
            "paused": pool.paused,
            "nodes": counts[pool.provider_name, pool.name],
            "max_servers": limits.get((str(pool.provider_name), str(pool.name))),
            "priority": pool.priority,
        }
        for pool in zk.getRegisteredPools()
    ]
    return Results(sorted(rows, key=lambda row: (row["provider"], row["pool"])), POOL_COLUMNS)


def hosts(zk: Facade) -> Results:
    """Return hosts of providers (node managers), with the nodes whose slivers run there."""
    told = [
        (report["name"], name, host)
        for report in zk.readReports()
        for name, provider in report["providers"].items()
        for host in (provider.get("hosts") if isinstance(provider.get("hosts"), list) else ())
        if isinstance(host, dict)
    ]
    there: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in zk.readNodes(with_contenders=False) if told else ():
        if isinstance(node.external_id, dict):
            there[str(node.provider), str(node.external_id.get("host"))].append(str(node.id))
    rows = [
        {
            "host": str(host.get("name")),
            "provider": name,
            "launcher": launcher,
            "state": "usable" if host.get("usable") else "not usable",
            "used": _use(host.get("used"), host.get("limits")),
            "nodes": sorted(there[name, str(host.get("name"))]),
            "problem": host.get("problem"),
        }
        for launcher, name, host in told
    ]
    return Results(sorted(rows, key=lambda row: (row["provider"], row["host"])), HOST_COLUMNS)


def tenants(zk: Facade) -> Results:
    """Return limits of tenants and their use, as reported by each launcher."""
    rows = [
        {
            "tenant": str(tenant),
            "launcher": report["name"],
            "limits": _use(entry.get("used"), entry.get("limits")),
            "used": _numbers(entry.get("used")),
            "limit": _numbers(entry.get("limits")),
        }
        for report in zk.readReports()
        for tenant, entry in report["tenants"].items()
        if isinstance(entry, dict)
    ]
    return Results(sorted(rows, key=lambda row: (row["tenant"], row["launcher"])), TENANT_COLUMNS)


def _use(used: object, limits: object) -> str | None:
    found = _numbers(used)
    return ", ".join(f"{key} {found.get(key, 0):g}/{limit:g}" for key, limit in sorted(_numbers(limits).items())) or None


def waiting(zk: Facade, clock: Clock = time.time) -> Results:
    """Return waiting requests grouped by labels, state and cause.

    Each request counts once, however many launchers report it.
    """
    zk = zk if isinstance(zk, Once) else Once(zk)
    reasons: dict[str, list[dict[str, Any]]] = defaultdict(list)
    first: dict[str, tuple[dict[str, Any], str]] = {}
    unnamed: list[tuple[dict[str, Any], str, int]] = []
    for report in zk.readReports():
        for group in report["waiting"]:
            for request_id in group["ids"]:
                reasons[request_id] += group["reasons"]
                first.setdefault(request_id, (group, str(report["name"])))
            if (left := group["count"] - len(group["ids"])) > 0:
                unnamed.append((group, str(report["name"]), left))
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for request_id, (group, launcher) in first.items():
        row = _waiting_row(rows, group, launcher, reasons[request_id], clock)
        row["count"] += 1
        row["ids"].append(request_id)
    for group, launcher, left in unnamed:
        _waiting_row(rows, group, launcher, group["reasons"], clock)["count"] += left
    for request in open_requests(zk.readRequests()) if not unnamed else ():
        if request.id not in first:  # of no launcher: none is running, or none has seen it yet
            group = {"labels": list(request.node_types), "state": request.state, "since": request.state_time or clock()}
            row = _waiting_row(rows, group, "", [], clock)
            row["count"] += 1
            row["ids"].append(request.id)
    for row in list(rows.values())[:MOST_EXPLAINED]:
        first_one = zk.getNodeRequest(row["ids"][0], cached=True) if row["ids"] else None
        if first_one is not None and first_one.state in (REQUESTED, PENDING):
            cause = causes.of_request(zk, first_one, clock=clock)
            row["reason"], row["suggestion"] = cause.text, cause.remedy
    return Results(list(rows.values()), WAITING_COLUMNS)


def _waiting_row(
    rows: dict[tuple[Any, ...], dict[str, Any]], group: dict[str, Any], launcher: str, reasons: list[dict[str, Any]], clock: Clock
) -> dict[str, Any]:
    reason = causes.main_reason(reasons)
    text = causes.worded(reason) if reason is not None else ""
    key = (tuple(group["labels"]), group["state"], text)
    if key not in rows:
        rows[key] = {
            "launcher": launcher, "labels": group["labels"], "count": 0, "state": group["state"], "since": "", "reason": text,
            "suggestion": reason["help"] if reason is not None else "", "codes": [], "ids": [], "oldest": group["since"],
        }  # fmt: skip
    row = rows[key]
    row["oldest"] = min(row["oldest"], group["since"])
    row["since"] = format_age(clock() - row["oldest"])
    row["codes"] = sorted({*row["codes"], *(one["code"] for one in reasons)})
    return row


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

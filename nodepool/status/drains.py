"""Drains: a list of them, and the nodes that they wait for."""

from __future__ import annotations

from collections import Counter

from nodepool.status.once import Facade
from nodepool.status.results import Results
from nodepool.zk.drains import Drain, covering, host_names, moment, names_of
from nodepool.zk.records import BUILDING, INIT, READY, Node

COLUMNS = {
    "kind": "Kind",
    "name": "Name",
    "since": "Since",
    "until": "Until",
    "by": "By",
    "reason": "Reason",
    "idle": "Idle nodes",
    "nodes": "Nodes left",
}


def drain_list(zk: Facade) -> Results:
    """Return the drains with the number of nodes that have not ended yet."""
    rows = [
        {
            "kind": drain.kind,
            "name": drain.target,
            "since": moment(drain.since),
            "until": "" if drain.until is None else moment(drain.until),
            "by": drain.by,
            "reason": drain.reason,
            "idle": "kept" if drain.keep_idle else "deleted",
            "nodes": len(remaining(zk, drain)),
        }
        for drain in zk.readNotes(Drain)
    ]
    return Results(rows, COLUMNS)


def remaining(zk: Facade, drain: Drain) -> list[Node]:
    """Return the nodes that the drain applies to and that have not ended yet.

    Idle nodes do not count if they are kept. Of a drained launcher these are its launches: other
    launchers assign and delete its nodes. Static nodes exist as long as their machines.
    """
    if drain.kind == "launcher":
        prefixes = (f"{drain.target}-PoolWorker.", f"{drain.target}.")
        return [
            node
            for node in zk.readNodes()
            if node.state in (INIT, BUILDING) and str(node.launcher).startswith(prefixes)
        ]
    static = static_providers(zk)
    return [
        node
        for node in zk.readNodes()
        if covering([drain], names_of(node)) is not None
        and not (
            node.state == READY
            and node.allocated_to is None
            and (drain.keep_idle or node.provider in static)
        )
    ]


def static_providers(zk: Facade) -> set[str]:
    """Return the providers whose idle nodes remain: their machines are not launched."""
    return {
        name
        for report in zk.readReports()
        for name, provider in report["providers"].items()
        if provider["driver"] == "static"
    }


def known_names(zk: Facade, kind: str) -> set[str]:
    """Return what can be drained: what a running launcher reports."""
    found: set[str] = set()
    pools: set[tuple[str, str]] = set()
    for report in zk.readReports():
        providers = report["providers"]
        pools |= {(name, pool) for name, one in providers.items() for pool in one["pools"]}
        # Backing nodes, which metastatic describes, are no hosts.
        rows = [
            host
            for one in providers.values()
            for host in one["hosts"]
            if one["driver"] != "metastatic"
        ]
        found |= {
            "provider": set(providers) | set(report["not_running"]),
            "pool": set(),
            "host": {
                name.removeprefix("host ") for row in rows for name in host_names(row["name"])
            },
            "image": set(report["images"]),
            "label": set(report["labels"]),
            "launcher": {report["hostname"]},
        }[kind]
    if kind == "pool":
        # A name that two pools share is not unique: neither can be meant.
        names = Counter(f"{provider}-{pool}" for provider, pool in pools)
        found = {name for name, count in names.items() if count == 1}
    return found

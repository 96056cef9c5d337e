"""Drains: a list of them, and the nodes that they wait for."""

from __future__ import annotations

from typing import Any

from nodepool.status.once import Facade
from nodepool.status.results import Results
from nodepool.zk.drains import Drain, covering, moment, names_of
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
    image: dict[str, Any] = next(
        (
            entry
            for report in zk.readReports()
            if drain.kind == "image" and (entry := report["images"].get(drain.target))
        ),
        {"labels": [], "providers": []},
    )
    labels, providers = set(image["labels"]), set(image["providers"])
    static = static_providers(zk)
    return [
        node
        for node in zk.readNodes()
        if (
            covering([drain], names_of(node)) is not None
            or (node.provider in providers and not labels.isdisjoint(node.type))
        )
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
    for report in zk.readReports():
        providers = report["providers"]
        found |= {
            "provider": set(providers) | set(report["not_running"]),
            "pool": {f"{name}-{pool}" for name, one in providers.items() for pool in one["pools"]},
            "host": {host["name"] for one in providers.values() for host in one["hosts"]},
            "image": set(report["images"]),
            "label": set(report["labels"]),
            "launcher": {report["hostname"]},
        }[kind]
    return found

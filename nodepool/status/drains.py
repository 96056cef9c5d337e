"""Drains: a list of them, and the nodes that they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from nodepool.status.known import backing_of, images_of
from nodepool.status.once import Facade
from nodepool.status.results import Results
from nodepool.zk.components import RegisteredPool
from nodepool.zk.drains import Drain, covering, host_names, moment, names_of, of_node
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


def remedy(drain: Drain) -> str:
    return f"`nodepool undrain {drain.name}` ends it"


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


def of_label(zk: Facade, label: str, depth: int = 1) -> Drain | None:
    """Return a drain if no pool gives out nodes of the label, or of the label of its backing
    nodes; None: one may do so.
    """
    drains = zk.readNotes(Drain)
    pools = [pool for pool in zk.getRegisteredPools() if label in pool.labels] if drains else []
    found = [_of_offer(zk, drains, pool, label) for pool in pools]
    backing = backing_of(zk, label) if depth and pools else ()
    found = found if all(found) else [of_label(zk, each, depth - 1) for each in backing]
    return next(filter(None, found), None)


def of_free_node(zk: Facade, node: Node) -> Drain | None:
    """Return the drain because of which no request gets a node."""
    found = zk.readNotes(Drain) if node.allocated_to is None else []
    return of_node(found, node, lambda name: zk.getNode(name, cached=True)) if found else None


def of_pool(zk: Facade, pool: RegisteredPool, labels: Collection[str] = ()) -> Drain | None:
    """Return a drain if the pool gives out no nodes of these labels.

    :param labels: empty: all that the pool offers.
    """
    drains, found = zk.readNotes(Drain), None
    for label in sorted(labels or pool.labels) if drains else ():
        found = _of_offer(zk, drains, pool, label)
        if found is None:
            break
    return found


def _of_offer(zk: Facade, drains: list[Drain], pool: RegisteredPool, label: str) -> Drain | None:
    """Return why a pool gives out no nodes of a label: also if all its hosts are drained."""
    provider, launcher = str(pool.provider_name), pool.content.get("hostname")
    names = {f"launcher {launcher}", f"provider {provider}", f"pool {provider}-{pool.name}"}
    names |= {f"label {label}"} | {
        f"image {name}"
        for name, entry in images_of(zk, label).items()
        if provider in entry["providers"]
    }
    hosts = [
        covering(drains, host_names(str(row["name"])))
        for report in zk.readReports()
        for name, one in report["providers"].items()
        # Backing nodes, which metastatic describes, are no hosts.
        if name == provider and one["driver"] != "metastatic"
        for row in one["hosts"]
    ]
    return covering(drains, names) or (hosts[0] if all(hosts) and hosts else None)


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

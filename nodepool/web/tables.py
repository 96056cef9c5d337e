"""The tables of ``/api/v1`` and of the pages: their rows, as JSON and CSV."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nodepool import status
from nodepool.config.model import Config
from nodepool.driver.provider import Provider
from nodepool.status import causes, cluster, health, known
from nodepool.status.explain import expected_wait, places, rates
from nodepool.status.image_details import image_details
from nodepool.status.once import Facade
from nodepool.zk.mirror.feed import Feed, user_of
from nodepool.zk.records import READY, Node, NodeRequest
from nodepool.zk.reports import number
from nodepool.zk.zookeeper import ZooKeeper

Rows = list[dict[str, Any]]
#: What a request waits for: texts and codes.
Waits = tuple[tuple[str, ...], tuple[str, ...]]
NOTHING: Waits = ((), ())
MOST_CHOICES = 200
"""Values of a key from which users can choose."""
#: Key -> type of its numbers: UNIX time in the past or (``due``) the future, seconds, bytes, bytes
#: per second, share of 1, and used/limit of resources.
TYPES = {
    **dict.fromkeys(
        ("since", "created", "age", "build_request_age", "error_time", "started"), "time"
    ),
    **dict.fromkeys(("next_try", "next_build"), "due"),
    **dict.fromkeys(("elapsed", "rebuild_age", "expected", "launch", "wait"), "seconds"),
    **dict.fromkeys(("bytes_total", "size"), "bytes"),
    **dict.fromkeys(("limits", "used"), "uses"),
    "progress": "share",
}
#: Record, what it waits for, declining pools, its row.
Kept = tuple[Any, Waits, list[str], dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """``columns``: key -> title of columns shown by default.

    :param row: keys of every row, in order, separated by spaces.
    """

    read: Callable[[Facade], Rows]
    columns: Mapping[str, str]
    row: str
    #: Keys with few values, from which users can choose on a page, and by which they can group.
    choices: tuple[str, ...] = ()
    #: Keys of the default order, each as for :func:`ordered`.
    order: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        return self.row.split()

    def shown(self) -> list[dict[str, str | None]]:
        """Return the columns with the type of their numbers, which decides how pages format
        them.
        """
        return [
            {"key": key, "title": title, "type": TYPES.get(key)}
            for key, title in self.columns.items()
        ]

    def more(self) -> list[dict[str, str | None]]:
        """Return the columns that users can add."""
        return [
            {"key": key, "title": key.replace("_", " ").capitalize(), "type": TYPES.get(key)}
            for key in self.keys
            if key not in self.columns
        ]


def ordered(rows: Rows, keys: Iterable[str]) -> Rows:
    """Return the rows in the order of these keys, empty values last; ``-KEY`` is descending."""
    for key in reversed(tuple(keys)):
        name = key.lstrip("-")
        present = [row for row in rows if row.get(name) is not None]
        present.sort(key=functools.partial(_order, name), reverse=key[0] == "-")
        rows = present + [row for row in rows if row.get(name) is None]
    return rows


def _order(name: str, row: Mapping[str, Any]) -> tuple[int, Any]:
    """Return a sort key: numbers before texts."""
    value = row[name]
    return (0, value) if isinstance(value, (int, float)) else (1, str(value))


def grouped(rows: Rows, key: str) -> tuple[Rows, list[tuple[str, int]]]:
    """Return the rows by group, the largest group first, and the size of each group."""
    names = [group_of(row, key) for row in rows]
    counts = sorted(Counter(names).items(), key=lambda each: (-each[1], each[0]))
    rank = {name: number for number, (name, _count) in enumerate(counts)}
    order = sorted(range(len(rows)), key=lambda number: rank[names[number]])
    return [rows[number] for number in order], counts


def group_of(row: Mapping[str, Any], key: str) -> str:
    """Return the name of the group of a row; empty without a value."""
    value = row.get(key)
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else ""
        if value is None
        else str(value)
    )


def values_of(rows: Rows, key: str) -> list[str]:
    """Return the values of a key; those of lists separately."""
    values = {
        value for row in rows for value in (row[key] if isinstance(row[key], list) else (row[key],))
    }
    return sorted(str(value) for value in values if value is not None)[:MOST_CHOICES]


class Charts(Protocol):
    """Recent launches and waiting times of the cluster."""

    def chart(self) -> list[dict[str, Any]]: ...


class Launcher(status.Explaining, Protocol):
    """The launcher or builder whose process serves the pages."""

    @property
    def config(self) -> Config | None: ...

    @property
    def feed(self) -> Feed | None: ...

    @property
    def trends(self) -> Charts | None: ...

    def getReadiness(self) -> tuple[bool, list[str]]: ...

    def getZK(self) -> ZooKeeper: ...

    def shown_config(self) -> dict[str, Any] | None: ...


class Leasing(Launcher, Protocol):
    """The launcher, whose providers run programs on nodes."""

    def getProviderManager(self, name: str) -> Provider: ...


class NodeRows:
    """Rows of nodes; a row is created again only if its record is another object.

    Records are never modified.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, bool, dict[str, Any]]] = {}

    def read(self, zk: Facade) -> Rows:
        """Return rows; times are UNIX seconds, ports are hidden as in ``/node-list``."""
        kept: dict[str, tuple[Any, bool, dict[str, Any]]] = {}
        for node in zk.readNodes():
            node_id = node.id or ""
            locked, known = bool(node.lock_contenders), self._kept.get(node_id)
            row = (
                known[2]
                if known is not None and known[0] is node and known[1] is locked
                else _node_row(node, locked)
            )
            kept[node_id] = (node, locked, row)
        self._kept = kept
        return [row for _node, _locked, row in kept.values()]


def _node_row(node: Node, locked: bool) -> dict[str, Any]:
    user = user_of(node.tenant_name, node.user_data)
    users = [user[key] for key in ("owner", "tenant", "project", "job") if key in user]
    assigned = f"request {node.allocated_to}" if node.allocated_to and node.state == READY else None
    return {
        "id": node.id,
        "labels": list(node.type),
        "state": node.state,
        "since": node.state_time,
        "created": number(node.created_time),
        "provider": node.provider,
        "pool": node.pool,
        "user": ", ".join(users) or assigned or node.hold_job or node.comment,
        "request": node.allocated_to,
        "locked": locked,
        "server": node.external_id,
        "address": node.interface_ip or node.public_ipv4 or node.private_ipv4 or node.public_ipv6,
        "port": status.port_of(node.connection_port),
        "username": node.username,
        "az": node.az,
        "hostname": node.hostname,
        "launcher": node.launcher,
        "tenant": node.tenant_name,
        "hold_job": node.hold_job,
        "comment": node.comment,
    }


class RequestRows:
    """Rows of requests, cached as those of nodes."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def read(self, zk: Facade) -> Rows:
        reasons: dict[str, list[dict[str, Any]]] = {}
        for report in zk.readReports():
            for group in report["waiting"]:
                for request_id in group["ids"]:
                    known = reasons.get(request_id)
                    reasons[request_id] = (
                        group["reasons"] if known is None else known + group["reasons"]
                    )
        #: Thousands of requests share one list of reasons.
        kept_waits: dict[int, Waits] = {}
        waits = {
            request_id: kept_waits.get(id(found)) or kept_waits.setdefault(id(found), _waits(found))
            for request_id, found in reasons.items()
        }
        found = zk.readRequests()
        declines = zk.readDeclines(found)
        kept: dict[str, Kept] = {}
        for request in found:
            request_id = request.id or ""
            waits_for, declined = waits.get(request_id, NOTHING), declines.get(request_id, [])
            known_row = self._kept.get(request_id)
            if (
                known_row is None
                or known_row[0] is not request
                or known_row[1:3] != (waits_for, declined)
            ):
                known_row = (
                    request,
                    waits_for,
                    declined,
                    _request_row(request, waits_for, declined),
                )
            kept[request_id] = known_row
        self._kept = kept
        line, served = places(found), rates(zk.readReports())
        return [_placed(entry, line.get(request_id), served) for request_id, entry in kept.items()]


def _waits(reasons: list[dict[str, Any]]) -> Waits:
    """Return the most informative reason, and all codes, starting with its code."""
    reason = causes.main_reason(reasons)
    if reason is None:
        return NOTHING
    return (causes.worded(reason),), (causes.root_code(reason), *(one["code"] for one in reasons))


def _placed(entry: Kept, place: int | None, served: Mapping[str, float]) -> dict[str, Any]:
    """Add the queue position, which depends on other requests, and the estimated seconds."""
    request, waits, _declined, row = entry
    stuck = bool(waits[1]) and waits[1][0] not in causes.FLOWING
    expected = None if place is None or stuck else expected_wait(served, request.node_types, place)
    return {**row, "place": place, "expected": None if expected is None else round(expected, 1)}


def _request_row(request: NodeRequest, waits: Waits, declined: list[str]) -> dict[str, Any]:
    return {
        "id": request.id,
        "state": request.state,
        "labels": list(request.node_types),
        "since": request.state_time,
        "created": number(request.created_time),
        "requestor": request.requestor,
        "tenant": request.tenant_name,
        "provider": request.provider,
        "relative_priority": request.relative_priority,
        "nodes": list(request.nodes),
        "reason": next(iter(waits[0]), None) or _main_decline(declined),
        "declined": declined,
        "codes": sorted(set(waits[1])),
        "event_id": request.event_id,
    }


def _main_decline(declined: list[str]) -> str | None:
    """Return why a pool that offers the labels declined it, or why any other did."""
    found = next(
        (text for text in declined if causes.NOT_OFFERED not in text), next(iter(declined), None)
    )
    others = len(declined) - 1
    return f"{found} (and {known.count_of(others, 'other pool')})" if others > 0 else found


def labels(zk: Facade) -> Rows:
    nodes = zk.countNodes()
    states, free = nodes.labels, nodes.free
    waiting: Counter[str] = Counter()
    for request in cluster.open_requests(zk.readRequests()):
        waiting.update(set(request.node_types))
    pools: dict[str, list[str]] = {}
    for pool in zk.getRegisteredPools():
        for label in pool.labels:
            pools.setdefault(label, []).append(f"{pool.provider_name}-{pool.name}")
    wanted = causes.min_ready_of(zk)
    lately: dict[str, dict[str, Any]] = {}
    for report in zk.readReports():
        lately.update(report["lately"])
    problems = Counter(str(row["label"]) for row in status.problem_list(zk).rows)
    return [
        {
            "label": name,
            "pools": sorted(pools.get(name, ())),
            "min_ready": wanted.get(name),
            "ready": free[name],
            "states": dict(states.get(name, {})),
            "waiting": waiting[name],
            "launch": lately.get(name, {}).get("launch"),
            "wait": lately.get(name, {}).get("wait"),
            "problems": problems[name],
        }
        for name in sorted({*states, *pools, *wanted, *waiting})
    ]


def images(zk: Facade) -> Rows:
    data = zk.readImages()
    builds: dict[str, Counter[str]] = {}
    uploads: dict[str, Counter[str]] = {}
    for build in data.builds:
        builds.setdefault(str(build.image_name), Counter())[str(build.state)] += 1
    for upload in data.uploads:
        uploads.setdefault(str(upload.image_name), Counter())[str(upload.state)] += 1
    problems = [
        row["problem"]
        for row in status.problem_list(zk).rows
        if str(row["problem"]).startswith("image ")
    ]
    return [
        {
            **row,
            "builds": dict(builds.get(row["image"], {})),
            "uploads": dict(uploads.get(row["image"], {})),
            "problem": next(
                (text for text in problems if text.startswith(f"image {row['image']}:")), None
            ),
        }
        for row in image_details(zk)
    ]


def problems(zk: Facade) -> Rows:
    """Return the problems with their severity, which the health of the cluster depends on."""
    return [
        {"severity": health.WORDS[trouble.level].lower(), **row}
        for row, trouble in zip(status.problem_list(zk).rows, health.of_problems(zk), strict=True)
    ]


TABLES = {
    "nodes": Table(
        lambda zk: NodeRows().read(zk),
        {
            "id": "Node",
            "labels": "Labels",
            "state": "State",
            "since": "Age",
            "provider": "Provider",
            "pool": "Pool",
            "user": "Used by",
            "locked": "Locked",
            "address": "Address",
        },
        (
            "id labels state since created provider pool user request locked server address "
            "port username az hostname launcher tenant hold_job comment"
        ),
        ("state", "provider", "pool", "labels"),
        ("-since",),
    ),
    "requests": Table(
        lambda zk: RequestRows().read(zk),
        {
            "id": "Request",
            "state": "State",
            "labels": "Labels",
            "since": "Age",
            "requestor": "Requestor",
            "nodes": "Nodes",
            "place": "Queue position",
            "expected": "Estimated wait",
            "reason": "Reason",
        },
        (
            "id state labels since created requestor tenant provider relative_priority nodes "
            "reason declined codes event_id place expected"
        ),
        ("state", "labels", "requestor", "tenant"),
        ("place", "-since"),
    ),
    "labels": Table(
        labels,
        {
            "label": "Label",
            "min_ready": "Min ready",
            "ready": "Ready",
            "waiting": "Requests waiting",
            "launch": "Launch",
            "wait": "Wait",
            "pools": "Pools",
            "problems": "Problems",
        },
        "label pools min_ready ready states waiting launch wait problems",
    ),
    "images": Table(
        images,
        {
            "image": "Image",
            "state": "State",
            "phase": "Phase",
            "progress": "Progress",
            "labels": "Labels",
            "age": "Age",
            "next_build": "Next build",
            "size": "Size",
            "formats": "Formats",
            "uploads": "Uploads",
            "problem": "Problem",
        },
        (
            "image state labels providers age rebuild_age next_build formats size phase "
            "started expected progress builder paused build_request build_request_age builds "
            "uploads problem"
        ),
        ("state", "labels"),
    ),
    "builds": Table(
        lambda zk: status.dib_image_list(zk, detail=True).rows,
        {
            "id": "Build",
            "image": "Image",
            "builder": "Builder",
            "formats": "Formats",
            "state": "State",
            "age": "Age",
            "phase": "Phase",
            "progress": "Progress",
            "elapsed": "Elapsed",
            "expected": "Expected",
            "reason": "Reason",
        },
        (
            "id image builder formats state age phase elapsed expected exit_code reason log "
            "last_line progress"
        ),
        ("state", "image", "builder"),
        ("-age",),
    ),
    "uploads": Table(
        lambda zk: status.image_list(zk, detail=True).rows,
        {
            "image": "Image",
            "provider": "Provider",
            "state": "State",
            "age": "Age",
            "external_name": "Name in provider",
            "bytes_total": "Size",
            "reason": "Reason",
        },
        ("id upload_id provider image external_name external_id state age bytes_total reason"),
        ("state", "image", "provider"),
        ("-age",),
    ),
    "providers": Table(
        lambda zk: cluster.providers(zk).rows,
        {
            **cluster.PROVIDER_COLUMNS,
            "pace": "Call rate",
            "error": "Last failed call",
            "error_time": "Age of failure",
        },
        (
            "provider launcher driver nodes states limits used limit hosts launching calls "
            "pace error error_time problems hosts_down"
        ),
    ),
    "pools": Table(
        lambda zk: cluster.pools(zk).rows,
        cluster.POOL_COLUMNS,
        "provider pool launcher labels paused nodes max_servers priority full",
        ("provider",),
    ),
    "hosts": Table(
        lambda zk: cluster.hosts(zk).rows,
        cluster.HOST_COLUMNS,
        "host provider launcher state used nodes problem",
        ("provider", "state"),
    ),
    "tenants": Table(
        lambda zk: cluster.tenants(zk).rows,
        cluster.TENANT_COLUMNS,
        "tenant launcher limits used limit",
    ),
    "daemons": Table(
        lambda zk: cluster.daemons(zk).rows,
        cluster.DAEMON_COLUMNS,
        "kind host state version running config details file",
    ),
    "waiting": Table(
        lambda zk: cluster.by_cause(zk).rows,
        cluster.WAITING_COLUMNS,
        (
            "key cause count label_counts tenants ids oldest reason suggestion code codes "
            "problem labels state since"
        ),
        (),
        ("-problem", "-count"),
    ),
    "problems": Table(
        problems,
        {"severity": "Severity", "since": "Age", **status.PROBLEM_COLUMNS},
        "severity launcher provider label problem since",
        ("severity", "provider", "label"),
        ("-severity",),
    ),
}

"""The tables of ``/api/v1`` and of the pages: what each row has, as JSON and CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nodepool import status
from nodepool.status import cluster
from nodepool.status.results import to_int_or_none
from nodepool.zk.records import READY

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """``read`` gets the NodePool; ``columns``: key -> title of what a page shows at first."""

    read: Callable[[Any], Rows]
    columns: Mapping[str, str]


def nodes(nodepool: Any) -> Rows:
    """``since`` and ``created`` are UNIX seconds; ports are hidden as in ``/node-list``."""
    return [
        {
            "id": node.id,
            "labels": list(node.type),
            "state": node.state,
            "since": node.state_time,
            "created": node.created_time,
            "provider": node.provider,
            "pool": node.pool,
            "request": node.allocated_to,
            "locked": bool(node.lock_contenders),
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
        for node in nodepool.getZK().readNodes(with_contenders=True)
    ]


def requests(nodepool: Any) -> Rows:
    zk = nodepool.getZK()
    waits: dict[str, tuple[list[str], list[str]]] = {}
    for report in zk.readReports():
        for group in report["waiting"]:
            texts = [f"{one['pool']}: {one['text']}" if one["pool"] else one["text"] for one in group["reasons"]]
            codes = [one["code"] for one in group["reasons"]]
            for request_id in group["ids"]:
                known = waits.setdefault(request_id, ([], []))
                known[0].extend(texts)
                known[1].extend(codes)
    found = zk.readRequests()
    declines = zk.readDeclines(found)
    rows = []
    for request in found:
        texts, codes = waits.get(request.id, ([], []))
        rows.append(
            {
                "id": request.id,
                "state": request.state,
                "labels": list(request.node_types),
                "since": request.state_time,
                "created": request.created_time if isinstance(request.created_time, (int, float)) else None,
                "requestor": request.requestor,
                "tenant": request.tenant_name,
                "provider": request.provider,
                "relative_priority": request.relative_priority,
                "nodes": list(request.nodes),
                "reason": "; ".join(dict.fromkeys([*texts, *declines.get(request.id, [])])) or None,
                "codes": sorted(set(codes)),
                "event_id": request.event_id,
            }
        )
    return rows


def labels(nodepool: Any) -> Rows:
    zk = nodepool.getZK()
    states: dict[str, Counter[str]] = {}
    for node in zk.readNodes(with_contenders=False):
        for label in node.type:
            states.setdefault(label, Counter())[str(node.state)] += 1
    waiting: Counter[str] = Counter()
    for request in cluster.open_requests(zk.readRequests()):
        waiting.update(set(request.node_types))
    pools: dict[str, list[str]] = {}
    for pool in zk.getRegisteredPools():
        for label in pool.labels:
            pools.setdefault(label, []).append(f"{pool.provider_name}-{pool.name}")
    wanted: dict[str, int] = {}
    lately: dict[str, dict[str, Any]] = {}
    for report in zk.readReports():
        for name, entry in report["labels"].items():
            wanted[name] = wanted.get(name, 0) + (to_int_or_none(entry.get("min_ready")) or 0)
        lately.update(report["lately"])
    problems = Counter(str(row["label"]) for row in status.problem_list(zk).rows)
    return [
        {
            "label": name,
            "pools": sorted(pools.get(name, ())),
            "min_ready": wanted.get(name),
            "ready": states.get(name, Counter())[READY],
            "states": dict(states.get(name, {})),
            "waiting": waiting[name],
            "launch": lately.get(name, {}).get("launch"),
            "wait": lately.get(name, {}).get("wait"),
            "problems": problems[name],
        }
        for name in sorted({*states, *pools, *wanted, *waiting})
    ]


def images(nodepool: Any) -> Rows:
    zk = nodepool.getZK()
    data = zk.readImages()
    builds: dict[str, Counter[str]] = {}
    uploads: dict[str, Counter[str]] = {}
    for build in data.builds:
        builds.setdefault(str(build.image_name), Counter())[str(build.state)] += 1
    for upload in data.uploads:
        uploads.setdefault(str(upload.image_name), Counter())[str(upload.state)] += 1
    problems = [row["problem"] for row in status.problem_list(zk).rows if str(row["problem"]).startswith("image ")]
    return [
        {
            **row,
            "builds": dict(builds.get(row["image"], {})),
            "uploads": dict(uploads.get(row["image"], {})),
            "problem": next((text for text in problems if text.startswith(f"image {row['image']}:")), None),
        }
        for row in status.image_status(zk).rows
    ]


def _of_zk(read: Callable[[Any], status.Results]) -> Callable[[Any], Rows]:
    return lambda nodepool: read(nodepool.getZK()).rows


TABLES = {
    "nodes": Table(nodes, {
        "id": "Node", "labels": "Labels", "state": "State", "since": "Age", "provider": "Provider", "pool": "Pool",
        "request": "Request", "locked": "Locked", "address": "Address", "comment": "Comment",
    }),
    "requests": Table(requests, {
        "id": "Request", "state": "State", "labels": "Labels", "since": "Age", "requestor": "Requestor", "nodes": "Nodes",
        "reason": "Waits or declined because",
    }),
    "labels": Table(labels, {
        "label": "Label", "min_ready": "Min ready", "ready": "Ready", "waiting": "Requests waiting", "launch": "Launch, s",
        "wait": "Wait, s", "pools": "Pools", "problems": "Problems",
    }),
    "images": Table(images, {
        "image": "Image", "paused": "Paused", "build_request": "Build request", "builds": "Builds", "uploads": "Uploads",
        "problem": "Problem",
    }),
    "builds": Table(_of_zk(lambda zk: status.dib_image_list(zk, detail=True)), status.BUILD_DETAIL_COLUMNS),
    "uploads": Table(_of_zk(lambda zk: status.image_list(zk, detail=True)), status.UPLOAD_DETAIL_COLUMNS),
    "providers": Table(_of_zk(cluster.providers), cluster.PROVIDER_COLUMNS),
    "pools": Table(_of_zk(cluster.pools), cluster.POOL_COLUMNS),
    "daemons": Table(_of_zk(cluster.daemons), cluster.DAEMON_COLUMNS),
    "waiting": Table(_of_zk(cluster.waiting), cluster.WAITING_COLUMNS),
    "problems": Table(_of_zk(status.problem_list), status.PROBLEM_COLUMNS),
}  # fmt: skip

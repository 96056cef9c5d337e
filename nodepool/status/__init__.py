"""Rows read from ZooKeeper and their representations, for command line and web.

Titles, keys and their order are the contract (CLI-4 to CLI-6). Nothing here writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from nodepool.base.problems import image_problems, with_suggestion
from nodepool.reasons import Reason, render
from nodepool.status.causes import derived_problems
from nodepool.status.images import (
    BUILD_COLUMNS,
    BUILD_DETAIL_COLUMNS,
    IMAGE_STATUS_COLUMNS,
    PROGRESS_COLUMNS,
    UPLOAD_COLUMNS,
    UPLOAD_DETAIL_COLUMNS,
    build_request_state,
    dib_image_list,
    image_list,
    image_progress,
    image_status,
)
from nodepool.status.known import published_problems, read_progress
from nodepool.status.once import Facade, remembered
from nodepool.status.results import (
    FORMATS,
    Results,
    format_age,
    format_bytes,
    output,
    to_int_or_none,
)
from nodepool.zk.records import Node
from nodepool.zk.zookeeper import ZooKeeper

REDACTED = "redacted"

NODE_COLUMNS = {
    "id": "ID",
    "provider": "Provider",
    "label": "Label",
    "server_id": "Server ID",
    "public_ipv4": "Public IPv4",
    "ipv6": "IPv6",
    "state": "State",
    "age": "Age",
    "locked": "Locked",
}
NODE_DETAIL_COLUMNS = {
    **NODE_COLUMNS,
    "pool": "Pool",
    "hostname": "Hostname",
    "private_ipv4": "Private IPv4",
    "AZ": "AZ",
    "username": "Username",
    "connection_port": "Port",
    "launcher": "Launcher",
    "allocated_to": "Allocated To",
    "hold_job": "Hold Job",
    "comment": "Comment",
    "user_data": "User Data",
    "driver_data": "Driver Data",
}
WAITING_COLUMNS = {
    "id": "Request ID",
    "node_types": "Node Types",
    "state": "State",
    "reason": "Waits Because",
}
REQUEST_COLUMNS = {
    "id": "Request ID",
    "relative_priority": "Priority",
    "state": "State",
    "requestor": "Requestor",
    "node_types": "Node Types",
    "nodes": "Nodes",
    "declined_by": "Declined By",
    "event_id": "Event ID",
}
REQUEST_DETAIL_COLUMNS = {**REQUEST_COLUMNS, "reasons": "Declined Because"}
LABEL_COLUMNS = {"label": "Label"}
PROBLEM_COLUMNS = {
    "launcher": "Launcher",
    "provider": "Provider",
    "label": "Label",
    "problem": "Problem",
}
ALIEN_COLUMNS = {"provider": "Provider", "name": "Name", "image_id": "Image ID"}
PROVIDER_IMAGE_COLUMNS = {"image": "Image Name", "build_id": "Build ID", "upload_ids": "Upload IDs"}
PROVIDER_NODE_COLUMNS = {"id": "ID", "server_id": "Server ID"}


def port_of(port: object) -> Any:
    """Return the port; other values are hidden, since container drivers store credentials."""
    if isinstance(port, bool):
        return REDACTED
    if isinstance(port, int):
        return port
    if isinstance(port, str) and port.strip().isdecimal():
        return port
    return REDACTED


def _node_row(node: Node, now: float) -> dict[str, Any]:
    return {
        "id": node.id,
        "provider": node.provider,
        "label": list(node.type),
        "server_id": node.external_id,
        "public_ipv4": node.public_ipv4,
        "ipv6": node.public_ipv6,
        "state": node.state,
        "age": None
        if to_int_or_none(node.state_time) is None
        else format_age(now - (node.state_time or 0)),
        "locked": "locked" if node.lock_contenders else "unlocked",
        "pool": node.pool,
        "hostname": node.hostname,
        "private_ipv4": node.private_ipv4,
        "AZ": node.az,
        "username": node.username,
        "connection_port": port_of(node.connection_port),
        "launcher": node.launcher,
        "allocated_to": node.allocated_to,
        "hold_job": node.hold_job,
        "comment": node.comment,
        "user_data": node.user_data,
        "driver_data": node.driver_data,
    }


def node_list(
    zk: Facade,
    node_id: str | None = None,
    detail: bool = True,
    clock: Callable[[], float] = time.time,
) -> Results:
    """Return all nodes by id, or the requested one (no row if it does not exist)."""
    now = clock()
    nodes = zk.readNodes()
    if node_id is not None:
        nodes = [node for node in nodes if node.id == node_id]
    rows = [_node_row(node, now) for node in sorted(nodes, key=lambda node: node.id or "")]
    return Results(rows, NODE_DETAIL_COLUMNS if detail else NODE_COLUMNS)


def request_list(zk: Facade, detail: bool = False) -> Results:
    """Return all requests by id.

    ``reasons`` (with ``detail`` also in the table) contains the decline reasons.
    """
    requests = sorted(zk.readRequests(), key=lambda request: request.id or "")
    reasons = zk.readDeclines(requests)
    rows = [
        {
            "id": request.id,
            "relative_priority": request.relative_priority,
            "state": request.state,
            "requestor": request.requestor,
            "node_types": list(request.node_types),
            "nodes": list(request.nodes),
            "declined_by": list(request.declined_by),
            "event_id": request.event_id,
            "reasons": reasons.get(request.id or "", []),
        }
        for request in requests
    ]
    return Results(rows, REQUEST_DETAIL_COLUMNS if detail else REQUEST_COLUMNS)


class Explaining(Protocol):
    """A launcher that explains what requests wait for, as (id, labels, state, reasons)."""

    def explain(self) -> list[tuple[str, tuple[str, ...], str, tuple[Reason, ...]]]: ...


def waiting_list(nodepool: Explaining) -> Results:
    """Return unfulfilled requests that this launcher knows, each with its reason."""
    rows = [
        {
            "id": request_id,
            "node_types": list(labels),
            "state": state,
            "reason": render(reasons),
            "codes": [reason.code.word for reason in reasons],
        }
        for request_id, labels, state, reasons in nodepool.explain()
    ]
    return Results(rows, WAITING_COLUMNS)


def label_list(zk: ZooKeeper) -> Results:
    """Return the labels that any registered pool of any launcher offers."""
    labels = {label for pool in zk.getRegisteredPools() for label in pool.supported_labels or ()}
    return Results([{"label": label} for label in sorted(labels)], LABEL_COLUMNS)


def problem_rows(zk: Facade) -> list[dict[str, Any]]:
    """Return published problems of daemons, and problems derived from the cluster's state."""

    def read() -> list[dict[str, Any]]:
        found = (*image_problems(read_progress(zk)), *derived_problems(zk))
        return [
            *published_problems(zk),
            *({"launcher": each.host, "since": None, **each.record()} for each in found),
        ]

    return remembered(zk, "problems", read)


def problem_list(zk: Facade) -> Results:
    """Return all problems, each with its suggestion."""
    rows = [dict(row) for row in problem_rows(zk)]
    for row in rows:
        row["problem"] = with_suggestion(row["problem"], row.pop("help", None) or "")
    return Results(rows, PROBLEM_COLUMNS)


def provider_images(zk: Facade, provider: str) -> Results:
    """Return builds that have a container of the provider, with sorted upload ids."""
    images = zk.readImages()
    upload_ids: dict[tuple[str, str], list[str]] = {
        build: [] for build, providers in images.providers.items() if provider in providers
    }
    for upload in images.uploads:
        if upload.provider_name == provider:
            upload_ids.setdefault((upload.image_name or "", upload.build_id or ""), []).append(
                upload.id or ""
            )
    rows = [
        {"image": image, "build_id": build, "upload_ids": sorted(ids)}
        for (image, build), ids in sorted(upload_ids.items())
    ]
    return Results(rows, PROVIDER_IMAGE_COLUMNS)


def provider_nodes(zk: Facade, provider: str) -> Results:
    nodes = sorted((n for n in zk.readNodes() if n.provider == provider), key=lambda n: n.id or "")
    return Results([{"id": n.id, "server_id": n.external_id} for n in nodes], PROVIDER_NODE_COLUMNS)


__all__ = [
    "ALIEN_COLUMNS",
    "BUILD_COLUMNS",
    "BUILD_DETAIL_COLUMNS",
    "FORMATS",
    "IMAGE_STATUS_COLUMNS",
    "LABEL_COLUMNS",
    "NODE_COLUMNS",
    "NODE_DETAIL_COLUMNS",
    "PROBLEM_COLUMNS",
    "PROGRESS_COLUMNS",
    "PROVIDER_IMAGE_COLUMNS",
    "PROVIDER_NODE_COLUMNS",
    "REDACTED",
    "REQUEST_COLUMNS",
    "REQUEST_DETAIL_COLUMNS",
    "UPLOAD_COLUMNS",
    "UPLOAD_DETAIL_COLUMNS",
    "WAITING_COLUMNS",
    "Results",
    "build_request_state",
    "dib_image_list",
    "format_age",
    "format_bytes",
    "image_list",
    "image_progress",
    "image_status",
    "label_list",
    "node_list",
    "output",
    "port_of",
    "problem_list",
    "provider_images",
    "provider_nodes",
    "request_list",
    "waiting_list",
]

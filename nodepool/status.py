"""What the command line and the web show: rows read from ZooKeeper and their representations.

Titles, keys and their order are the contract (cli-web-metrics.md sections 4 to 6).  Nothing here writes.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import prettytable

FORMATS = ("table", "json", "yaml", "csv")
REDACTED = "redacted"

_AGE = re.compile(r"\d{2,}:\d\d:\d\d:\d\d\Z")

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
UPLOAD_COLUMNS = {
    "id": "Build ID",
    "upload_id": "Upload ID",
    "provider": "Provider",
    "image": "Image",
    "external_name": "Provider Image Name",
    "external_id": "Provider Image ID",
    "state": "State",
    "age": "Age",
}
BUILD_COLUMNS = {
    "id": "ID",
    "image": "Image",
    "builder": "Builder",
    "formats": "Formats",
    "state": "State",
    "age": "Age",
}
IMAGE_STATUS_COLUMNS = {
    "image": "Image",
    "paused": "Paused",
    "build_request": "Build Request",
    "build_request_age": "Build Request Age",
}
WAITING_COLUMNS = {"id": "Request ID", "node_types": "Node Types", "state": "State", "reason": "Waits Because"}
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
LABEL_COLUMNS = {"label": "Label"}
ALIEN_COLUMNS = {"provider": "Provider", "name": "Name", "image_id": "Image ID"}
PROVIDER_IMAGE_COLUMNS = {"image": "Image Name", "build_id": "Build ID", "upload_ids": "Upload IDs"}
PROVIDER_NODE_COLUMNS = {"id": "ID", "server_id": "Server ID"}


@dataclass(frozen=True)
class Results:
    """Rows as they appear in JSON, and the table's columns: key -> title, in order."""

    rows: list[dict[str, Any]]
    columns: Mapping[str, str]


def format_age(seconds: float) -> str:
    """``DD:HH:MM:SS``; days may grow."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days:02}:{hour:02}:{minute:02}:{second:02}"


def _whole(value: float | None) -> int | None:
    return int(value) if isinstance(value, (int, float)) else None


def _port(port: Any) -> Any:
    """Container drivers keep credentials in the port: anything but a number is hidden."""
    if isinstance(port, bool):
        return REDACTED
    if isinstance(port, int):
        return port
    if isinstance(port, str) and port.strip().isdecimal():
        return port
    return REDACTED


def _node_row(node: Any, now: float) -> dict[str, Any]:
    return {
        "id": node.id,
        "provider": node.provider,
        "label": list(node.type),
        "server_id": node.external_id,
        "public_ipv4": node.public_ipv4,
        "ipv6": node.public_ipv6,
        "state": node.state,
        "age": None if _whole(node.state_time) is None else format_age(now - node.state_time),
        "locked": "locked" if node.lock_contenders else "unlocked",
        "pool": node.pool,
        "hostname": node.hostname,
        "private_ipv4": node.private_ipv4,
        "AZ": node.az,
        "username": node.username,
        "connection_port": _port(node.connection_port),
        "launcher": node.launcher,
        "allocated_to": node.allocated_to,
        "hold_job": node.hold_job,
        "comment": node.comment,
        "user_data": node.user_data,
        "driver_data": node.driver_data,
    }


def node_list(
    zk: Any, node_id: str | None = None, detail: bool = True, clock: Callable[[], float] = time.time
) -> Results:
    """All nodes by id, or the one node asked for (no row when it does not exist)."""
    now = clock()
    nodes = zk.readNodes(with_contenders=True)
    if node_id is not None:
        nodes = [node for node in nodes if node.id == node_id]
    rows = [_node_row(node, now) for node in sorted(nodes, key=lambda node: node.id)]
    return Results(rows, NODE_DETAIL_COLUMNS if detail else NODE_COLUMNS)


def image_list(zk: Any) -> Results:
    """Image uploads; ``age`` is the UNIX time of the state change."""
    uploads = sorted(
        zk.readImages().uploads, key=lambda u: (u.image_name, u.build_id, u.provider_name, u.id)
    )
    rows = [
        {
            "id": upload.build_id,
            "upload_id": upload.id,
            "provider": upload.provider_name,
            "image": upload.image_name,
            "external_name": upload.external_name,
            "external_id": upload.external_id,
            "state": upload.state,
            "age": _whole(upload.state_time),
        }
        for upload in uploads
    ]
    return Results(rows, UPLOAD_COLUMNS)


def dib_image_list(zk: Any) -> Results:
    """Image builds; those of an image paused through ZooKeeper have the state ``paused``."""
    images = zk.readImages()
    rows = [
        {
            "id": f"{build.image_name}-{build.id}",
            "image": build.image_name,
            "builder": build.builder,
            "formats": list(build.formats),
            "state": "paused" if build.image_name in images.paused else build.state,
            "age": _whole(build.state_time),
        }
        for build in sorted(images.builds, key=lambda b: (b.image_name, b.id))
    ]
    return Results(rows, BUILD_COLUMNS)


def _created(build: Any) -> float:
    """When the build record was made (UNIX time by the clock of ZooKeeper)."""
    return build.stat.ctime / 1000 if build.stat is not None else 0.0


def build_request_state(name: str, images: Any) -> str | None:
    """None without a request, ``building`` when a builder is at work on the image, else ``pending``."""
    if name not in images.requests:
        return None
    lock_created, has_contender = images.build_locks.get(name, (0.0, False))
    builds = [build for build in images.builds if build.image_name == name]
    if not has_contender or not builds:
        return "pending"
    current = max(builds, key=lambda build: (build.state == "building", _created(build)))
    return "building" if _created(current) >= lock_created else "pending"


def image_status(zk: Any) -> Results:
    """Every image known in ZooKeeper; ``build_request_age`` is the UNIX time of the request."""
    images = zk.readImages()
    names = {build.image_name for build in images.builds}
    names |= set(images.names) | set(images.paused) | set(images.requests) | set(images.build_locks)
    rows = [
        {
            "image": name,
            "paused": name in images.paused,
            "build_request": build_request_state(name, images),
            "build_request_age": _whole(images.requests.get(name)),
        }
        for name in sorted(names)
    ]
    return Results(rows, IMAGE_STATUS_COLUMNS)


def request_list(zk: Any) -> Results:
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
        }
        for request in sorted(zk.readRequests(), key=lambda request: request.id)
    ]
    return Results(rows, REQUEST_COLUMNS)


def waiting_list(nodepool: Any) -> Results:
    """Requests that this launcher has seen and that are not fulfilled yet, each with the reason why."""
    rows = [
        {"id": request_id, "node_types": list(labels), "state": state, "reason": reason}
        for request_id, labels, state, reason in nodepool.explain()
    ]
    return Results(rows, WAITING_COLUMNS)


def label_list(zk: Any) -> Results:
    """Labels that any registered pool of any launcher offers."""
    labels = {label for pool in zk.getRegisteredPools() for label in pool.supported_labels or ()}
    return Results([{"label": label} for label in sorted(labels)], LABEL_COLUMNS)


def provider_images(zk: Any, provider: str) -> Results:
    """Builds that have a container of the provider; upload ids sorted."""
    images = zk.readImages()
    upload_ids: dict[tuple[str, str], list[str]] = {
        build: [] for build, providers in images.providers.items() if provider in providers
    }
    for upload in images.uploads:
        if upload.provider_name == provider:
            upload_ids.setdefault((upload.image_name, upload.build_id), []).append(upload.id)
    rows = [
        {"image": image, "build_id": build, "upload_ids": sorted(ids)}
        for (image, build), ids in sorted(upload_ids.items())
    ]
    return Results(rows, PROVIDER_IMAGE_COLUMNS)


def provider_nodes(zk: Any, provider: str) -> Results:
    nodes = sorted((n for n in zk.readNodes(with_contenders=False) if n.provider == provider), key=lambda n: n.id)
    return Results([{"id": n.id, "server_id": n.external_id} for n in nodes], PROVIDER_NODE_COLUMNS)


def _cell(key: str, value: Any, now: float) -> Any:
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    if key in ("age", "build_request_age") and not (isinstance(value, str) and _AGE.match(value)):
        return format_age(now - value)
    return str(value)


def _selected(results: Results, fields: Iterable[str] | None) -> dict[str, str]:
    if fields is None:
        return dict(results.columns)
    wanted = set(fields)
    return {key: title for key, title in results.columns.items() if key in wanted}


def _table(results: Results, fields: Iterable[str] | None, now: float) -> str:
    columns = _selected(results, fields)
    table = prettytable.PrettyTable(list(columns.values()))
    table.align = "l"
    for row in results.rows:
        table.add_row([_cell(key, row[key], now) for key in columns])
    return str(table)


def _csv(results: Results, now: float) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(results.columns)
    writer.writerows([_cell(key, row[key], now) for key in results.columns] for row in results.rows)
    return stream.getvalue().rstrip("\n")


def _plain(value: Any) -> Any:
    """Values of records that are no JSON (none are expected) as text."""
    if isinstance(value, (datetime.datetime, set, frozenset, bytes)):
        return str(value)
    return repr(value)


def output(
    results: Results,
    fmt: str,
    fields: Iterable[str] | None = None,
    clock: Callable[[], float] = time.time,
) -> str:
    """The text of the results, without a final newline.

    ``pretty`` (or ``table``) honours ``fields`` in the table's order; ``json`` holds all keys;
    ``yaml`` and ``csv`` hold the table's columns.

    :raises ValueError: unknown format.
    """
    if fmt in ("pretty", "table"):
        return _table(results, fields, clock())
    if fmt == "json":
        return json.dumps(results.rows, default=_plain)
    if fmt == "yaml":
        import yaml

        rows = json.loads(json.dumps(results.rows, default=_plain))
        rows = [{key: row[key] for key in results.columns} for row in rows]
        return yaml.safe_dump(rows, sort_keys=False, allow_unicode=True).rstrip("\n")
    if fmt == "csv":
        return _csv(results, clock())
    raise ValueError(f"unknown output format {fmt!r}; use one of pretty, {', '.join(FORMATS)}")

"""What each launcher tells of itself and of the requests that it deals with; beside the tree of release 11.0.0.

``/nodepool/launcher-reports/<host>-<process id>``, percent-quoted: ephemeral, a JSON object, written by its launcher every
other second at most, and only when something has changed. Commands read them; each launcher mirrors them, so that its pages
tell of the whole cluster.
"""

from __future__ import annotations

import json
import logging
import zlib
from typing import Any
from urllib.parse import quote

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.protocol.states import ZnodeStat

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.records import LARGEST as LARGEST_NUMBER
from nodepool.zk.records import RecordError, parse_object, texts_of
from nodepool.zk.records.base import BaseModel

ROOT = "/nodepool/launcher-reports"
TIMEOUT = 30.0
"""Seconds for one answer of the server."""
LARGEST = 512 << 10
"""Bytes of a report: ZooKeeper takes no more than a mebibyte, and ends the connection of who sends more."""

#: What every report has.
_SHAPE = {
    "hostname": str, "config": dict, "details": list, "providers": dict, "not_running": dict, "labels": dict, "lately": dict,
    "tenants": dict, "waiting": list,
}  # fmt: skip

log = logging.getLogger("nodepool.zk.reports")


def path(identifier: str) -> str:
    return f"{ROOT}/{quote(identifier, safe='')}"


def parse(data: bytes | None) -> dict[str, Any]:
    """:raises RecordError: it is none."""
    try:
        # What a hostile record would unpack to is bounded.
        text = zlib.decompressobj().decompress(data or b"", 32 * LARGEST)
    except zlib.error as error:
        raise RecordError(f"the report is damaged: {error}") from None
    content = parse_object(text)
    if content is None:
        raise RecordError("the znode is empty")
    for key, kind in _SHAPE.items():
        if not isinstance(content.get(key), kind):
            raise RecordError(f"{key} is missing or no {kind.__name__}")
    for key in ("providers", "labels", "lately"):
        content[key] = {str(name): value for name, value in content[key].items() if isinstance(value, dict)}
    content["waiting"] = [group for each in content["waiting"] if (group := _group(each)) is not None]
    return content


def _group(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    since, count, reasons = value.get("since"), value.get("count"), value.get("reasons")
    return {
        "labels": texts_of(value, "labels"),
        "state": str(value.get("state")),
        "since": since if isinstance(since, (int, float)) and abs(since) < LARGEST_NUMBER else 0,
        "count": count if isinstance(count, int) else 0,
        "ids": texts_of(value, "ids"),
        "reasons": [
            {key: str(reason.get(key) or "") for key in ("code", "pool", "text")}
            for reason in (reasons if isinstance(reasons, list) else ())
            if isinstance(reason, dict)
        ],
    }


def serialize(content: dict[str, Any]) -> bytes:
    """:raises ValueError: it is larger than :data:`LARGEST`."""
    data = zlib.compress(json.dumps(content).encode())
    if len(data) > LARGEST:
        raise ValueError(f"the report has {len(data)} bytes, {LARGEST} are allowed")
    return data


def write(kazoo: KazooClient, identifier: str, content: dict[str, Any]) -> None:
    """:raises KazooException: no connection, or no answer in time."""
    data = serialize(content)
    try:
        kazoo.set_async(path(identifier), data).get(timeout=TIMEOUT)
    except NoNodeError:
        try:
            kazoo.create_async(path(identifier), data, ephemeral=True, makepath=True).get(timeout=TIMEOUT)
        except NodeExistsError:
            pass  # of our last session; it is written again when that has ended


def remove(kazoo: KazooClient, identifier: str) -> None:
    """:raises KazooException: no connection, or no answer in time."""
    try:
        kazoo.delete_async(path(identifier)).get(timeout=TIMEOUT)
    except NoNodeError:
        pass


def read(kazoo: KazooClient) -> list[dict[str, Any]]:
    """All that can be understood, by name; writes nothing.

    :raises KazooException: no connection, or no answer in time.
    """
    try:
        names = sorted(kazoo.get_children_async(ROOT).get(timeout=TIMEOUT))
    except NoNodeError:
        return []
    found = []
    for name, answer in [(name, kazoo.get_async(f"{ROOT}/{name}")) for name in names]:
        try:
            found.append(parse(answer.get(timeout=TIMEOUT)[0]))
        except NoNodeError:
            continue
        except RecordError as error:
            log.warning("Ignoring %s/%s: %s", ROOT, name, error)
    return found


class ReportTree(Tree[Any]):
    """The reports of all launchers by name of their znode."""

    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, ROOT)
        self.reports: dict[str, dict[str, Any]] = {}

    def wants_data(self, parts: list[str]) -> bool:
        return len(parts) == 1

    def wants_children(self, parts: list[str], stat: ZnodeStat | None) -> bool:
        return False

    def known_paths(self) -> set[str]:
        return {f"{ROOT}/{name}" for name in self.reports}

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        content = parse(data)
        with self.lock:
            self.reports[parts[0]] = content

    def store_own(self, parts: list[str], path: str, record: BaseModel, stat: ZnodeStat) -> None:
        raise RecordError("reports are not written through the mirror")

    def vanished(self, parts: list[str], path: str) -> None:
        with self.lock:
            self.reports.pop(parts[0], None)

    def snapshot(self) -> list[dict[str, Any]]:
        with self.lock:
            return [content for _name, content in sorted(self.reports.items())]

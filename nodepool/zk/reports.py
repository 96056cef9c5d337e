"""Reports of launchers about themselves, their configuration and their requests.

Outside the tree of 11.0.0: ``/nodepool/launcher-reports/<host>-<process id>``, percent-quoted: ephemeral, a JSON
object, written by its launcher every other second at most, and only after changes. Commands read the reports; each
launcher mirrors them, so that its pages show the whole cluster. ``/nodepool/launcher-configs/<host>-<process id>`` is
similar: the configuration in force without possible secrets, written after changes, and read when a user requests it.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from kazoo.client import KazooClient
from kazoo.protocol.states import ZnodeStat

from nodepool.zk import reading
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.reading import answers, children
from nodepool.zk.records import LARGEST as LARGEST_NUMBER
from nodepool.zk.records import RecordError, parse_object, texts_of

ROOT, CONFIGS = "/nodepool/launcher-reports", "/nodepool/launcher-configs"
#: Bytes of a report: ZooKeeper closes the connection of a client that sends more than 1 MiB.
LARGEST = 512 << 10

#: Required keys of a report.
_SHAPE = {
    "hostname": str, "config": dict, "details": list, "providers": dict, "not_running": dict, "labels": dict, "lately": dict,
    "tenants": dict, "waiting": list,
}  # fmt: skip

#: Keys of a reason: texts, empty if a launcher of another version does not publish them.
REASON = ("code", "pool", "text", "help", "root", "request", "blocker", "headline")

#: Required keys of a configuration.
_CONFIG_SHAPE = {
    "hostname": str, "labels": dict, "diskimages": dict, "providers": dict, "tenant-resource-limits": dict,
}  # fmt: skip

log = logging.getLogger("nodepool.zk.reports")


def path(identifier: str, root: str = ROOT) -> str:
    return f"{root}/{quote(identifier, safe='')}"


def parse(data: bytes | None) -> dict[str, Any]:
    """Return a report.

    :raises RecordError: it is invalid.
    """
    content = _unpack(data, _SHAPE)
    for key in ("providers", "labels", "lately"):
        content[key] = {str(name): value for name, value in content[key].items() if isinstance(value, dict)}
    for entry in content["labels"].values():
        entry["declined"] = _reasons(entry.get("declined"))
    content["config"] = _files(content["config"])
    content["waiting"] = [group for each in content["waiting"] if (group := _group(each)) is not None]
    return content


def parse_config(data: bytes | None) -> dict[str, Any]:
    """Return a configuration.

    :raises RecordError: it is invalid.
    """
    return _unpack(data, _CONFIG_SHAPE)


def _unpack(data: bytes | None, shape: Mapping[str, type]) -> dict[str, Any]:
    try:
        # Limits the size to which a malicious record is unpacked.
        text = zlib.decompressobj().decompress(data or b"", 32 * LARGEST)
    except zlib.error as error:
        raise RecordError(f"the report is damaged: {error}") from None
    content = parse_object(text)
    if content is None:
        raise RecordError("the znode is empty")
    for key, kind in shape.items():
        if not isinstance(content.get(key), kind):
            raise RecordError(f"{key} is missing or not a {kind.__name__}")
    return content


def _files(config: dict[str, Any]) -> dict[str, Any]:
    stale = config.get("stale_since")
    found = {key: config[key] if isinstance(config.get(key), str) else None for key in ("file", "secure", "error")}
    return {
        **found,
        "stale_since": stale if isinstance(stale, (int, float)) and abs(stale) < LARGEST_NUMBER else None,
        "warnings": texts_of(config, "warnings"),
    }


def _group(value: object) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    since, count, reasons = value.get("since"), value.get("count"), value.get("reasons")
    return {
        "labels": texts_of(value, "labels"),
        "state": str(value.get("state")),
        "since": since if isinstance(since, (int, float)) and abs(since) < LARGEST_NUMBER else 0,
        "count": count if isinstance(count, int) else 0,
        "ids": texts_of(value, "ids"),
        "reasons": _reasons(reasons),
    }


def _reasons(value: object) -> list[dict[str, str]]:
    return [
        {key: str(reason.get(key) or "") for key in REASON}
        for reason in (value if isinstance(value, list) else ())
        if isinstance(reason, dict)
    ]


def serialize(content: dict[str, Any]) -> bytes:
    """Return the data of a report.

    :raises ValueError: it is larger than :data:`LARGEST`.
    """
    data = zlib.compress(json.dumps(content).encode())
    if len(data) > LARGEST:
        raise ValueError(f"the report has {len(data)} bytes, the limit is {LARGEST}")
    return data


def write(kazoo: KazooClient, where: str, content: dict[str, Any]) -> None:
    """Write a report or configuration.

    :param where: result of :func:`path`.
    :raises KazooException: no connection, or no answer in time.
    :raises ValueError: it is larger than :data:`LARGEST`.
    """
    reading.write(kazoo, where, serialize(content), ephemeral=True)


def named(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``name``, which distinguishes launchers of one host: ``HOST`` or ``HOST:PID``."""
    hosts = Counter(content["hostname"] for content in found)
    return [
        {
            **content,
            "name": content["hostname"] if hosts[content["hostname"]] == 1 else f"{content['hostname']}:{content.get('pid')}",
        }
        for content in found
    ]


def read_configs(kazoo: KazooClient) -> list[dict[str, Any]]:
    """Return all valid configurations by name; write nothing.

    :raises KazooException: no connection, or no answer in time.
    """
    found = []
    for where, (data, _stat) in answers(kazoo.get_async, (f"{CONFIGS}/{name}" for name in children(kazoo, CONFIGS))):
        try:
            found.append(parse_config(data))
        except RecordError as error:
            log.warning("Ignoring %s: %s", where, error)
    return found


class ReportTree(Tree[Any]):
    """The reports of all launchers by the name of their znode."""

    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, ROOT)
        self.reports: dict[str, dict[str, Any]] = {}
        #: Called when a report was created, changed or deleted.
        self.listeners: list[Callable[[], Any]] = []

    def known_paths(self) -> set[str]:
        return {f"{ROOT}/{name}" for name in self.reports}

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        content = parse(data)
        with self.lock:
            self.reports[parts[0]] = content
        self.announce(self.listeners)

    def vanished(self, parts: list[str], path: str) -> None:
        with self.lock:
            self.reports.pop(parts[0], None)
        self.announce(self.listeners)

    def snapshot(self) -> list[dict[str, Any]]:
        with self.lock:
            return named([content for _name, content in sorted(self.reports.items())])

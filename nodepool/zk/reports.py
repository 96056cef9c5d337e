"""Reports of launchers about themselves, their configuration and their requests.

Outside the tree of 11.0.0: ``/nodepool/launcher-reports/<host>-<process id>``, percent-quoted:
ephemeral, a JSON object, written by its launcher every other second at most, and only after
changes. Commands read the reports; each launcher mirrors them, so that its pages show the whole
cluster. ``/nodepool/launcher-configs/<host>-<process id>`` is similar: the configuration in force
without possible secrets, written after changes, and read when a user requests it.
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
from nodepool.zk.reading import UNREADABLE, answers, children
from nodepool.zk.records import LARGEST as LARGEST_NUMBER
from nodepool.zk.records import RecordError, parse_object

ROOT, CONFIGS = "/nodepool/launcher-reports", "/nodepool/launcher-configs"
#: Bytes of a report: ZooKeeper closes the connection of a client that sends more than 1 MiB.
LARGEST = 512 << 10

#: Required keys of a report.
_SHAPE = {
    "hostname": str,
    "config": dict,
    "details": list,
    "providers": dict,
    "not_running": dict,
    "labels": dict,
    "lately": dict,
    "tenants": dict,
    "waiting": list,
}

#: Keys of a reason: texts, empty if a launcher of another version does not publish them.
REASON = ("code", "pool", "text", "help", "root", "request", "blocker", "headline")

#: Required keys of a configuration.
_CONFIG_SHAPE = {
    "hostname": str,
    "labels": dict,
    "diskimages": dict,
    "providers": dict,
    "tenant-resource-limits": dict,
}

log = logging.getLogger("nodepool.zk.reports")


def path(identifier: str, root: str = ROOT) -> str:
    return f"{root}/{quote(identifier, safe='')}"


Check = Callable[[object], Any]
"""Returns a value in the type that readers rely on; an unusable one as None or empty."""


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def number(value: object) -> float | None:
    """Return the number in a record, which may contain anything."""
    return value if isinstance(value, (int, float)) and abs(value) < LARGEST_NUMBER else None


def _amount(value: object) -> float:
    return number(value) or 0


def _numbers(value: object) -> dict[str, float]:
    return {
        name: found
        for name, entry in _object(value).items()
        if (found := number(entry)) is not None
    }


def _record(**keys: Check) -> Callable[[object], dict[str, Any]]:
    return lambda value: {key: check(_object(value).get(key)) for key, check in keys.items()}


def _optional(check: Check) -> Check:
    return lambda value: check(value) if isinstance(value, dict) else None


def _each(check: Check) -> Check:
    return lambda value: [
        check(entry)
        for entry in (value if isinstance(value, list) else ())
        if isinstance(entry, dict)
    ]


def _by_name(check: Check, kind: type = dict) -> Check:
    return lambda value: {
        name: check(entry) for name, entry in _object(value).items() if isinstance(entry, kind)
    }


_USE = {"limits": _numbers, "used": _numbers}
_REASONS = _each(_record(**dict.fromkeys(REASON, lambda value: str(value or ""))))
_PROVIDER = _record(
    driver=_text,
    max_concurrency=number,
    launching=number,
    pools=_by_name(_record(labels=_texts, max_servers=number, id=_text)),
    hosts=_each(_record(name=str, usable=bool, problem=_text, **_USE)),
    calls=_optional(
        _record(
            paces=_by_name(str, str),
            throttled=bool,
            last_error=_optional(_record(operation=str, kind=str, message=str, time=number)),
        )
    ),
    **_USE,
)
_REPORT = _record(
    hostname=str,
    pid=number,
    started=number,
    ready=bool,
    details=_texts,
    config=_record(file=_text, secure=_text, error=_text, stale_since=number, warnings=_texts),
    providers=_by_name(_PROVIDER),
    not_running=_by_name(str, str),
    not_running_labels=_by_name(_texts, list),
    labels=_by_name(_record(min_ready=number, backing=_texts, declined=_REASONS)),
    images=_by_name(_record(paused=bool, rebuild_age=number, labels=_texts, providers=_texts)),
    lately=_by_name(_numbers),
    tenants=_by_name(_record(**_USE)),
    waiting=_each(
        _record(
            labels=_texts, state=str, since=_amount, count=_amount, ids=_texts, reasons=_REASONS
        )
    ),
)


def parse(data: bytes | None) -> dict[str, Any]:
    """Return a report that has every key of ``_REPORT``, with a value of its type.

    Readers need not check it.

    :raises RecordError: it is damaged, or a required key is missing.
    """
    return _REPORT(_unpack(data, _SHAPE))


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


def serialize(content: dict[str, Any]) -> bytes:
    """Return the data of a report.

    :raises ValueError: it is larger than :data:`LARGEST`.
    """
    data = zlib.compress(json.dumps(content).encode())
    if len(data) > LARGEST:
        raise ValueError(f"the report has {len(data)} bytes, the limit is {LARGEST}")
    return data


def write(kazoo: KazooClient, where: str, content: dict[str, Any]) -> float | None:
    """Write a report or configuration; return the server's time, unless it was created.

    :param where: result of :func:`path`.
    :raises KazooException: no connection, or no answer in time.
    :raises ValueError: it is larger than :data:`LARGEST`.
    """
    stat = reading.write(kazoo, where, serialize(content), ephemeral=True)
    return None if stat is None else stat.mtime / 1000


def named(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``name``, which distinguishes launchers of one host: ``HOST`` or ``HOST:PID``."""
    hosts = Counter(content["hostname"] for content in found)
    return [
        {
            **content,
            "name": content["hostname"]
            if hosts[content["hostname"]] == 1
            else f"{content['hostname']}:{content.get('pid')}",
        }
        for content in found
    ]


def read_configs(kazoo: KazooClient) -> list[dict[str, Any]]:
    """Return all valid configurations by name; write nothing.

    :raises KazooException: no connection, or no answer in time.
    """
    found = []
    for where, (data, _stat) in answers(
        kazoo.get_async, (f"{CONFIGS}/{name}" for name in children(kazoo, CONFIGS)), UNREADABLE
    ):
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

"""``/api/v1`` and the pages on ``/ui/``, not in release 11.0.0 (doc/operation/web.rst)."""

from __future__ import annotations

import csv
import dataclasses
import functools
import gzip
import hashlib
import http
import importlib.resources
import io
import json
import pathlib
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from nodepool.status import cluster, health
from nodepool.status.explain import KINDS, Unknown, explain
from nodepool.status.filters import test_of
from nodepool.status.once import Once
from nodepool.status.results import harmless, plain, to_json
from nodepool.status.usage import GROUPS
from nodepool.version import get_version_string
from nodepool.web import access
from nodepool.web.cache import ResponseCache
from nodepool.web.http import HttpError, Request, Response, names_tag
from nodepool.web.tables import (
    TABLES,
    Launcher,
    NodeRows,
    RequestRows,
    Rows,
    grouped,
    ordered,
    values_of,
)
from nodepool.web.usage import UsagePage
from nodepool.zk import reports
from nodepool.zk.history import HistoryReader
from nodepool.zk.mirror.feed import TYPES
from nodepool.zk.zookeeper import ZooKeeper

API, PAGES, STATIC = "/api/v1/", "/ui/", "/ui/static/"
EVENTS = "/api/v1/events"
JSON = "application/json"
LIMIT, MOST, MOST_LABELS, MOST_IDS = 500, 20000, 40, 50
"""Default and maximum rows of an answer; labels, and ids of one cause, of the overview."""
DAY = 86400
"""Seconds that the history reaches back."""
MOST_SERIES = 8
"""Series of a chart: the largest ones."""
LAST_HOUR = 12
"""Points of the charts that the launch success rate covers."""
ROWS_AGE = 1.0
"""Seconds for which rows are cached."""
LEAST_COMPRESSED = 1000
"""Bytes of an answer that is compressed for clients that accept it."""
_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)
_COMPRESSED = b"\x1f\x8b"
_CONTENT_TYPES = {
    ".css": "text/css; charset=UTF-8",
    ".svg": "image/svg+xml",
    ".js": "text/javascript; charset=UTF-8",
}
#: Name of a static file -> its content type.
FILES = {
    entry.name: content_type
    for entry in importlib.resources.files("nodepool.web").joinpath("static").iterdir()
    if (content_type := _CONTENT_TYPES.get(pathlib.PurePath(entry.name).suffix)) is not None
}
#: Scripts that are not needed for the first view, or that the page names itself.
SCRIPTS = frozenset({"app.js", "uplot.js"})
#: Key -> values from which users can choose on a page.
Choices = dict[str, list[str]]
_NOT_FILTERS = frozenset({"format", "group", "limit", "offset", "sort", "q"})


class Api:
    """Answers for one launcher; every answer covers the whole cluster."""

    def __init__(self, nodepool: Launcher, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._nodepool = nodepool
        self._monotonic = monotonic
        self._spent = 0.0
        self._history = HistoryReader()
        self._usage = UsagePage()
        #: The rows and the choices of each table.
        self._rows: ResponseCache[tuple[Rows, Choices]] = ResponseCache(
            ROWS_AGE, monotonic=monotonic
        )
        self._answers: ResponseCache[bytes] = ResponseCache(ROWS_AGE, monotonic=monotonic)
        #: Tables with thousands of rows cache them.
        self._readers = {"nodes": NodeRows().read, "requests": RequestRows().read}
        #: When it was created, the facade, and what caches its data for tables.
        self._once: tuple[float, ZooKeeper, Once] | None = None
        #: What reads the paths that have no parameters.
        self._readers_of_paths: dict[str, Callable[[], dict[str, Any]]] = {
            "": self._about,
            "overview": self._overview,
            "trends": self._trends,
            "config": self._config,
        }

    @staticmethod
    def serves(path: str) -> bool:
        return path.startswith((API, PAGES)) or path in ("/api/v1", "/ui")

    def answer(self, request: Request) -> Response:
        """Return the answer.

        :raises HttpError: anything but 200 and 304.
        """
        compress = _GZIP.search(request.headers.get("accept-encoding", "")) is not None
        if request.path.startswith(STATIC):
            response = self._static(request.path.removeprefix(STATIC), compress)
        elif request.path == "/ui" or request.path.startswith(PAGES):
            response = _page(compress)
        else:
            response = self._shared(request, compress)
        tag = f'"{hashlib.sha256(response.body).hexdigest()[:32]}"'
        packed = (("Content-Encoding", "gzip"),) if response.body.startswith(_COMPRESSED) else ()
        headers = (
            *access.HEADERS,
            ("ETag", tag),
            ("Cache-Control", "no-cache"),
            ("Vary", "Accept-Encoding"),
            *packed,
        )
        if names_tag(request.headers.get("if-none-match"), tag):
            return Response(
                b"", response.content_type, http.HTTPStatus.NOT_MODIFIED, headers, cors=False
            )
        return Response(
            response.body, response.content_type, headers=(*headers, *response.headers), cors=False
        )

    @staticmethod
    def _static(name: str, compress: bool) -> Response:
        if name not in FILES:
            raise HttpError(http.HTTPStatus.NOT_FOUND, "Not found")
        return _file(name, FILES[name], compress)

    # -- /api/v1

    def renew(self) -> float:
        """Invalidate cached data, so that later requests get newer data.

        :return: seconds that answers took since the last call, for several threads approximately.
        """
        # The innermost first: data based on it must not be older, either.
        self._once = None
        self._rows.renew()
        self._answers.renew()
        spent, self._spent = self._spent, 0.0
        return spent

    def _shared(self, request: Request, compress: bool) -> Response:
        """Return an answer shared for a second: notified pages all ask for the same.

        Nothing here is secret from a reader, so lengths of compressed answers reveal nothing.
        Answers with tokens (those of ``web/actions``) must not be compressed: they contain text of
        others, too (BREACH).
        """
        made: list[Response] = []

        def make() -> bytes:
            began = self._monotonic()
            made.append(compressed(self._api(request), 1) if compress else self._api(request))
            self._spent += self._monotonic() - began
            return made[0].body

        key = (
            request.path,
            compress,
            tuple((name, tuple(values)) for name, values in sorted(request.lists.items())),
        )
        body = self._answers.get(key, make).body
        if made:
            return made[0]
        name = request.path.rsplit("/", 1)[1]
        return (
            Response(body, *_csv_head(name))
            if request.parameters.get("format") == "csv"
            else Response(body, JSON)
        )

    def _api(self, request: Request) -> Response:
        zk = self._nodepool.getZK()
        if zk is None or not zk.synced:
            raise HttpError(
                http.HTTPStatus.SERVICE_UNAVAILABLE,
                "ZooKeeper's content is being read, try again",
                "no-zookeeper",
            )
        # The path is decoded already; only names have slashes in them.
        parts = request.path.removeprefix("/api/v1").strip("/").split("/", 2)
        if len(parts) == 1 and parts[0] in TABLES:
            return self._table(parts[0], request)
        if parts == ["usage"]:
            return self._usage_table(request.parameters)
        reader = self._readers_of_paths.get(parts[0]) if len(parts) == 1 else None
        if len(parts) == 3 and parts[0] == "explain":
            reader = functools.partial(self._explain, *parts[1:])
        if reader is None:
            raise HttpError(http.HTTPStatus.NOT_FOUND, "Not found; /api/v1 lists what there is")
        if request.lists:
            unknown = next(iter(request.lists))[:40]
            raise HttpError(
                http.HTTPStatus.BAD_REQUEST,
                f"{request.path[:80]} has no parameters; remove {unknown}",
            )
        return _json(reader())

    def _about(self) -> dict[str, Any]:
        names = sorted({*TABLES, *self._readers_of_paths, "usage", "events"} - {""})
        return {
            "version": get_version_string(),
            "tables": sorted(TABLES),
            "paths": [f"{API}{name}" for name in (*names, "explain/KIND/NAME", "openapi.json")],
            "event_types": TYPES,
            "explain": list(KINDS),
        }

    def _table(self, name: str, request: Request) -> Response:
        table, given = TABLES[name], request.parameters
        rows, choices = self._read(name)
        wanted: dict[str, list[str]] = {}
        for key, values in request.lists.items():
            if key in _NOT_FILTERS:
                continue
            if key not in table.keys:
                raise HttpError(
                    http.HTTPStatus.BAD_REQUEST,
                    f"{name} has no {key}; known are {', '.join(sorted(table.keys))}",
                )
            wanted[key] = [value for one in values for value in one.split(",")]
        test, text = test_of(wanted), (given.get("q") or "").lower()
        found = [row for row in rows if test(row) and (not text or _mentions(row, text))]
        sort, group = (given.get("sort") or "").split(","), given.get("group") or ""
        for key in filter(None, (*(each.lstrip("-") for each in sort), group)):
            if key not in table.keys:
                raise HttpError(
                    http.HTTPStatus.BAD_REQUEST, f"{name} has no {key} to sort or group by"
                )
        found = ordered(found, filter(None, sort))
        found, groups = grouped(found, group) if group else (found, [])
        offset, limit = _number(given, "offset", 0, 10**9), _number(given, "limit", LIMIT, MOST)
        part = found[offset : offset + limit]
        form = given.get("format") or "json"
        if form == "csv":
            return _csv(part, table.keys, name)
        if form != "json":
            raise HttpError(
                http.HTTPStatus.BAD_REQUEST, f"format must be json or csv, not {form[:40]}"
            )
        shown = {"columns": table.shown(), "more": table.more(), "order": table.order}
        return _json(
            {**shown, "rows": part, "total": len(found), "choices": choices, "groups": groups}
        )

    def _zk(self) -> Once:
        """Return the facade; data read for one table are cached for a second."""
        zk, now, known = self._nodepool.getZK(), self._monotonic(), self._once
        if known is None or known[1] is not zk or now - known[0] >= ROWS_AGE:
            known = self._once = (now, zk, Once(zk))
        return known[2]

    def _read(self, name: str) -> tuple[Rows, Choices]:
        """Return the rows and values to choose from, generated once a second for all clients."""

        def make() -> tuple[Rows, Choices]:
            rows = self._readers.get(name, TABLES[name].read)(self._zk())
            choices = {key: values_of(rows, key) for key in TABLES[name].choices}
            return ordered(
                rows if name in self._readers else sorted(rows, key=_first), TABLES[name].order
            ), choices

        return self._rows.get(name, make).body

    def _overview(self) -> dict[str, Any]:
        zk = self._zk()
        nodes, requests = zk.countNodes().states, cluster.states(zk)
        return {
            "health": health.health(zk).record(),
            "nodes": nodes,
            "requests": requests,
            "providers": self._read("providers")[0],
            "pools": self._read("pools")[0],
            "labels": sorted(self._read("labels")[0], key=_busy, reverse=True)[:MOST_LABELS],
            "waiting": [{**row, "ids": row["ids"][:MOST_IDS]} for row in self._read("waiting")[0]],
            "problems": self._read("problems")[0],
            "daemons": self._read("daemons")[0],
            "launches": {
                key: sum(row[key] for row in self._chart()[-LAST_HOUR:])
                for key in ("ready", "failed")
            },
        }

    def _chart(self) -> list[dict[str, Any]]:
        return self._nodepool.trends.chart() if self._nodepool.trends is not None else []

    def _trends(self) -> dict[str, Any]:
        """Return the points of the charts by series; null: nothing is known."""
        rows = self._chart()
        found: dict[str, Any] = {
            key: [row[key] for row in rows]
            for key in ("time", "ready", "failed", "launch", "wait", "wait_p95")
        }
        for key in ("nodes", "waiting"):
            totals: Counter[str] = Counter()
            for row in rows:
                totals.update(row[key] or {})
            names = [name for name, _total in totals.most_common(MOST_SERIES)]
            found[key] = {
                name: [None if row[key] is None else row[key].get(name, 0) for row in rows]
                for name in names
            }
        return {**found, "sampled": [row["nodes"] is not None for row in rows]}

    def _usage_table(self, given: Mapping[str, str]) -> Response:
        by, since = given.get("by") or GROUPS[0], _number(given, "since", DAY, DAY)
        if by not in GROUPS or not given.keys() <= {"by", "since"}:
            raise HttpError(
                http.HTTPStatus.BAD_REQUEST,
                f"usage has the parameters since (seconds) and by ({', '.join(GROUPS)})",
            )
        return _json(self._usage.answer(self._nodepool.getZK(), self._nodepool.config, by, since))

    def _config(self) -> dict[str, Any]:
        """Return the loaded configurations of all launchers without secrets, this one first."""
        own = self._nodepool.shown_config()
        if own is None:
            raise HttpError(http.HTTPStatus.SERVICE_UNAVAILABLE, "No configuration is in force yet")
        zk = self._nodepool.getZK()
        files = {
            _launcher(report): {**report["config"], "not_running": report["not_running"]}
            for report in zk.readReports()
        }
        others = [
            {**content, **files.get(_launcher(content), {})}
            for content in reports.read_configs(zk.kazoo_client)
            if _launcher(content) != _launcher(own)
        ]
        return {"launchers": reports.named([own, *others])}

    def _explain(self, kind: str, name: str) -> dict[str, Any]:
        if kind not in KINDS:
            raise HttpError(
                http.HTTPStatus.NOT_FOUND, f"Unknown kind {kind[:40]}; known are {', '.join(KINDS)}"
            )
        feed = self._nodepool.feed if kind in ("request", "node") else None
        try:
            found = explain(
                self._nodepool.getZK(),
                kind,
                name,
                self._history,
                feed.since(0)[0] if feed is not None else (),
            )
        except Unknown as error:
            raise HttpError(http.HTTPStatus.NOT_FOUND, str(error)) from None
        return found.record()


def _launcher(content: Mapping[str, Any]) -> tuple[str, str]:
    return str(content["hostname"]), str(content.get("pid"))


def compressed(response: Response, level: int) -> Response:
    """Return the answer, compressed if it is large."""
    if len(response.body) <= LEAST_COMPRESSED:
        return response
    # Without a time, equal answers have equal tags.
    return dataclasses.replace(response, body=gzip.compress(response.body, level, mtime=0))


@functools.cache
def _file(name: str, content_type: str, compress: bool = False) -> Response:
    body = importlib.resources.files("nodepool.web").joinpath("static", name).read_bytes()
    return compressed(Response(body, content_type), 9) if compress else Response(body, content_type)


@functools.cache
def _page(compress: bool) -> Response:
    """Return the page, which names all modules, so that browsers fetch them together."""
    page = _file("index.html", "text/html; charset=UTF-8")
    modules = [name for name in sorted(FILES) if name.endswith(".js") and name not in SCRIPTS]
    links = "\n".join(f'<link rel="modulepreload" href="{STATIC}{name}">' for name in modules)
    page = dataclasses.replace(page, body=page.body.replace(b"<!-- modules -->", links.encode()))
    return compressed(page, 9) if compress else page


def _json(content: object) -> Response:
    return Response(to_json(content).encode(), JSON)


def _csv(rows: Rows, keys: list[str], name: str) -> Response:
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(keys)
    for row in rows:
        writer.writerow([_harmless(row.get(key)) for key in keys])
    content_type, code, headers = _csv_head(name)
    return Response(
        stream.getvalue().encode("utf-8", "backslashreplace"), content_type, code, headers
    )


def _csv_head(name: str) -> tuple[str, http.HTTPStatus, tuple[tuple[str, str], ...]]:
    return (
        "text/csv; charset=UTF-8",
        http.HTTPStatus.OK,
        (("Content-Disposition", f'attachment; filename="{name}.csv"'),),
    )


def _harmless(value: object) -> Any:
    """Return the value so that a spreadsheet reads it as text, not as a formula."""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, dict):
        value = json.dumps(value, default=plain)
    return harmless(value)


def _mentions(row: Mapping[str, Any], text: str) -> bool:
    return any(text in str(value).lower() for value in row.values() if value is not None)


def _first(row: Mapping[str, Any]) -> str:
    return str(next(iter(row.values()), ""))


def _busy(label: Mapping[str, Any]) -> tuple[int, int]:
    return label["waiting"], sum(label["states"].values())


def _number(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise HttpError(
            http.HTTPStatus.BAD_REQUEST, f"{name} must be a whole number, not {text[:40]}"
        )
    return min(int(text), most)

"""Rows and their representations (CLI-4 and CLI-6.3)."""

from __future__ import annotations

import csv
import datetime
import io
import json
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import prettytable

from nodepool.status.fit import SENTENCES, fitted
from nodepool.texts import printable

#: Of a table cell: each line is as wide as the widest cells.
MOST_CHARACTERS = 1000
FORMATS = ("table", "json", "yaml", "csv")

#: Keys of sizes in bytes, and of seconds; CSV has the numbers.
SIZES = frozenset({"bytes_total", "memory_p50", "memory_p95", "memory_limit", "memory_peak"})
WAITS = frozenset({"wait_p50", "wait_p95"})

_AGE = re.compile(r"\d{2,}:\d\d:\d\d:\d\d\Z")
#: Keys whose values are a UNIX time; tables show how long ago that was.
TIMES = frozenset({"age", "build_request_age"})
#: Keys whose values are seconds. Tables show them in units; CSV, which scripts read, as ages.
DURATIONS = frozenset({"elapsed", "expected"})
#: Key -> characters shown in tables; the other forms have all.
WIDEST = {"last_line": 80, "reason": 200}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
#: Keys of texts such as ``cores 1/4, ram 512/4096``; tables show them with names and units.
USES = frozenset({"limits", "used"})
#: Resource of a limit -> its name, and the bytes of one unit if it is a size.
RESOURCES = {"ram": ("RAM", 2**20), "disk": ("disk", 2**30), "volume-gb": ("volume size", 2**30)}
#: Keys whose text differs between a table and the other forms.
_SHAPED = TIMES | DURATIONS | SIZES | WAITS | USES | {*WIDEST, "next_try", "progress"}
_USE = re.compile(r"(?<!\S)(\S+) ([\d.e+-]+)/([\d.e+-]+)")
#: Numbers of YAML 1.2.
_NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0o[0-7]+")


@dataclass(frozen=True)
class Results:
    """Rows as they appear in JSON, and the table's columns: key -> title, in order."""

    rows: list[dict[str, Any]]
    columns: Mapping[str, str]


def format_age(seconds: float) -> str:
    """Return ``DD:HH:MM:SS``; days may have more digits."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days:02}:{hour:02}:{minute:02}:{second:02}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``1 min 38 s``.

    All texts that 11.0.0 did not have use this form.
    """
    left = max(0, int(seconds))
    parts = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        number, left = divmod(left, size)
        if number:
            parts.append(f"{number} {unit}")
        elif parts:
            break
    return " ".join(parts[:2]) or "0 s"


def format_bytes(number: float) -> str:
    """Return a size such as ``1.5 GiB``; bytes have no fraction."""
    unit = 0
    while abs(number) >= 1024 and unit < len(UNITS) - 1:
        number /= 1024
        unit += 1
    return f"{number:.{1 if unit else 0}f} {UNITS[unit]}"


def use_text(resource: str, used: float, limit: float) -> str:
    """Return the use of a limit in the unit of the limit, such as ``160 of 977 GiB``."""
    size = RESOURCES.get(resource, ("", 0))[1]
    unit = format_bytes(limit * size).partition(" ")[2] if size else ""
    amounts = [
        number * (size or 1) / (1 << 10 * UNITS.index(unit or "B")) for number in (used, limit)
    ]
    texts = [f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}" for amount in amounts]
    return f"{texts[0]} of {texts[1]} {unit}".rstrip()


def format_use(text: str) -> str:
    """Return a text such as ``ram 512/4096`` as people read it: ``RAM 0.5 of 4 GiB``."""

    def limit(found: re.Match[str]) -> str:
        name, _size = RESOURCES.get(found[1], (found[1], 0))
        return f"{name} {use_text(found[1], float(found[2]), float(found[3]))}"

    return _USE.sub(limit, text)


def to_int_or_none(value: float | None) -> int | None:
    return int(value) if isinstance(value, (int, float)) else None


def to_json(value: object) -> str:
    """Return a value as JSON; numbers that are infinite or NaN, which JSON lacks, are null."""
    try:
        return json.dumps(value, default=plain, allow_nan=False)
    except ValueError:  # records of others contain what they like
        text = json.dumps(value, default=plain)
        return json.dumps(json.loads(text, parse_constant=lambda _name: None))


def _cell(key: str, value: Any, now: float, units: bool = True) -> Any:
    if value is None:
        return ""
    if isinstance(value, str) and key not in _SHAPED:
        return value
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    if key in TIMES and not (isinstance(value, str) and _AGE.match(value)):
        return format_age(now - value)
    if key in DURATIONS or key == "next_try":
        duration = value if key in DURATIONS else value - now
        return format_duration(duration) if units else format_age(duration)
    if key in USES and units:
        return format_use(str(value))
    if key == "progress" and isinstance(value, float) and units:
        return f"{value:.0%}"
    if units and key in WIDEST and len(value) > WIDEST[key]:
        return f"{value[: WIDEST[key] - 3]}..."
    if key in SIZES and units:
        return format_bytes(value)
    if key in WAITS and units:
        return format_duration(value)
    return json.dumps(value, default=plain) if isinstance(value, dict) else str(value)


def _selected(results: Results, fields: Iterable[str] | None) -> dict[str, str]:
    if fields is None:
        return dict(results.columns)
    wanted = set(fields)
    return {key: title for key, title in results.columns.items() if key in wanted}


class _Table(prettytable.PrettyTable):
    """The table of the library, three times faster for plain text with one line per row.

    Lists have thousands of rows.
    """

    def __str__(self) -> str:
        rows = [self.field_names, *([str(cell) for cell in row] for row in self.rows)]
        if not all(cell.isascii() and cell.isprintable() for row in rows for cell in row):
            return super().__str__()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        line = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
        form = "| " + " | ".join(f"{{:<{width}}}" for width in widths) + " |"
        head, *body = [form.format(*row) for row in rows]
        return "\n".join([line, head, line, *body, line])


def _table(results: Results, fields: Iterable[str] | None, now: float, width: int | None) -> str:
    columns = _selected(results, fields)
    widths: dict[str, int] = {}
    if width is not None:
        columns, widths = fitted(
            results.rows, columns, lambda key, value: str(_cell(key, value, now)), width
        )
    table = _Table(list(columns.values()))
    table.align = "l"
    for row in results.rows:
        table.add_row(
            [_wrapped(key, str(_cell(key, row[key], now)), widths.get(key)) for key in columns]
        )
    return str(table)


def _wrapped(key: str, text: str, width: int | None) -> str:
    """Return the text in lines of this width, without what is not printable.

    Extremely long values that are no sentences are cut.
    """
    if len(text) <= (width or MOST_CHARACTERS) and text.isprintable():
        return text
    if len(text) > MOST_CHARACTERS and key not in SENTENCES:
        text = f"{text[: MOST_CHARACTERS - 3]}..."
    return printable(
        text
        if len(text) <= (width or MOST_CHARACTERS)
        else "\n".join(textwrap.wrap(text, width or MOST_CHARACTERS, break_on_hyphens=False))
    )


def _csv(results: Results, now: float) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(results.columns)
    writer.writerows(
        [printable(harmless(str(_cell(key, row[key], now, False)))) for key in results.columns]
        for row in results.rows
    )
    return stream.getvalue().rstrip("\n")


def harmless(value: object) -> Any:
    """Return the value so that a spreadsheet reads it as text, not as a formula."""
    return (
        f"'{value}"
        if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r")
        else value
    )


def plain(value: object) -> Any:
    """Return values that JSON cannot represent (none are expected) as text."""
    if isinstance(value, (datetime.datetime, set, frozenset, bytes)):
        return str(value)
    return repr(value)


def _encodable(text: str) -> str:
    """Escape halves of surrogate pairs.

    JSON in ZooKeeper can contain them, but terminals and pages cannot show them.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def output(
    results: Results,
    fmt: str,
    fields: Iterable[str] | None = None,
    clock: Callable[[], float] = time.time,
    width: int | None = None,
) -> str:
    """Return the text of the results, without a final newline.

    ``width``: maximum width of a table in characters; None: unlimited.

    ``pretty`` (or ``table``) honors ``fields`` in the table's order; ``json`` contains all keys;
    ``yaml`` and ``csv`` contain the table's columns.

    :raises ValueError: unknown format.
    """
    if fmt in ("pretty", "table"):
        return _encodable(_table(results, fields, clock(), width))
    if fmt == "json":
        return to_json(results.rows)
    if fmt == "yaml":
        import yaml

        class Dumper(yaml.SafeDumper):
            """Quotes what readers of YAML 1.2 take for a number, such as ids with an 8."""

        Dumper.add_representer(
            str,
            lambda dumper, text: dumper.represent_scalar(
                "tag:yaml.org,2002:str", text, style="'" if _NUMBER.fullmatch(text) else None
            ),
        )
        rows = [
            {key: row[key] for key in results.columns} for row in json.loads(to_json(results.rows))
        ]
        return yaml.dump(rows, Dumper=Dumper, sort_keys=False, allow_unicode=True).rstrip("\n")
    if fmt == "csv":
        return _encodable(_csv(results, clock()))
    raise ValueError(f"unknown output format {fmt!r}; use one of pretty, {', '.join(FORMATS)}")

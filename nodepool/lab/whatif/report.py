"""Tables and the chart of one run, or of two side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from nodepool.status.results import Results, format_duration

#: Keys of the times in a summary.
_TIMES = ("p50", "p95", "worst")
_HOURS = {"in_use": "in use", "idle": "idle", "changing": "changing"}
#: Series of the chart, with their colors.
_SERIES = {"machines": "#888888", "in_use": "#2a7ab9", "idle": "#e0a030", "waiting": "#c0392b"}
_WIDTH, _HEIGHT, _LEFT, _TOP = 900, 220, 60, 40


def tables(runs: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, Results]]:
    """Yield titles and tables.

    :param runs: summaries (:meth:`nodepool.lab.whatif.measures.Measures.summary`) by the name of
        their run.
    """
    yield "Waiting times by label", _waiting(runs, "labels", "Label")
    if any(set(run["tenants"]) != {""} for run in runs.values()):
        yield "Waiting times by tenant", _waiting(runs, "tenants", "Tenant")
    yield "Machine hours", _hours(runs)


def _waiting(runs: Mapping[str, dict[str, Any]], section: str, title: str) -> Results:
    columns = {"name": title, "requests": "Requests"}
    for run in runs:
        counts = [key for key in ("failed", "unserved") if runs[run]["all"][key]]
        columns |= {f"{run} {key}": _titled(run, key, runs) for key in (*_TIMES, *counts)}
    names = sorted({name for run in runs.values() for name in run[section]})
    groups = [
        (name or "(none)", {run: summary[section].get(name) for run, summary in runs.items()})
        for name in names
    ]
    rows = []
    for name, group in [*groups, ("all", {run: summary["all"] for run, summary in runs.items()})]:
        row: dict[str, Any] = {**dict.fromkeys(columns, ""), "name": name}
        for run, found in group.items():
            if found is None:
                continue
            row["requests"] = found["requests"]
            row |= {f"{run} {key}": time_of(found[key]) for key in _TIMES}
            row |= {f"{run} {key}": found[key] for key in ("failed", "unserved")}
        rows.append(row)
    return Results(rows, columns)


def _titled(run: str, text: str, runs: Mapping[str, Any]) -> str:
    return f"{text} ({run})" if len(runs) > 1 else text


def time_of(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def _hours(runs: Mapping[str, dict[str, Any]]) -> Results:
    columns = {"name": "Of"}
    for run in runs:
        columns |= {f"{run} {key}": _titled(run, text, runs) for key, text in _HOURS.items()}
        columns[f"{run} utilization"] = _titled(run, "utilization", runs)
    rows = []
    for name in sorted({name for run in runs.values() for name in run["machines"]} - {"all"}) + [
        "all"
    ]:
        row: dict[str, Any] = {**dict.fromkeys(columns, ""), "name": name}
        for run, summary in runs.items():
            found = summary["machines"].get(name)
            if found is not None:
                row |= {f"{run} {key}": f"{found[key]:.1f}" for key in _HOURS}
                row[f"{run} utilization"] = f"{found['utilization']:.0%}"
        rows.append(row)
    return Results(rows, columns)


# -- chart


def chart(runs: Mapping[str, dict[str, Any]]) -> str:
    """Return an SVG with machines and waiting requests over time.

    There is one panel for each run, all with one scale.
    """
    most = (
        max(
            (value[name] for run in runs.values() for value in run["series"] for name in _SERIES),
            default=1,
        )
        or 1
    )
    span = (
        max((value["time"] for run in runs.values() for value in run["series"]), default=1.0) or 1.0
    )
    height = len(runs) * (_HEIGHT + 2 * _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _LEFT}" height="{height}" '
        'font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="100%" height="{height}" fill="white"/>',
    ]
    for number, (run, summary) in enumerate(runs.items()):
        parts += [
            f'<g transform="translate({_LEFT},{number * (_HEIGHT + 2 * _TOP) + _TOP})">',
            f'<text y="-16" font-weight="bold">{escape(run)}</text>',
        ]
        for position, (name, color) in enumerate(_SERIES.items()):
            title = name.replace("_", " ")
            points = " ".join(
                f"{value['time'] / span * _WIDTH:.1f},{_HEIGHT - value[name] / most * _HEIGHT:.1f}"
                for value in summary["series"]
            )
            parts += [
                f'<text x="{_WIDTH - 320 + 85 * position}" y="-16" fill="{color}">{title}</text>',
                f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.3"/>',
            ]
        parts += [
            f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="black"/>',
            f'<text x="-8" y="4" text-anchor="end">{most:g}</text>',
            f'<text x="-8" y="{_HEIGHT}" text-anchor="end">0</text>',
            f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" '
            f'text-anchor="end">{format_duration(span)}</text></g>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"

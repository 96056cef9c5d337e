"""Filter rows by the values of their columns, for commands and the API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from nodepool.status.results import Results

Wanted = Mapping[str, Collection[str]]


def test_of(wanted: Wanted) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test whether a row has one of the values for each key.

    A list must contain one of them; leading zeros of ids are optional.
    """
    sets = {key: frozenset(values) for key, values in wanted.items() if values}

    def test(row: Mapping[str, Any]) -> bool:
        return all(_has(row.get(key), values) for key, values in sets.items())

    return test


def _has(value: object, wanted: frozenset[str]) -> bool:
    if isinstance(value, list):
        return any(str(item) in wanted for item in value)
    if isinstance(value, bool):
        return str(value).lower() in wanted
    text = "" if value is None else str(value)
    return text in wanted or (text.isdecimal() and len(text) < 20 and str(int(text)) in wanted)


def matching(results: Results, wanted: Wanted) -> Results:
    test = test_of(wanted)
    return Results([row for row in results.rows if test(row)], results.columns)

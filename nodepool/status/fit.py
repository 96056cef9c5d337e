"""Fit tables to a terminal; scripts and ``-o wide`` get all columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Columns in the order in which they are dropped.
SPARED = (
    "driver_data",
    "user_data",
    "event_id",
    "ipv6",
    "declined_by",
    "server_id",
    "external_id",
    "launcher",
    "hold_job",
    "private_ipv4",
    "hostname",
    "AZ",
    "username",
    "connection_port",
    "comment",
    "builder",
    "formats",
    "locked",
    "pool",
    "since",
    "external_name",
    "requestor",
    "relative_priority",
    "allocated_to",
    "public_ipv4",
    "nodes",
    "build_request_age",
)
#: Columns with sentences, which are never dropped.
SENTENCES = frozenset({"reason", "suggestion", "problem", "reasons", "cause"})
NARROWEST = 12
"""Minimum width of a column in characters."""


def fitted(
    rows: list[dict[str, Any]],
    columns: Mapping[str, str],
    cell: Callable[[str, Any], str],
    width: int,
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the columns that fit, and the widths of those whose cells have to be wrapped.

    :param cell: the text of a value.
    :param width: characters of the terminal.
    """
    sizes = {
        key: max([len(title), *(len(cell(key, row[key])) for row in rows)])
        for key, title in columns.items()
    }

    def excess() -> int:
        return 1 + sum(size + 3 for size in sizes.values()) - width

    for key in SPARED:
        if excess() <= 0:
            break
        if len(sizes) > 2:
            sizes.pop(key, None)
    wrapped: dict[str, int] = {}
    while (over := excess()) > 0:
        key = max(sizes, key=lambda key: sizes[key])
        if sizes[key] > NARROWEST:
            second = max([NARROWEST, *(size for other, size in sizes.items() if other != key)])
            sizes[key] = wrapped[key] = max(
                NARROWEST, sizes[key] - over, min(second, sizes[key] - 1)
            )
        elif len(sizes) > 2:
            sizes.pop(next((key for key in reversed(sizes) if key not in SENTENCES), key))
        else:
            break
    return {key: title for key, title in columns.items() if key in sizes}, wrapped

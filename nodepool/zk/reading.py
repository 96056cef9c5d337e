"""Pipelined reads of many znodes, with a deadline for each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

#: Seconds for one answer of the server, and number of concurrent reads.
TIMEOUT, PIPELINE = 30.0, 500


def children(kazoo: KazooClient, parent: str) -> list[str]:
    """Return the sorted names of the children; none if the parent does not exist."""
    try:
        return sorted(kazoo.get_children_async(parent).get(timeout=TIMEOUT))
    except NoNodeError:
        return []


def answers(ask: Callable[[str], Any], wanted: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield each path with the answer of the server; those that do not exist are omitted.

    :param ask: starts to read one path, such as ``kazoo.get_async``.
    :raises KazooException: no connection, or no answer in time.
    """
    paths = list(wanted)
    for start in range(0, len(paths), PIPELINE):
        for path, asked in [(path, ask(path)) for path in paths[start : start + PIPELINE]]:
            try:
                answer = asked.get(timeout=TIMEOUT)
            except NoNodeError:
                continue
            yield path, answer

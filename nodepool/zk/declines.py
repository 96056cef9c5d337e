"""Why pools have declined requests, for people; beside the tree of release 11.0.0, which has no place for it.

``/nodepool/request-declines/<request id>@<launcher id>``, both percent-quoted: ephemeral, a JSON object
with ``pool``, ``reason``, ``help`` and, one word for each reason, ``codes``.  Not in the request itself:
11.0.0 drops keys that it does not know, and Zuul takes every key as its own.  A launcher removes what it
has written when the request is gone; what it could not remove ends with its session.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from nodepool.base.problems import one_line
from nodepool.reasons import Reason, render
from nodepool.zk.records import RecordError, parse_object

ROOT = "/nodepool/request-declines"

#: Seconds for one answer of the server, and reads under way at once.
TIMEOUT, PIPELINE = 30.0, 500

_LAUNCHER = re.compile(r"(?P<host>.*?)-PoolWorker\.(?P<pool>.*)-[0-9a-f]{32}\Z")


def path(request_id: str, launcher_id: str) -> str:
    return f"{ROOT}/{quote(request_id, safe='')}@{quote(launcher_id, safe='')}"


def serialize(pool: str, reasons: Sequence[Reason]) -> bytes:
    # Problems of the label come last, and say most.
    suggestion = next((text for reason in reversed(reasons) if (text := reason.suggestion)), "")
    record = {"pool": pool, "reason": one_line(render(reasons)), "codes": [reason.code.word for reason in reasons],
              "help": one_line(suggestion)}  # fmt: skip
    return json.dumps(record).encode()


class Decline(NamedTuple):
    """What a pool said; ``help`` is what an operator can do, or empty."""

    text: str
    help: str


def pool_of(launcher_id: str) -> str:
    """A launcher id (of ``declined_by``) for people: ``<provider>-<pool> on <host>``."""
    match = _LAUNCHER.match(launcher_id)
    return f"{match['pool']} on {match['host']}" if match else launcher_id


def read(kazoo: KazooClient, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Decline]:
    """``pool: reason`` by (request id, launcher id), of those that are known; writes nothing.

    :raises KazooException: ZooKeeper cannot be reached.
    """
    pairs = set(wanted)
    if not pairs:
        return {}
    try:
        names = set(kazoo.get_children(ROOT))
    except NoNodeError:
        return {}
    there = sorted(pair for pair in pairs if path(*pair).rpartition("/")[2] in names)
    found: dict[tuple[str, str], Decline] = {}
    for start in range(0, len(there), PIPELINE):
        for pair, answer in [(pair, kazoo.get_async(path(*pair))) for pair in there[start : start + PIPELINE]]:
            try:
                values = parse_object(answer.get(timeout=TIMEOUT)[0])
            except (NoNodeError, RecordError):
                continue
            if values and isinstance(values.get("pool"), str) and isinstance(values.get("reason"), str):
                found[pair] = Decline(one_line(f"{values['pool']}: {values['reason']}"), one_line(values.get("help") or ""))
    return found


def reasons(kazoo: KazooClient, requests: Iterable[Any]) -> dict[str, list[str]]:
    """Request id -> why each pool that is known to have declined it did, in the order of ``declined_by``."""
    requests = list(requests)
    found = read(kazoo, ((request.id, launcher_id) for request in requests for launcher_id in request.declined_by))
    return {
        request.id: [
            found[request.id, launcher_id].text for launcher_id in request.declined_by if (request.id, launcher_id) in found
        ]
        for request in requests
    }


__all__ = ["ROOT", "path", "pool_of", "read", "reasons", "serialize"]

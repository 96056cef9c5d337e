"""Why pools have declined requests, for users; outside the tree of release 11.0.0.

``/nodepool/request-declines/<request id>@<launcher id>``, both percent-quoted: ephemeral, a JSON
object with ``pool``, ``reason``, ``help`` and, one word for each reason, ``codes``. They are not
part of the request: 11.0.0 drops unknown keys, and Zuul interprets every key. A launcher deletes
its entries when the request is deleted; those it cannot delete end with its session.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from kazoo.client import KazooClient

from nodepool.base.problems import one_line
from nodepool.reasons import Reason, render
from nodepool.zk import paths
from nodepool.zk.reading import UNREADABLE, answers, children
from nodepool.zk.records import RecordError, parse_object

ROOT = paths.DECLINES

_LAUNCHER = re.compile(r"(?P<host>.*?)-PoolWorker\.(?P<pool>.*)-[0-9a-f]{32}\Z")


def path(request_id: str, launcher_id: str) -> str:
    return f"{ROOT}/{quote(request_id, safe='')}@{quote(launcher_id, safe='')}"


def serialize(pool: str, reasons: Sequence[Reason]) -> bytes:
    # Problems of the label come last, and are the most informative.
    suggestion = next((text for reason in reversed(reasons) if (text := reason.suggestion)), "")
    record = {
        "pool": pool,
        "reason": one_line(render(reasons)),
        "codes": [reason.code.word for reason in reasons],
        "help": one_line(suggestion),
    }
    return json.dumps(record).encode()


class Decline(NamedTuple):
    """A pool's reasons; ``help`` is what an operator can do, or empty.

    :param codes: a word for each reason.
    """

    text: str
    help: str
    codes: frozenset[str] = frozenset()


def pool_of(launcher_id: str) -> str:
    """Return a launcher id (of ``declined_by``) for users: ``<provider>-<pool> on <host>``."""
    match = _LAUNCHER.match(launcher_id)
    return f"{match['pool']} on {match['host']}" if match else launcher_id


def read(kazoo: KazooClient, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Decline]:
    """Return known ``pool: reason`` by (request id, launcher id); write nothing.

    :raises KazooException: ZooKeeper cannot be reached.
    """
    pairs = set(wanted)
    if not pairs:
        return {}
    names = set(children(kazoo, ROOT))
    there = {path(*pair): pair for pair in sorted(pairs) if path(*pair).rpartition("/")[2] in names}
    found: dict[tuple[str, str], Decline] = {}
    for where, (data, _stat) in answers(kazoo.get_async, there, UNREADABLE):
        try:
            values = parse_object(data)
        except RecordError:
            continue
        codes = values.get("codes") if values else None
        if values and isinstance(values.get("pool"), str) and isinstance(values.get("reason"), str):
            found[there[where]] = Decline(
                one_line(f"{values['pool']}: {values['reason']}"),
                one_line(values.get("help") or ""),
                frozenset(map(str, codes if isinstance(codes, list) else ())),
            )
    return found


def reasons(kazoo: KazooClient, requests: Iterable[Any]) -> dict[str, list[str]]:
    """Return request id -> known reasons of declining pools, in ``declined_by`` order."""
    requests = list(requests)
    found = read(
        kazoo,
        ((request.id, launcher_id) for request in requests for launcher_id in request.declined_by),
    )
    return {
        request.id: [
            found[request.id, launcher_id].text
            for launcher_id in request.declined_by
            if (request.id, launcher_id) in found
        ]
        for request in requests
    }

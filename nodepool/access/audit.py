"""The audit log: who did what to which object, and with what result.

One JSON line to the logger ``nodepool.audit``, and one event ``action`` in the history.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from nodepool.access.identity import Identity

#: Type of an object -> field of an event, by which `nodepool explain` finds the history of one
#: object.
OBJECTS = {"node": "node", "request": "request", "lease": "request", "image": "image"}

log = logging.getLogger("nodepool.audit")


def record(
    note: Callable[..., object] | None,
    identity: Identity,
    address: str,
    action: str,
    target: str,
    result: str,
) -> None:
    """Record one action.

    :param note: records an event; None: there is no history. Its errors are logged, and end
        nothing.
    :param target: the object, such as ``node 0000000012``.
    :param result: ``ok``, or the code of the error.
    """
    fields = {
        "owner": identity.owner,
        "via": identity.via,
        "from": address,
        "action": action,
        "target": target,
        "result": result,
    }
    log.info("%s", json.dumps({"time": round(time.time(), 3), **fields}))
    kind, _, name = target.partition(" ")
    if kind in OBJECTS and name:
        fields[OBJECTS[kind]] = name
    if note is not None:
        try:
            note("action", **fields)
        except Exception:
            log.exception("Cannot record the event of an action:")

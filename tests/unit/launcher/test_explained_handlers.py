"""What a launcher publishes about the requests that it serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.launcher import NodePool
from nodepool.reasons import Code, because


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"paused": True}, Code.PAUSED),
        ({"shortage": because(Code.NO_ROOM, labels="a")}, Code.PAUSED),
        ({"shortage": because(Code.NO_ROOM, labels="a"), "nodeset": [object()]}, Code.LAUNCHING),
        ({}, Code.LAUNCHING),
        ({"accepted": False}, Code.NOT_LOOKED_AT),
    ],
)
def test_request_without_nodes_that_is_returned_is_not_shown_as_launching(
    state: dict[str, Any], code: Code
) -> None:
    """World seed 420: a request that two full pools passed to each other was explained with
    "launching nodes".
    """
    pool = NodePool(None, "nodepool.yaml")
    request = SimpleNamespace(node_types=["a"], state="pending")
    handler: Any = SimpleNamespace(
        paused=False, shortage=None, nodeset=[], accepted=True, request=request
    )
    handler.pw = SimpleNamespace(capacity=SimpleNamespace(label="p-main"))
    vars(handler).update(state)
    pool.state.handlers["300-0000000001"] = handler
    [(name, labels, _state, [reason])] = pool.explain()
    assert (name, labels, reason.code) == ("300-0000000001", ("a",), code)

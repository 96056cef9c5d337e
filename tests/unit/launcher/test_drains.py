"""Drains without ZooKeeper."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from kazoo.exceptions import ConnectionLoss

from nodepool.launcher.drains import TRY_AGAIN, Drains
from nodepool.zk.drains import Drain, names_of
from nodepool.zk.records import Node


@pytest.mark.parametrize("place", [None, "id", ["h0"], {"host": ["h0"]}, {"host": 7}, {}])
def test_names_of_a_node_need_no_host(place: Any) -> None:
    node = Node("0000000001")
    node.provider, node.pool, node.external_id = "p", "main", place
    assert names_of(node) == {"provider p", "pool p-main", "host zuul@None port 22"}


def test_drain_that_cannot_be_ended_is_tried_again_later() -> None:
    now = [1000.0]
    kazoo = Mock()
    clock: Any = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    kazoo.delete.side_effect = ConnectionLoss
    drain = Drain("label", "a", 10.0, until=1010.0)
    tree = SimpleNamespace(notes={"drain": 1}, of=lambda _kind: [drain], version=lambda _note: 3)
    zk: Any = SimpleNamespace(note_tree=tree, kazoo_client=kazoo)
    server: Any = SimpleNamespace(now=lambda: now[0] - 5.0)
    drains = Drains(lambda: zk, Mock(), clock, server)
    assert drains.left() == 15, "this clock is 5 s ahead"
    drains.end()
    assert not kazoo.delete.called
    now[0] = 1015.0
    assert drains.left() == 0
    with pytest.raises(ConnectionLoss):
        drains.end()
    assert drains.left() == TRY_AGAIN
    kazoo.delete.assert_called_once_with("/nodepool/notes/drain:label%20a", 3)
    tree.version = lambda _note: -1
    drains.end()
    assert kazoo.delete.call_count == 1, "it has just been changed: it may have been prolonged"
    tree.notes = {}
    assert drains.left() == math.inf

"""Nodes that expire unused are a problem when it repeats, and only as long as it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nodepool.launcher.nodes.reconciler import UNUSED, NodeReconciler
from nodepool.zk.records import Node
from tests.support.clock import HandClock


class Expiring:
    """A reconciler whose ready nodes expire when the test lets them."""

    def __init__(self, min_ready: int, age: int) -> None:
        self.clock, label = HandClock(), SimpleNamespace(min_ready=min_ready, max_ready_age=age)
        zk = SimpleNamespace(
            feed=None, change_unlocked=lambda _seen, _changed, written: written(None)
        )
        state: Any = SimpleNamespace(
            clock=self.clock, config=SimpleNamespace(labels={"a": label}), zk=zk
        )
        self.nodes = NodeReconciler(state, lambda: 1.0)
        self.problems = self.nodes.problems

    def expire(self, *labels: str, reason: str = UNUSED) -> None:
        node = Node("0000000001")
        node.type = list(labels)
        self.nodes.discard(node, reason)


def test_third_round_of_expired_nodes_is_a_problem_until_it_is_long_ago() -> None:
    made = Expiring(2, 3600)
    for number in range(6):
        assert made.problems() == []
        made.expire("a", "removed")
        made.expire("a", reason="its instance does not exist")
        made.clock.now += 3600 * (number % 2)
    (problem,) = made.problems()
    assert (
        problem.text
        == "6 ready nodes of label a expired unused within 4 h (max-ready-age 1 h) and were "
        "replaced"
    )
    assert problem.help == "raise `max-ready-age` of the label, or lower its `min-ready`"
    made.clock.now += 3600
    assert made.problems() == []


def test_nodes_that_are_not_launched_again_are_no_problem() -> None:
    made = Expiring(0, 3600)
    for _ in range(20):
        made.expire("a")
    assert made.problems() == []

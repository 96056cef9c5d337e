"""Nodes that expire unused are a problem when it repeats, and only as long as it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nodepool.launcher.nodes.churn import Churn
from tests.support.clock import HandClock


def churn(min_ready: int, age: int) -> tuple[Churn, HandClock]:
    clock, label = HandClock(), SimpleNamespace(min_ready=min_ready, max_ready_age=age)
    state: Any = SimpleNamespace(clock=clock, config=SimpleNamespace(labels={"a": label}))
    return Churn(state), clock


def test_third_round_of_expired_nodes_is_a_problem_until_it_is_long_ago() -> None:
    made, clock = churn(2, 3600)
    for number in range(6):
        assert made.problems() == []
        made.note(["a", "removed"])
        clock.now += 3600 * (number % 2)
    (problem,) = made.problems()
    assert problem.text == "6 ready nodes of label a expired unused within 4 h (max-ready-age 1 h) and were replaced"
    assert problem.help == "raise `max-ready-age` of the label, or lower its `min-ready`"
    clock.now += 3600
    assert made.problems() == []


def test_nodes_that_are_not_launched_again_are_no_problem() -> None:
    made, _clock = churn(0, 3600)
    for _ in range(20):
        made.note(["a"])
    assert made.problems() == []

"""Which pools are asked for a request that waits at a full one, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from nodepool.launcher.requests import moves


class Bench:
    """A request that waits in pool 1; pools 2 and 3 are open and worse."""

    def __init__(self) -> None:
        self.now = 100.0
        self.handler = Mock(launcher_id="1", accepted=True, done=False, paused_since=0.0)
        request = {
            "id": "200-1",
            "priority": ("200", 0, "1"),
            "node_types": ["a"],
            "provider": None,
            "tenant_name": None,
        }
        self.handler.request = SimpleNamespace(**request, declined_by=[])
        self.workers: dict[str, Any] = {
            name: Mock(launcher_id=name, paused_handlers=[]) for name in "123"
        }
        self.workers["1"].paused_handlers = [self.handler]
        view = SimpleNamespace(paused=False, closed=None, full=None, refuses=None)
        for worker in self.workers.values():
            worker.view.return_value = view
        pools = [
            SimpleNamespace(id=name, priority=int(name), labels={"a"}, provider_name=f"p{name}")
            for name in "321"
        ]
        state: Any = Mock(workers=self.workers)
        state.zk.getRegisteredPools.return_value = pools
        state.clock.monotonic = lambda: self.now
        self.moves = moves.Moves(state, lambda _request_id: 0, Mock())
        question = self.moves.questions[self.handler] = moves.Question()
        self.unanswered = question.unanswered

    def asked(self) -> list[str]:
        """Who is asked now, and who would be asked next."""
        for worker in self.workers.values():
            worker.ask.reset_mock()
        self.moves.check()
        return [
            name + "".join(other.launcher_id for other in each.args[2])
            for name, worker in self.workers.items()
            for each in worker.ask.mock_calls
            if each == call(self.handler, each.args[1], each.args[2])
        ]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_best_pool_is_asked_first(bench: Bench) -> None:
    assert bench.asked() == ["23"] and bench.moves.due == bench.now + moves.ASK_AGAIN
    assert bench.asked() == [], "not twice in a second"
    bench.now += moves.ASK_AGAIN
    assert bench.asked() == ["23"]


def test_a_pool_that_owes_an_answer_holds_up_no_other(bench: Bench) -> None:
    bench.unanswered.add("2")
    assert bench.asked() == ["3"]
    bench.unanswered.add("3")
    bench.now += moves.ASK_AGAIN
    assert bench.asked() == [] and bench.moves.due == bench.now + moves.ASK_AGAIN


def test_a_worse_pool_is_asked_only_after_a_while(bench: Bench) -> None:
    bench.handler.paused_since = bench.now - 1
    assert bench.asked() == [] and bench.moves.due == bench.handler.paused_since + moves.PATIENCE

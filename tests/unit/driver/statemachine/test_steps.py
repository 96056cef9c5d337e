"""State machines written as generators."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from nodepool.driver.statemachine import Instance
from nodepool.driver.statemachine.steps import SteppedMachine, Steps, Wait


class Subscribed:
    """A subscription whose answers the test gives."""

    latest: Any = None
    reached: bool | None = None

    def end(self, reached: bool = True) -> None:
        self.reached = reached


class Machine(SteppedMachine):
    def __init__(self, steps: Callable[[Machine], Steps[Instance | None]]) -> None:
        self._written = steps
        super().__init__()

    def steps(self) -> Steps[Instance | None]:
        return self._written(self)


def test_machine_advances_when_its_call_ends_and_returns_the_instance_at_completion() -> None:
    call: Future[str] = Future()
    instance = Instance()

    def steps(machine: Machine) -> Steps[Instance]:
        machine.external_id = yield from machine.call(call)
        yield Wait(until=5.0)
        return instance

    machine = Machine(steps)
    for _ in range(3):
        assert machine.advance() is None
        assert (machine.waiting_future, machine.next_wake, machine.external_id) == (
            call,
            None,
            None,
        )
    call.set_result("i-1")
    assert machine.advance() is None
    assert (machine.waiting_future, machine.next_wake, machine.external_id) == (None, 5.0, "i-1")
    assert machine.advance() is instance
    assert (machine.complete, machine.state, machine.next_wake) == (True, "complete", None)


def test_machine_that_failed_raises_its_error_again_and_never_completes() -> None:
    watch: Any = Subscribed()

    def steps(machine: Machine) -> Steps[None]:
        answer = yield from machine.answer(watch)
        raise ValueError(answer)

    machine = Machine(steps)
    for _ in range(2):
        assert machine.advance() is None
        assert machine.next_wake == math.inf
    watch.latest = "lost"
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            machine.advance()
    assert not machine.complete
    assert watch.reached is False


def test_result_that_arrives_after_abandonment_is_undone_once() -> None:
    undone: list[Future[str]] = []
    late, canceled, failed = (Future[str](), Future[str](), Future[str]())
    late.set_running_or_notify_cancel()
    failed.set_exception(ValueError())
    machines = {
        call: Machine(lambda machine, call=call: machine.call(call, undone.append))
        for call in (late, canceled, failed)
    }
    for call in late, canceled:
        machines[call].advance()
    with pytest.raises(ValueError):
        machines[failed].advance()
    for machine in machines.values():
        machine.abandon()
        machine.abandon()
    assert canceled.cancelled()
    assert undone == []
    late.set_result("i-1")
    assert undone == [late]


def test_abandoned_machine_ends_its_subscription_without_a_learned_duration() -> None:
    watch: Any = Subscribed()
    machine = Machine(lambda machine: (yield from machine.answer(watch)))
    machine.advance()
    machine.abandon()
    assert watch.reached is False
    assert machine.next_wake is None

"""The loop that advances machines: its end."""

from __future__ import annotations

import logging
import threading

import pytest

from nodepool.driver.statemachine.loop import LoopEnded, MachineLoop
from tests.conftest import wait_for


class Machine:
    def __init__(self, again: float | None = None) -> None:
        self.again = again
        self.ran = threading.Event()

    def run_pass(self) -> float | None:
        self.ran.set()
        return self.again


@pytest.mark.parametrize("drain", [True, False])
def test_an_ended_loop_takes_nothing(drain: bool) -> None:
    loop = MachineLoop("loop", logging.getLogger())
    loop.start()
    first = Machine()
    loop.add(first)
    assert first.ran.wait(5)
    loop.stop(drain=drain)
    loop.join(5)
    with pytest.raises(LoopEnded):
        loop.add(Machine())


def test_a_loop_that_is_drained_ends_after_its_last_machine() -> None:
    loop = MachineLoop("loop", logging.getLogger())
    machine = Machine(again=0.01)
    loop.add(machine)
    loop.start()
    assert machine.ran.wait(5)
    loop.stop(drain=True)
    loop.join(0.1)
    assert any(thread.is_alive() for thread in loop.threads) and list(loop.machines) == [machine]
    machine.again = None
    loop.join(5)
    assert not any(thread.is_alive() for thread in loop.threads) and not loop.machines


def test_a_loop_without_machines_takes_more_until_it_is_stopped() -> None:
    loop = MachineLoop("loop", logging.getLogger())
    loop.start()
    for machine in (Machine(), Machine()):
        loop.add(machine)
        assert machine.ran.wait(5)
        wait_for(lambda: not loop.machines)
    loop.stop()
    loop.join(5)
    assert not any(thread.is_alive() for thread in loop.threads)

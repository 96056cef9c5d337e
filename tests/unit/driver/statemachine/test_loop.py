"""The loop that advances machines: its end."""

from __future__ import annotations

import logging
import threading

import pytest

from nodepool.driver.statemachine.loop import LoopEnded, MachineLoop


class Machine:
    def __init__(self) -> None:
        self.ran = threading.Event()

    def run_pass(self) -> None:
        self.ran.set()


@pytest.mark.parametrize("drain", [True, False])
def test_an_ended_loop_takes_nothing(drain: bool) -> None:
    loop = MachineLoop("loop", logging.getLogger(), lambda _machine: None)
    loop.start()
    first = Machine()
    loop.add(first)
    assert first.ran.wait(5)
    loop.stop(drain=drain)
    loop.thread.join(5)
    with pytest.raises(LoopEnded):
        loop.add(Machine())


def test_a_loop_ends_after_what_is_being_added() -> None:
    loop = MachineLoop("loop", logging.getLogger(), lambda _machine: None)
    loop.start()
    late = Machine()
    with loop.hold_open():
        loop.stop(drain=True)
        loop.thread.join(0.1)
        assert loop.thread.is_alive()
        loop.add(late)
    assert late.ran.wait(5)
    loop.thread.join(5)
    assert not loop.thread.is_alive()

"""The thread that advances machines on events, not at a fixed rate."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from nodepool.base.workqueue import Reconciler
from nodepool.driver.statemachine.model import StateMachine


class LoopEnded(RuntimeError):
    """The provider was replaced, and has finished its work: its successor accepts new work."""


class Advanced(Protocol):
    """Interface for the loop: returns seconds until the next pass, or None at the end."""

    def run_pass(self) -> float | None: ...


class MachineLoop(Reconciler[Any]):
    """Runs the passes of each machine sequentially on one thread."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        super().__init__(name, self._pass, log)
        self._lock = threading.Lock()
        #: Those that have not ended, in the order in which they were added.
        self.machines: dict[Any, None] = {}
        self._stopping = self._ended = False

    def add(self, machine: Advanced) -> None:
        """Add a machine.

        :raises LoopEnded: it would not be run.
        """
        with self._lock:
            if self._ended:
                raise LoopEnded(f"{self.name} has ended")
            self.machines[machine] = None
        self.queue.add(machine)

    def wake(self, machine: Advanced) -> None:
        """Run the next pass of this machine immediately; from any thread."""
        if machine in self.machines:
            self.queue.add(machine)

    def stop(self, drain: bool = False) -> None:
        """End the thread: when all machines are finished (``drain``) or after the present pass."""
        self._stopping = True
        self._end_if_stopping(drain)

    def _end_if_stopping(self, drain: bool = True) -> None:
        with self._lock:
            if not self._stopping or (drain and self.machines):
                return
            self._ended = True
        super().stop()

    def _pass(self, machine: Advanced) -> float | None:
        if machine not in self.machines:
            return None  # it was woken in its last pass
        again = machine.run_pass()
        if again is None:
            del self.machines[machine]
            self._end_if_stopping()
        return again


class Pace:
    """Advances a machine: soon again after a change, then more and more rarely.

    :param wake: runs the next pass of the machine; called when its future is done.
    """

    #: Seconds.
    STEPS = (0.05, 0.1, 0.2, 0.4, 1.0)

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._unchanged = 0
        self._followed: Future[Any] | None = None

    def advance(self, machine: StateMachine, bound: float) -> tuple[Any, float]:
        """Advance it; return its result, and the seconds (``bound`` at most) until the next
        time.
        """
        before = machine.state
        result = machine.advance()
        future = machine.waiting_future
        if future is not None and future is not self._followed:
            future.add_done_callback(lambda _future: self._wake())
        self._followed = future
        if machine.state != before:
            self._unchanged = 0
            return result, 0.0
        if machine.next_wake is not None:
            return result, min(bound, max(0.0, float(machine.next_wake) - time.monotonic()))
        if future is not None:
            return result, bound  # its end wakes us
        step = self.STEPS[min(self._unchanged, len(self.STEPS) - 1)]
        self._unchanged += 1
        return result, min(bound, step)

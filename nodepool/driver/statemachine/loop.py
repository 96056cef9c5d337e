"""The thread that advances machines on events, not at a fixed rate."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from nodepool.base.workqueue import WorkQueue
from nodepool.driver.statemachine.model import StateMachine
from nodepool.exceptions import FOREIGN


class LoopEnded(RuntimeError):
    """The provider was replaced, and has finished its work: its successor accepts new work."""


class Advanced(Protocol):
    """Interface for the loop: returns seconds until the next pass, or None at the end."""

    def run_pass(self) -> float | None: ...


class MachineLoop:
    """Runs the passes of each machine sequentially on one thread.

    :param finished: called on the loop's thread with a machine that has ended.
    """

    def __init__(self, name: str, log: logging.Logger | logging.LoggerAdapter[Any], finished: Callable[[Any], None]) -> None:
        self._log = log
        self._finished = finished
        self._queue: WorkQueue[Any] = WorkQueue()
        self._lock = threading.Lock()
        #: Those that have not ended.
        self._machines: set[Any] = set()
        self._kept = 0
        self._drain = self._ended = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def add(self, machine: Advanced) -> None:
        """Add a machine. Raises LoopEnded: it would not be run."""
        with self.hold_open():
            self._machines.add(machine)
            self._queue.add(machine)

    @contextlib.contextmanager
    def hold_open(self) -> Iterator[None]:
        """Keep the thread from ending while a machine is added.

        :raises LoopEnded: it has already.
        """
        with self._lock:
            if self._ended:
                raise LoopEnded(f"{self.thread.name} has ended")
            self._kept += 1
        try:
            yield
        finally:
            with self._lock:
                self._kept -= 1
            self._end_if_drained()

    def wake(self, machine: Advanced) -> None:
        """Run the next pass of this machine immediately; from any thread."""
        if machine in self._machines:
            self._queue.add(machine)

    def stop(self, drain: bool) -> None:
        """End the thread: when all machines are finished (``drain``) or after the present pass."""
        if drain:
            self._drain = True
            self._end_if_drained()
            return
        with self._lock:
            self._ended = True
        self._queue.close()

    def _end_if_drained(self) -> None:
        with self._lock:
            if not self._drain or self._kept or self._machines:
                return
            self._ended = True
        self._queue.close()

    def _run(self) -> None:
        while (machine := self._queue.get()) is not None:
            again: float | None = None
            try:
                if machine in self._machines:  # not woken in its last pass
                    again = machine.run_pass()
            except FOREIGN:
                self._log.exception("Error in %s:", machine)
                again = 1.0
            self._queue.done(machine)
            if again is not None:
                self._queue.add_later(machine, again)
            elif machine in self._machines:
                self._machines.discard(machine)
                try:
                    self._finished(machine)
                except FOREIGN:
                    self._log.exception("Error after the end of %s:", machine)
                self._end_if_drained()


class PollInterval:
    """Pause of a machine: none while it changes, then growing up to a bound (seconds)."""

    STEPS = (0.05, 0.1, 0.2, 0.4, 1.0)

    def __init__(self) -> None:
        self._unchanged = 0

    def next(self, machine: StateMachine, changed: bool, bound: float) -> float:
        """Return the seconds until ``machine`` has to be advanced again."""
        if changed:
            self._unchanged = 0
            return 0.0
        wake = machine.next_wake
        if wake is not None:
            return min(bound, max(0.0, float(wake) - time.monotonic()))
        if machine.waiting_future is not None:
            return bound  # its end wakes us
        step = self.STEPS[min(self._unchanged, len(self.STEPS) - 1)]
        self._unchanged += 1
        return min(bound, step)


def follow_future(machine: StateMachine, seen: object, wake: Callable[[], None]) -> Any:
    """Call ``wake`` when the machine's future is done; return that future."""
    future = machine.waiting_future
    if future is not None and future is not seen:
        future.add_done_callback(lambda _future: wake())
    return future

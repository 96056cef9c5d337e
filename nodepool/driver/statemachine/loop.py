"""The thread that advances machines: when something happens, not at a fixed pace (design.md 3.5)."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from nodepool.exceptions import FOREIGN


class LoopEnded(RuntimeError):
    """The provider was replaced, and has finished what it was at: its successor takes new work."""


class Advanced(Protocol):
    """What the loop runs: returns the seconds until the next pass, or None when it is finished."""

    def run_pass(self) -> float | None: ...


class MachineLoop:
    """Runs each machine's passes one after the other on one thread.

    :param finished: called on the loop's thread with a machine that has ended.
    """

    def __init__(self, name: str, log: logging.Logger | logging.LoggerAdapter[Any],
                 finished: Callable[[Any], None]) -> None:
        self._log = log
        self._finished = finished
        self._condition = threading.Condition()
        self._due: dict[Any, float] = {}
        self._heap: list[tuple[float, int, Any]] = []
        self._count = itertools.count()
        self._working: Any = None
        self._woken = False
        self._stopping = False
        self._drain = False
        self._kept = 0
        self._ended = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def add(self, machine: Advanced) -> None:
        """:raises LoopEnded: nobody would run it."""
        with self.kept():
            self.wake(machine, new=True)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """The thread does not run out of machines in here.

        :raises LoopEnded: it has already.
        """
        with self._condition:
            if self._ended:
                raise LoopEnded(f"{self.thread.name} has ended")
            self._kept += 1
        try:
            yield
        finally:
            with self._condition:
                self._kept -= 1
                self._condition.notify()

    def wake(self, machine: Advanced, new: bool = False) -> None:
        """Run the next pass of this machine at once; from any thread."""
        with self._condition:
            if machine is self._working:
                self._woken = True
            elif new or machine in self._due:
                self._schedule(machine, 0.0)
                self._condition.notify()

    def _schedule(self, machine: Advanced, due: float) -> None:
        if self._due.get(machine, due + 1) <= due:
            return
        self._due[machine] = due
        heapq.heappush(self._heap, (due, next(self._count), machine))

    def stop(self, drain: bool) -> None:
        """End the thread: when all machines are finished (``drain``) or after the present pass."""
        with self._condition:
            if drain:
                self._drain = True
            else:
                self._stopping = True
            self._condition.notify()

    def _next(self) -> Any:
        with self._condition:
            while not self._stopping:
                while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
                    heapq.heappop(self._heap)
                if not self._heap:
                    if self._drain and not self._kept:
                        break
                    self._condition.wait()
                    continue
                left = self._heap[0][0] - time.monotonic()
                if left > 0:
                    self._condition.wait(left)
                    continue
                machine = heapq.heappop(self._heap)[2]
                del self._due[machine]
                self._working = machine
                self._woken = False
                return machine
            self._ended = True
            return None

    def _run(self) -> None:
        while (machine := self._next()) is not None:
            again: float | None
            try:
                again = machine.run_pass()
            except FOREIGN:
                self._log.exception("Error in state machine:")
                again = 1.0
            with self._condition:
                self._working = None
                if again is not None:
                    self._schedule(machine, time.monotonic() + (0.0 if self._woken else again))
            if again is None:
                try:
                    self._finished(machine)
                except FOREIGN:
                    self._log.exception("Error after a state machine:")


class Pace:
    """How long a machine may rest: not at all while it changes, then longer and longer up to a bound (seconds)."""

    STEPS = (0.05, 0.1, 0.2, 0.4, 1.0)

    def __init__(self) -> None:
        self._unchanged = 0

    def rest(self, machine: Any, changed: bool, bound: float) -> float:
        """Seconds until ``machine`` wants to be advanced again."""
        if changed:
            self._unchanged = 0
            return 0.0
        wake = getattr(machine, "next_wake", None)
        if wake is not None:
            return min(bound, max(0.0, float(wake) - time.monotonic()))
        if getattr(machine, "waiting_future", None) is not None:
            return bound  # its end wakes us
        step = self.STEPS[min(self._unchanged, len(self.STEPS) - 1)]
        self._unchanged += 1
        return min(bound, step)


def follow_future(machine: Any, seen: Any, wake: Callable[[], None]) -> Any:
    """Have ``wake`` called when the future that the machine waits for is done; returns the future followed."""
    future = getattr(machine, "waiting_future", None)
    if future is not None and future is not seen:
        future.add_done_callback(lambda _future: wake())
    return future

"""State machines written as generators that yield what they wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from nodepool.cloud.polling import Observation, Subscription
from nodepool.driver.statemachine.model import ExternalId, Instance, StateMachine
from nodepool.logconfig import Log

T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True)
class Wait:
    """What a machine waits for. Without any, it is advanced after at most one second."""

    #: A call: its end wakes the machine.
    future: Future[Any] | None = None
    #: A time in monotonic seconds.
    until: float | None = None
    #: A subscription: each answer of the poller wakes the machine.
    watch: Subscription[Any] | None = None
    #: Called with ``future`` when it ends after the machine was abandoned, unless the call could be
    #: canceled.
    undo: Callable[[Future[Any]], object] | None = None


#: Returns ``T`` at the end.
Steps: TypeAlias = Generator[Wait, None, T]


class SteppedMachine(StateMachine):
    """Runs the generator :meth:`steps` as a :class:`StateMachine` (DRV-7.3).

    The generator is resumed by each call of ``advance``, which may happen at any time: check again
    after each ``yield`` whether the event has happened. The first error ends the machine, and each
    further ``advance`` raises that error again. The generator of an abandoned machine is neither
    resumed nor closed, and the garbage collector may drop it on any thread: clean up in
    :meth:`abandon`, not in ``finally``.
    """

    COMPLETE = "complete"

    def __init__(self) -> None:
        super().__init__()
        self._steps = self.steps()
        self._wait = Wait()
        self._error: BaseException | None = None

    def steps(self) -> Steps[Instance | None]:
        """Create or delete the resource; the steps of a create machine return the instance."""
        raise NotImplementedError

    def advance(self) -> Instance | None:
        if self._error is not None:
            raise self._error
        before, self._wait = self._wait, Wait()
        instance: Instance | None = None
        try:
            self._wait = next(self._steps)
        except StopIteration as end:
            instance = end.value
            self.state, self.complete = self.COMPLETE, True
        except BaseException as error:
            self._error = error
            if before.watch is not None:
                before.watch.end(reached=False)
            raise
        self.waiting_future = self._wait.future
        self.next_wake = math.inf if self._wait.watch is not None else self._wait.until
        return instance

    def abandon(self) -> None:
        wait, self._wait = self._wait, Wait()
        self.waiting_future = self.next_wake = None
        if wait.watch is not None:
            wait.watch.end(reached=False)
        if wait.undo is not None and wait.future is not None and not wait.future.cancel():
            wait.future.add_done_callback(wait.undo)

    def call(
        self, future: Future[T], undo: Callable[[Future[T]], object] | None = None
    ) -> Steps[T]:
        """Wait for the call; return its result or raise its error."""
        while not future.done():
            yield Wait(future=future, undo=undo)
        return future.result()

    def answer(self, watch: Subscription[V]) -> Steps[Observation[V]]:
        """Return the latest answer of the poller, which may be an answer that was returned
        before.
        """
        while True:
            yield Wait(watch=watch)
            if (answer := watch.latest) is not None:
                return answer

    def sleep(self, seconds: float) -> Steps[None]:
        """Wait ``seconds``, however often the machine is woken."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            yield Wait(until=until)

    def _wake(self) -> None:
        if self.wake is not None:
            self.wake()


class Deletion(SteppedMachine):
    """Deletes the resource of an external id through the driver's adapter."""

    def __init__(self, adapter: Any, external_id: ExternalId, log: Log) -> None:
        super().__init__()
        self.adapter = adapter
        self.external_id = external_id
        self.log = log

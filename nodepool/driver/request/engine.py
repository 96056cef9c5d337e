"""Engine: runs the life of a request, which is a generator, one step at a time."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, TypeAlias, TypeVar

from kazoo.exceptions import (
    ConnectionClosedError,
    ConnectionLoss,
    OperationTimeoutError,
    SessionExpiredError,
)

from nodepool.driver.request.base import RequestHandler
from nodepool.driver.request.state import (
    ADMISSION,
    BUSY,
    CATCH_UP,
    NEXT,
    Admission,
    End,
    Event,
    How,
    Outcome,
    State,
)
from nodepool.exceptions import FOREIGN
from nodepool.zk.locks import LockHandle
from nodepool.zk.writer import Txn

T = TypeVar("T")
#: Yields what it waits for. A transaction is answered with its results and None, or with None and
#: the error. None waits for an event. An exception does as well, after it was raised to the caller
#: of the last event.
Steps: TypeAlias = Generator[Txn | BaseException | None, Any, T]
Answer: TypeAlias = tuple[list[Any] | None, BaseException | None]

#: Reasons that are independent of the request.
CONNECTION_ERRORS = (
    ConnectionLoss,
    ConnectionClosedError,
    OperationTimeoutError,
    SessionExpiredError,
)
DROPPED = Outcome(How.DROPPED)


class Engine(abc.ABC):
    """Passes events, and answers of ZooKeeper, to the life of one request."""

    def __init__(self, handler: RequestHandler) -> None:
        self.handler = handler
        self.state = State.OFFERED
        #: Events that have to wait for an answer of ZooKeeper, and the end that they bring.
        self._later: dict[Event, End | None] = {}
        self._life = self.serve()
        next(self._life)

    @abc.abstractmethod
    def serve(self) -> Steps[None]:
        """Serve the request."""

    # -- events and answers

    def happen(self, event: Event, end: End | None = None) -> None:
        """Resume the life with an event; during a write, or a step, it is kept for its end."""
        admission = ADMISSION[self.state][event]
        if admission is Admission.ACT and event is Event.DROP:
            self.end(DROPPED)  # an answer of ZooKeeper may follow
        elif (
            admission is Admission.LATER or getgeneratorstate(self._life) is GEN_RUNNING
        ):  # by a driver's hook
            self._later[event] = end
        elif admission is Admission.ACT:
            self._resume(*((self._life.send, event) if end is None else (self._life.throw, end)))

    def _resume(self, resume: Callable[[Any], Txn | BaseException | None], value: object) -> None:
        """Run the next step, start its write, and handle the events that waited."""
        try:
            wanted = resume(value)
        except StopIteration:
            return
        except FOREIGN as error:
            if isinstance(error, CONNECTION_ERRORS):
                self.handler.log.warning("ZooKeeper failed while working on the request: %r", error)
            else:
                self.handler.log.error("Error while giving up the request:", exc_info=error)
            self.end(DROPPED)
            return
        if isinstance(wanted, Txn):
            receive = partial(self.handler.pw.post, self.handler, self.answered)
            try:
                self.handler.zk.writer.submit(wanted, receive)
            except FOREIGN as error:
                receive(None, error)
        elif wanted is not None:
            raise wanted
        for event in CATCH_UP:
            if event in self._later and self.state not in BUSY:
                self.happen(event, self._later.pop(event))

    def answered(self, results: list[Any] | None, error: BaseException | None) -> None:
        if self.state is State.ENDED:
            # Dropped meanwhile: release what was obtained, the rest is found again from ZooKeeper.
            # The request may be in other hands by now.
            for result in results or ():
                if isinstance(result, str) and "__lock__" in result:
                    self.handler.zk.kazoo_client.abandoned.add(result)
            results, error = None, SessionExpiredError()
        self._resume(self._life.send, (results, error))

    # -- states

    def to(self, state: State) -> None:
        if state not in NEXT[self.state]:
            # A bug; the state of the request in the pool and in ZooKeeper stays correct all the
            # same.
            self.handler.log.error(
                "Unexpected transition of node request from %s to %s", self.state.value, state.value
            )
        elif state is not self.state:
            self.handler.log.debug("Node request: %s -> %s", self.state.value, state.value)
        self.state = state

    def write(self, state: State, txn: Txn) -> Steps[Answer]:
        """Write a transaction in this state; return its results, or the error."""
        self.to(state)
        answer: Answer = yield txn
        if self.state is State.WRITING:
            self.to(State.FILLING)
        elif self.state is State.FULFILLING:
            self.to(State.LAUNCHING)
        return answer

    def pause(self, paused: bool) -> None:
        """Let the pool accept nothing more while this request waits for capacity."""
        handler = self.handler
        if self.state in (State.LAUNCHING, State.WAITING):
            self.to(State.WAITING if paused else State.LAUNCHING)
        if handler.paused != paused:
            handler.paused = paused
            handler.paused_since = handler.pw.nodepool.clock.monotonic()
            handler.pw.capacity.pause_changed(handler)

    # -- ends

    def end(self, outcome: Outcome) -> None:
        """Report the outcome to the pool, once."""
        if self.state is State.ENDED:
            return
        handler = self.handler
        if outcome.how is How.DROPPED:  # we may not write: leave everything to the cleanup
            handler.log.warning("Dropping the request; it is picked up again from ZooKeeper")
            records: list[Any] = [*handler.nodeset, handler.request]
            for record in records:
                lock, record.lock = record.lock, None
                if isinstance(lock, LockHandle):
                    handler.zk.kazoo_client.abandoned.add(lock.path)  # the session may live on
            handler.launchesDropped()
        self.pause(False)
        self.to(State.ENDED)
        handler.pw.ended(handler, outcome)

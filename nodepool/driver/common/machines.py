"""State machines of a cloud whose machines are made by calls and then looked at, many with one question (DRV-7.3).

What differs between clouds is behind :class:`Maker`. Nothing blocks here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from nodepool.cloud import CloudCalls, Poller
from nodepool.driver.common.offers import Offer
from nodepool.driver.statemachine.model import Instance, StateMachine
from nodepool.driver.statemachine.watching import WatchingMachine
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log


@dataclass
class Job:
    """One attempt to make a machine; steps put what they learn into it."""

    name: str
    label: Any
    image: Any
    """External id of our upload; None for a cloud image."""
    tags: dict[str, str]
    log: Log
    offer: Offer | None = None
    #: Something may have been made.
    begun: bool = False
    #: Looks in a row that did not find it.
    missed: int = 0
    #: What it takes; known once it was asked for.
    quota: QuotaInformation = field(default_factory=lambda: QuotaInformation(instances=1))
    #: Of the driver.
    facts: dict[str, Any] = field(default_factory=dict)


ASK_AGAIN = 60.0
"""Seconds after which a deletion that does not come about is asked for once more: what took it may not have been the cloud."""

Step = Callable[[], Any]
"""A further call, on a thread of the lane "write"; it may return a view, which saves the next look."""


class Maker(Protocol):
    """The adapter, as machines see it. Views are what its poller finds."""

    calls: CloudCalls
    watched: Poller[Any]

    def launch(self, job: Job) -> None:
        """Ask for the machine; on a thread of the lane "write"."""

    def progress(self, job: Job, view: Any) -> Instance | Step | None:
        """The machine when it is up, a further step, or None to wait. Raises what ends the attempt."""

    def remove(self, key: str) -> bool:
        """Ask for the deletion, on a thread of the lane "delete"; False: there is nothing to wait for."""

    def is_gone(self, key: str, view: Any) -> bool:
        """Whether nothing of it is left."""

    def note_gone(self, key: str) -> None:
        """It is confirmed."""


class _Machine(WatchingMachine):
    def _submit(self, function: Callable[[], Any], lane: str) -> None:
        self.waiting_future = self.adapter.calls.run(function, lane=lane)
        self.next_wake = None

    def _result(self) -> Any:
        future, self.waiting_future = self.waiting_future, None
        return future.result()

    def _watch_for(self, key: str, kind: object) -> None:
        self.look_at(self.adapter.watched.watch(key, self._wake, kind))


class CreateMachine(_Machine):
    CREATING, WAITING, COMPLETE = "creating", "waiting", "complete"

    def __init__(self, maker: Maker, job: Job) -> None:
        super().__init__(maker, job.log)
        self.job = job
        self.external_id = job.name

    def advance(self) -> Instance | None:
        if self.state == StateMachine.START:
            self._submit(lambda: self.adapter.launch(self.job), "write")
            self.state = self.CREATING
        if self.state == self.CREATING:
            if not self.waiting_future.done():
                return None
            self._made()
            self._watch_for(self.job.name, ("launch", self.job.label.name))
            self.state = self.WAITING
        if self.state == self.WAITING:
            return self._look()
        return None

    def _made(self) -> None:
        try:
            self._result()
        except BaseException:
            if not self.job.begun:
                self.external_id = None  # nothing to delete
            raise

    def _look(self) -> Instance | None:
        if self.waiting_future is not None:
            if not self.waiting_future.done():
                return None
            view = self._result()
            if view is None:
                self._watch_for(self.job.name, ("step", self.job.label.name))
                return None
        else:
            look = self._watch.look if self._watch is not None else None
            if look is None:
                return None
            view = look.value
        try:
            found = self.adapter.progress(self.job, view)
        except BaseException:
            self.looked_away(reached=False)
            raise
        if isinstance(found, Instance):
            self.looked_away()
            self.state = self.COMPLETE
            self.complete = True
            return found
        if found is not None:
            self.looked_away()
            self._submit(found, "write")
        elif self._watch is None:
            self._watch_for(self.job.name, ("step", self.job.label.name))
        return None

    def abandon(self) -> None:
        future, self.waiting_future = self.waiting_future, None
        self.looked_away(reached=False)
        if future is not None and not future.cancel():
            future.add_done_callback(self._remove_late)

    def _remove_late(self, _call: Future[Any]) -> None:
        """What was under way when the launch was given up may have come after what was deleted."""
        if self.job.begun:
            adapter, name = self.adapter, self.job.name
            adapter.calls.run(lambda: adapter.remove(name), lane="delete")


class DeleteMachine(_Machine):
    ASKING, DELETING, COMPLETE = "asking for the deletion", "deleting", "complete"

    def __init__(self, maker: Maker, external_id: object, log: logging.Logger | Log) -> None:
        super().__init__(maker, log)
        self.external_id = external_id
        self._since = 0.0

    def advance(self) -> None:
        if not self.external_id:
            self.complete = True
            return
        key = str(self.external_id)
        if self.state == StateMachine.START:
            self._since = time.monotonic()
            self._submit(lambda: self.adapter.remove(key), "delete")
            self.state = self.ASKING
        if self.state == self.ASKING:
            if not self.waiting_future.done():
                return
            if self._result():
                self._watch_for(key, "delete")
                self.state = self.DELETING
            else:
                self.state = self.COMPLETE
        if self.state == self.DELETING:
            assert self._watch is not None
            look = self._watch.look
            if look is None or not self.adapter.is_gone(key, look.value):
                if time.monotonic() - self._since > ASK_AGAIN:
                    self.log.warning("%s is still there after %.0f s, its deletion is asked for again", key, ASK_AGAIN)
                    self.looked_away(reached=False)
                    self.state = StateMachine.START
                    self.advance()
                return
            self.looked_away()
            self.state = self.COMPLETE
        if self.state == self.COMPLETE:
            self.adapter.note_gone(key)
            self.complete = True

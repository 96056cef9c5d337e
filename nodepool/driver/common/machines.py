"""State machines of clouds whose machines are polled together (DRV-7.3).

The differences between clouds are behind :class:`Maker`. Nothing blocks here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from nodepool import exceptions
from nodepool.cloud import CloudCalls, Poller
from nodepool.driver.common.offers import Offer
from nodepool.driver.statemachine.model import Instance
from nodepool.driver.statemachine.steps import SteppedMachine, Steps, Wait
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log


@dataclass
class Job:
    """One attempt to create a machine; steps store their results in it."""

    name: str
    label: Any
    image: Any
    """External id of our upload; None for a cloud image."""
    tags: dict[str, str]
    log: Log
    offer: Offer | None = None
    #: Something may have been created.
    begun: bool = False
    #: Polls in a row that did not find it.
    missed: int = 0
    #: Quota usage; known after the first query.
    quota: QuotaInformation = field(default_factory=lambda: QuotaInformation(instances=1))
    #: State of the driver.
    facts: dict[str, Any] = field(default_factory=dict)


ASK_AGAIN = 60.0
"""Seconds after which an unfinished deletion is requested again: the request may not have reached the cloud."""

Step = Callable[[], Any]
"""A further call, on a thread of the lane "write"; it may return a view, which saves the next poll."""


class Maker(Protocol):
    """Interface of the adapter for machines. Views are results of its poller."""

    calls: CloudCalls
    watched: Poller[Any]

    def launch(self, job: Job) -> None:
        """Ask for the machine; on a thread of the lane "write"."""

    def progress(self, job: Job, view: Any) -> Instance | Step | None:
        """Return the running machine, a further step, or None to wait. Raises to end the attempt."""

    def remove(self, key: str) -> bool:
        """Request the deletion, on a thread of lane "delete"; False: there is nothing to wait for."""

    def is_gone(self, key: str, view: Any) -> bool:
        """Return whether nothing of it exists any more."""

    def note_gone(self, key: str) -> None:
        """Record a confirmed deletion."""


class CreateMachine(SteppedMachine):
    def __init__(self, maker: Maker, job: Job) -> None:
        super().__init__()
        self.maker = maker
        self.job = job
        self.external_id = job.name

    def steps(self) -> Steps[Instance]:
        maker, job = self.maker, self.job
        try:
            yield from self._write(lambda: maker.launch(job))
        except exceptions.FOREIGN:
            if not job.begun:
                self.external_id = None  # nothing to delete
            raise
        found = yield from self._watch("launch")
        while not isinstance(found, Instance):
            view = yield from self._write(found)
            found = (maker.progress(job, view) if view is not None else None) or (yield from self._watch("step"))
        return found

    def _write(self, function: Step) -> Steps[Any]:
        return self.call(self.maker.calls.run(function, lane="write"), self._remove_late)

    def _watch(self, kind: str) -> Steps[Instance | Step]:
        """Wait until the machine runs or needs a further step."""
        watch = self.maker.watched.watch(self.job.name, self._wake, (kind, self.job.label.name))
        while True:
            answer = yield from self.answer(watch)
            found = self.maker.progress(self.job, answer.value)
            if found is not None:
                watch.end()
                return found

    def _remove_late(self, _call: Future[Any]) -> None:
        """Delete what a call may have created after its launch was abandoned and deleted."""
        if self.job.begun:
            maker, name = self.maker, self.job.name
            maker.calls.run(lambda: maker.remove(name), lane="delete")


class DeleteMachine(SteppedMachine):
    def __init__(self, maker: Maker, external_id: object, log: logging.Logger | Log) -> None:
        super().__init__()
        self.maker = maker
        self.external_id = external_id
        self.log = log

    def steps(self) -> Steps[None]:
        if not self.external_id:
            return
        maker, key, gone = self.maker, str(self.external_id), False
        while not gone:
            since = time.monotonic()
            asked = yield from self.call(maker.calls.run(lambda: maker.remove(key), lane="delete"))
            gone = not asked or (yield from self._gone(key, since))
        maker.note_gone(key)

    def _gone(self, key: str, since: float) -> Steps[bool]:
        """Wait until nothing exists. Return False if the deletion has to be requested again."""
        watch = self.maker.watched.watch(key, self._wake, "delete")
        while (answer := watch.look) is None or not self.maker.is_gone(key, answer.value):
            if time.monotonic() - since > ASK_AGAIN:
                self.log.warning("%s still exists after %.0f s, requesting its deletion again", key, ASK_AGAIN)
                watch.end(reached=False)
                return False
            yield Wait(watch=watch)
        watch.end()
        return True

"""Queues of deletions in clouds."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator

import pytest

from nodepool.builder.provider_queues import ProviderQueues
from tests.conftest import wait_for


class Queues(ProviderQueues):
    """Queues of a cloud that answers when a test lets it."""

    def __init__(self) -> None:
        self.running, self.answers = True, threading.Semaphore(0)
        self.started, self.done = list[str](), list[str]()
        super().__init__("test", logging.getLogger(), lambda: self.running)

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.submit("slow", key, functools.partial(self._job, key))

    def _job(self, key: str) -> None:
        self.started.append(key)
        assert self.answers.acquire(timeout=20)
        self.done.append(key)

    def answer(self, number: int) -> None:
        """Let this many jobs end, and wait until the others have ended, too."""
        self.answers.release(number)
        wait_for(lambda: not self._busy(), what="the end of the jobs")


@pytest.fixture
def queues() -> Iterator[Queues]:
    found = Queues()
    yield found
    found.answer(10)


def test_job_that_waits_or_runs_is_not_queued_again(queues: Queues) -> None:
    queues.delete("a", "a", "b", "b")
    queues.answer(4)
    assert queues.done == ["a", "b"]
    queues.delete("a")
    queues.answer(1)
    assert queues.done == ["a", "b", "a"]


def test_queue_that_timed_out_is_waited_for_again_once_it_has_made_progress(queues: Queues) -> None:
    queues.delete("a")
    assert not queues.wait(0.01)
    assert queues.wait(20), "only other queues are waited for"
    queues.answer(1)
    queues.delete("b")
    assert not queues.wait(0.01)


def test_queued_jobs_are_skipped_after_the_end(queues: Queues) -> None:
    queues.delete("a", "b")
    wait_for(lambda: queues.started, what="the first job")
    queues.running = False
    assert queues.wait(20), "nothing is waited for"
    queues.answer(2)
    assert queues.done == ["a"]

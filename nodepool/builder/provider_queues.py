"""Run deletions in clouds sequentially per provider, and providers in parallel (BLD-10.D)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

Job = Callable[[], object]


@dataclass
class _Queue:
    jobs: dict[Hashable, Job] = field(default_factory=dict)
    active: Hashable = None
    #: A wait for it timed out; later waits skip it until it makes progress.
    stuck: bool = False


class ProviderQueues:
    """One thread per provider, which lives only while it has work.

    :param running: False if no further job may be started.
    """

    def __init__(self, name: str, log: logging.Logger, running: Callable[[], bool]) -> None:
        self._name = name
        self._log = log
        self._running = running
        self._condition = threading.Condition()
        self._lanes: dict[str, _Queue] = {}

    def submit(self, provider: str, key: Hashable, job: Job) -> None:
        """Queue a job, unless the provider's queue has it already."""
        with self._condition:
            lane = self._lanes.get(provider)
            if lane is not None and (key in lane.jobs or lane.active == key):
                return
            if lane is None:
                lane = self._lanes[provider] = _Queue()
                threading.Thread(target=self._work, args=(provider, lane), name=f"{self._name}-{provider}", daemon=True).start()
            lane.jobs[key] = job

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until all jobs are done.

        Queues that blocked an earlier call are not waited for again.
        """
        with self._condition:
            done = self._condition.wait_for(
                lambda: not self._running() or all(lane.stuck for lane in self._lanes.values()), timeout
            )
            for lane in self._lanes.values():
                lane.stuck = True
            return done

    def wake(self) -> None:
        """Let waiting callers check again whether to continue."""
        with self._condition:
            self._condition.notify_all()

    def _work(self, provider: str, lane: _Queue) -> None:
        while True:
            with self._condition:
                lane.active = None
                if not self._running():
                    lane.jobs.clear()
                if not lane.jobs:
                    if self._lanes.get(provider) is lane:
                        del self._lanes[provider]
                    self._condition.notify_all()
                    return
                key = next(iter(lane.jobs))
                job = lane.jobs.pop(key)
                lane.active = key
            started = time.monotonic()
            try:
                job()
            except Exception:  # a driver may raise anything; the provider's other jobs continue
                self._log.exception("Error deleting an upload of provider %s:", provider)
            with self._condition:
                if lane.stuck:
                    lane.stuck = False
                    self._log.info("Provider %s responds again after %.0f s", provider, time.monotonic() - started)

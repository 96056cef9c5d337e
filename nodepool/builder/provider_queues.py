"""Run deletions in clouds sequentially per provider, and providers in parallel (BLD-10.D)."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable

from nodepool.base import threads


class ProviderQueues:
    """A queue per provider; the jobs run on threads that all parts of the process share.

    :param running: False if no further job may be started.
    """

    def __init__(self, name: str, log: logging.Logger, running: Callable[[], bool]) -> None:
        self._name = name
        self._log = log
        self._running = running
        self._condition = threading.Condition()
        self._lanes: dict[str, threads.Lane] = {}
        #: Provider -> keys of the jobs that wait or run.
        self._keys: dict[str, set[Hashable]] = defaultdict(set)
        #: Providers whose jobs a wait has timed out for; later waits skip them until they make
        #: progress.
        self._stuck: set[str] = set()

    def submit(self, provider: str, key: Hashable, job: Callable[[], object]) -> None:
        """Queue a job, unless the provider's queue has it already."""
        with self._condition:
            if key in self._keys[provider]:
                return
            self._keys[provider].add(key)
            if provider not in self._lanes:
                self._lanes[provider] = threads.shared().lane(f"{self._name}-{provider}", 1)
            self._lanes[provider].submit(self._run, provider, key, job)

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until all jobs are done.

        Queues that blocked an earlier call are not waited for again.
        """
        with self._condition:
            done = self._condition.wait_for(
                lambda: not self._running() or self._busy() <= self._stuck, timeout
            )
            self._stuck |= self._busy()
            return done

    def _busy(self) -> set[str]:
        return {provider for provider, keys in self._keys.items() if keys}

    def wake(self) -> None:
        """Let waiting callers check again whether to continue."""
        with self._condition:
            self._condition.notify_all()

    def _run(self, provider: str, key: Hashable, job: Callable[[], object]) -> None:
        started = time.monotonic()
        try:
            if self._running():
                job()
        except Exception:  # a driver may raise anything; the provider's other jobs continue
            self._log.exception("Error deleting an upload of provider %s:", provider)
        with self._condition:
            self._keys[provider].discard(key)
            if provider in self._stuck:
                self._stuck.discard(provider)
                self._log.info(
                    "Provider %s responds again after %.0f s", provider, time.monotonic() - started
                )
            self._condition.notify_all()

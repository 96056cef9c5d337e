"""Run deletions in clouds sequentially per provider, and providers in parallel (BLD-10.D)."""

from __future__ import annotations

import logging
import threading
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
        self._lock = threading.Lock()
        self._lanes: dict[str, threads.Lane] = {}
        #: Jobs that wait or run.
        self._keys: set[Hashable] = set()

    def submit(self, provider: str, key: Hashable, job: Callable[[], object]) -> None:
        """Queue a job, unless the job with this key waits or runs already."""
        with self._lock:
            if key in self._keys:
                return
            self._keys.add(key)
            if provider not in self._lanes:
                self._lanes[provider] = threads.shared().lane(f"{self._name}-{provider}", 1)
            self._lanes[provider].submit(self._run, provider, key, job)

    def _run(self, provider: str, key: Hashable, job: Callable[[], object]) -> None:
        try:
            if self._running():
                job()
        except Exception:  # a driver may raise anything; the provider's other jobs continue
            self._log.exception("Error deleting an upload of provider %s:", provider)
        finally:
            with self._lock:
                self._keys.discard(key)

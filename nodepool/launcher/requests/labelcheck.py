"""Asks clouds in separate threads whether labels can be created.

A slow cloud thus delays no label of others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any

from nodepool.base import threads
from nodepool.exceptions import FOREIGN

#: Seconds for which an answer is valid.
FRESH = 4.5

Key = tuple[str, str]
Answer = tuple[float, Any, "bool | Exception"]


class LabelCheck:
    """One thread per provider while there are questions for it.

    :param answered: called on such a thread after each answer.
    """

    def __init__(self, answered: Callable[[], Any], now: Callable[[], float] = time.monotonic) -> None:
        self._answered = answered
        self._now = now
        self._lock = threading.Lock()
        self._answers: dict[Key, Answer] = {}
        self._lanes: dict[str, Executor] = {}
        #: Questions without an answer.
        self._asked: dict[Key, Future[None]] = {}
        self._stopped = False

    def ready(self, provider: str, label: str, what: object, ask: Callable[[], Any]) -> bool:
        """Return the answer of ``ask()``; False until there is one.

        :param what: the object of the question; answers about an earlier one are ignored.
        :raises Exception: raised by ``ask``.
        """
        key = (provider, label)
        with self._lock:
            found = self._answers.get(key)
            if found is None or found[1] is not what or self._now() - found[0] >= FRESH:
                if key not in self._asked and not self._stopped:
                    lane = self._lanes.setdefault(provider, threads.shared().lane(f"PoolWorker-min-ready-{provider}", 1))
                    self._asked[key] = lane.submit(self._ask, key, what, ask)
                return False
        if isinstance(found[2], Exception):
            raise found[2]
        return found[2]

    def _ask(self, key: Key, what: object, ask: Callable[[], Any]) -> None:
        answer: bool | Exception
        try:
            answer = bool(ask())
        except FOREIGN as error:  # shown in the list of problems
            answer = error if isinstance(error, Exception) else RuntimeError(repr(error))
        with self._lock:
            self._answers[key] = (self._now(), what, answer)
            del self._asked[key]
        self._answered()

    def stop(self) -> None:
        """Ask no more questions."""
        with self._lock:
            self._stopped = True
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)

    def join(self, timeout: float | None = None) -> None:
        """Wait up to ``timeout`` seconds in total for running calls to clouds."""
        with self._lock:
            running = [future for future in self._asked.values() if not future.done()]
        wait(running, timeout)

"""Asks clouds in separate threads whether labels can be created.

A slow cloud thus delays no label of others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from nodepool.exceptions import FOREIGN

#: Seconds for which an answer is valid.
FRESH = 4.5

Answer = tuple[float, Any, "bool | Exception"]


class LabelCheck:
    """One thread per provider while there are questions for it.

    :param answered: called on such a thread after each answer.
    """

    def __init__(self, answered: Callable[[], Any], now: Callable[[], float] = time.monotonic) -> None:
        self._answered = answered
        self._now = now
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, str], Answer] = {}
        self._questions: dict[str, dict[str, tuple[Any, Callable[[], Any]]]] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._stopped = False

    def ready(self, provider: str, label: str, what: object, ask: Callable[[], Any]) -> bool:
        """Return the answer of ``ask()``; False until there is one.

        :param what: the object of the question; answers about an earlier one are ignored.
        :raises Exception: raised by ``ask``.
        """
        with self._lock:
            found = self._answers.get((provider, label))
            if found is None or found[1] is not what or self._now() - found[0] >= FRESH:
                self._questions.setdefault(provider, {})[label] = (what, ask)
                if provider not in self._threads and not self._stopped:
                    thread = threading.Thread(
                        target=self._run, args=(provider,), name=f"PoolWorker-min-ready-{provider}", daemon=True
                    )
                    self._threads[provider] = thread
                    thread.start()
                return False
        if isinstance(found[2], Exception):
            raise found[2]
        return found[2]

    def _run(self, provider: str) -> None:
        while True:
            with self._lock:
                questions = self._questions.get(provider)
                if not questions or self._stopped:
                    self._questions.pop(provider, None)
                    del self._threads[provider]
                    return
                label = next(iter(questions))
                what, ask = questions.pop(label)
            answer: bool | Exception
            try:
                answer = bool(ask())
            except FOREIGN as error:  # shown in the list of problems
                answer = error if isinstance(error, Exception) else RuntimeError(repr(error))
            with self._lock:
                self._answers[provider, label] = (self._now(), what, answer)
            self._answered()

    def stop(self) -> None:
        """Ask no more questions."""
        self._stopped = True

    def join(self, timeout: float | None = None) -> None:
        """Wait up to ``timeout`` seconds in total for running calls to clouds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

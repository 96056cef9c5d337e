"""Answers of the cloud that are kept for a time, or until they seem to be wrong."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any

from nodepool.cloud.errors import CallTimeout

Key = tuple[str, str | None]

SHARED_DEADLINE = 150.0
"""Seconds to wait for the answer to a question of another thread: longer than a call with its retries takes."""


class AnswerCache:
    """Asks once, also when many threads have the same question: those who come later share answer or error.

    A renewal makes only its caller wait: the others continue with the older answer until the new one is there.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[Key, Any] = {}
        self._answered: dict[Key, float] = {}
        self._renewed: dict[Key, float] = {}
        self._fetches: dict[Key, Callable[[], Any]] = {}
        self._asked: dict[Key, Future[Any]] = {}

    def get(self, kind: str, name: str | None, fetch: Callable[[], Any], ttl: float = math.inf) -> Any:
        """The answer, asked for by ``fetch`` the first time, and when the last one is older than ``ttl`` seconds.

        :raises CallTimeout: the question of another thread takes too long.
        """
        key = (kind, name)
        with self._lock:
            if key in self._answers and self._clock() - self._answered[key] <= ttl:
                return self._answers[key]
            asked, mine = self._take_on(key)
        return self._ask(key, fetch, mine) if mine is not None else self._share(key, asked)

    def _take_on(self, key: Key) -> tuple[Future[Any] | None, Future[Any] | None]:
        """The question as another caller has asked it, or a new one that is ours to ask."""
        asked = self._asked.get(key)
        if asked is not None:
            return asked, None
        mine: Future[Any] = Future()
        self._asked[key] = mine
        return None, mine

    def _ask(self, key: Key, fetch: Callable[[], Any], mine: Future[Any]) -> Any:
        try:
            value = fetch()
        except BaseException as error:
            with self._lock:
                if self._asked.get(key) is mine:
                    del self._asked[key]
            mine.set_exception(error)
            raise
        with self._lock:
            if self._asked.get(key) is mine:  # not forgotten meanwhile
                del self._asked[key]
                self._answers[key], self._fetches[key] = value, fetch
                self._answered[key] = self._clock()
        mine.set_result(value)
        return value

    def _share(self, key: Key, asked: Future[Any] | None) -> Any:
        assert asked is not None
        if not wait([asked], SHARED_DEADLINE).done:
            raise CallTimeout(
                f"{key[0]} {key[1] or ''} was asked for by another thread, without an answer for {SHARED_DEADLINE:.0f} s"
            )
        return asked.result()

    def renew(self, kinds: Collection[str] | None, names: Collection[str], pause: float = 0.0) -> None:
        """Ask again for what is known of these kinds (None: all), of named objects only those in ``names``.

        :param pause: seconds since the last renewal within which nothing is renewed again.
        """
        with self._lock:
            keys = [key for key in self._answers if (kinds is None or key[0] in kinds) and (key[1] is None or key[1] in names)]
        for key in keys:
            with self._lock:
                fetch = self._fetches.get(key)
                if fetch is None:
                    continue  # forgotten meanwhile
                now = self._clock()
                if key not in self._asked and now - self._renewed.get(key, float("-inf")) < pause:
                    continue
                asked, mine = self._take_on(key)
                if mine is not None:
                    self._renewed[key] = now
            if mine is not None:
                self._ask(key, fetch, mine)
            else:
                self._share(key, asked)

    def age(self, kind: str) -> float:
        """Seconds since the latest answer of this kind, infinite when there was none."""
        with self._lock:
            times = [when for key, when in self._answered.items() if key[0] == kind]
            return self._clock() - max(times, default=float("-inf"))

    def forget(self, kinds: Collection[str] | None = None, absent: bool = False) -> None:
        """Have these kinds (None: all) asked for again when they are needed.

        :param absent: only what was not found.
        """
        with self._lock:
            for key in {*self._answers, *self._asked}:
                if (kinds is not None and key[0] not in kinds) or (absent and self._answers.get(key, key)):
                    continue
                for table in (self._answers, self._answered, self._renewed, self._fetches, self._asked):
                    table.pop(key, None)

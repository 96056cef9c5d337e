"""Caches answers of the cloud for a limited time, or until they seem to be outdated."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from nodepool.cloud.errors import CallTimeout

Key = tuple[str, str | None]
T = TypeVar("T")

SHARED_DEADLINE = 150.0
"""Seconds to wait for the call of another thread: longer than a call with its retries takes."""


class AnswerCache:
    """Sends each question once: concurrent callers with the same question share its result.

    Only the caller that renews an answer waits; the others use the previous answer until the new
    one has arrived.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[Key, Any] = {}
        self._answered: dict[Key, float] = {}
        self._renewed: dict[Key, float] = {}
        self._fetches: dict[Key, Callable[[], Any]] = {}
        self._asked: dict[Key, Future[Any]] = {}

    def get(self, kind: str, name: str | None, fetch: Callable[[], T], ttl: float = math.inf) -> T:
        """Return the answer, calling ``fetch`` if there is none younger than ``ttl`` seconds.

        :raises CallTimeout: the call of another thread takes too long.
        """
        key = (kind, name)
        with self._lock:
            if key in self._answers and self._clock() - self._answered[key] <= ttl:
                known: T = self._answers[key]
                return known
            asked, mine = self._take_on(key)
        return self._ask(key, fetch, mine) if mine is not None else self._share(key, asked)  # type: ignore[no-any-return]

    def _take_on(self, key: Key) -> tuple[Future[Any] | None, Future[Any] | None]:
        """Return the pending call of another caller, or a new one that this caller has to make."""
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
            if self._asked.get(key) is mine:  # unless it was discarded in the meantime
                del self._asked[key]
                self._answers[key], self._fetches[key] = value, fetch
                self._answered[key] = self._clock()
        mine.set_result(value)
        return value

    def _share(self, key: Key, asked: Future[Any] | None) -> Any:
        assert asked is not None
        if not wait([asked], SHARED_DEADLINE).done:
            raise CallTimeout(
                f"{key[0]} {key[1] or ''} is being read by another thread, which got no answer "
                f"within {SHARED_DEADLINE:.0f} s"
            )
        return asked.result()

    def renew(
        self, kinds: Collection[str] | None, names: Collection[str], pause: float = 0.0
    ) -> None:
        """Fetch all known answers of these kinds (None: all) again; of named objects ``names``.

        :param pause: minimum number of seconds between two renewals.
        """
        with self._lock:
            keys = [
                key
                for key in self._answers
                if (kinds is None or key[0] in kinds) and (key[1] is None or key[1] in names)
            ]
        for key in keys:
            with self._lock:
                fetch = self._fetches.get(key)
                if fetch is None:
                    continue  # discarded in the meantime
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
        """Return the age of the latest answer of this kind in seconds; infinite if there is
        none.
        """
        with self._lock:
            times = [when for key, when in self._answered.items() if key[0] == kind]
            return self._clock() - max(times, default=float("-inf"))

    def forget(self, kinds: Collection[str] | None = None, absent: bool = False) -> None:
        """Discard the answers of these kinds (None: all); they are fetched again when needed.

        :param absent: only answers that an object does not exist.
        """
        with self._lock:
            for key in {*self._answers, *self._asked}:
                if (kinds is not None and key[0] not in kinds) or (
                    absent and self._answers.get(key, key)
                ):
                    continue
                for table in (
                    self._answers,
                    self._answered,
                    self._renewed,
                    self._fetches,
                    self._asked,
                ):
                    table.pop(key, None)

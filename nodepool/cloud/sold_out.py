"""Try the offers of one label in order, and remember those that were refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from nodepool import exceptions
from nodepool.cloud.errors import ErrorKind

MEMORY = 300.0
"""Seconds for which a refused offer counts as sold out."""

REFUSALS = (ErrorKind.CAPACITY, ErrorKind.QUOTA)
"""Types of errors that another offer may not have."""


class Way(Hashable, Protocol):
    """One offer: a machine type or zone to launch in."""

    def describe(self) -> str: ...


W = TypeVar("W", bound=Way)
T = TypeVar("T")


class SoldOut(Generic[W]):
    """Remembers which offers were refused recently; shared by all labels of a provider."""

    def __init__(self, memory: float = MEMORY, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory = memory
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[W, float] = {}

    def refused(self, way: W) -> None:
        with self._lock:
            self._until[way] = self._clock() + self.memory

    def worked(self, way: W) -> None:
        with self._lock:
            self._until.pop(way, None)

    def order(self, ways: Sequence[W]) -> list[W]:
        """Return the offers to try: those not refused recently, or the one refused longest ago."""
        with self._lock:
            now = self._clock()
            for way in [way for way, until in self._until.items() if until <= now]:
                del self._until[way]
            free = [way for way in ways if way not in self._until]
            return free or [min(ways, key=lambda way: self._until[way])]

    def climb(
        self, ways: Sequence[W], attempt: Callable[[W], T], kind_of: Callable[[BaseException], ErrorKind], where: str,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> tuple[T, W]:  # fmt: skip
        """Return the result of the first offer that can be launched, and that offer.

        :param where: provider, pool and label, for messages.
        :param kind_of: classifies errors of ``attempt``; errors other than refusals are raised immediately.
        :raises QuotaException: every offer exceeds a quota.
        :raises CapacityException: every offer was refused, at least one for lack of capacity.
        """
        single = len(ways) == 1
        refusals: list[tuple[W, Exception, ErrorKind]] = []
        for way in ways if single else self.order(ways):
            try:
                result = attempt(way)
            except Exception as error:
                kind = kind_of(error)
                if kind not in REFUSALS:
                    log.error("%s: the cloud refuses %s: %s", where, way.describe(), error)
                    raise
                refusals.append((way, error, kind))
                if not single:
                    self.refused(way)
                    log.info("%s: %s was refused (%s)", where, way.describe(), kind.value)
            else:
                self.worked(way)
                return result, way
        text = "; ".join(f"{way.describe()}: {error}" for way, error, _ in refusals)
        if any(kind is ErrorKind.CAPACITY for _, _, kind in refusals):
            raise exceptions.CapacityException(text)
        raise exceptions.QuotaException(text)

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


class Offer(Hashable, Protocol):
    """One offer: a machine type or zone to launch in."""

    def describe(self) -> str: ...


OfferT = TypeVar("OfferT", bound=Offer)
T = TypeVar("T")


class SoldOut(Generic[OfferT]):
    """Remembers which offers were refused recently; shared by all labels of a provider."""

    def __init__(self, memory: float = MEMORY, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory = memory
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[OfferT, float] = {}

    def refused(self, offer: OfferT) -> None:
        with self._lock:
            self._until[offer] = self._clock() + self.memory

    def worked(self, offer: OfferT) -> None:
        with self._lock:
            self._until.pop(offer, None)

    def order(self, offers: Sequence[OfferT]) -> list[OfferT]:
        """Return the offers to try: those not refused recently, or the one refused longest ago."""
        with self._lock:
            now = self._clock()
            for offer in [offer for offer, until in self._until.items() if until <= now]:
                del self._until[offer]
            free = [offer for offer in offers if offer not in self._until]
            return free or [min(offers, key=lambda offer: self._until[offer])]

    def try_in_order(
        self,
        offers: Sequence[OfferT],
        attempt: Callable[[OfferT], T],
        kind_of: Callable[[BaseException], ErrorKind],
        where: str,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> tuple[T, OfferT]:
        """Return the result of the first offer that can be launched, and that offer.

        :param where: provider, pool and label, for messages.
        :param kind_of: classifies errors of ``attempt``; errors other than refusals are raised
            immediately.
        :raises QuotaException: every offer exceeds a quota.
        :raises CapacityException: every offer was refused, at least one for lack of capacity.
        """
        single = len(offers) == 1
        refusals: list[tuple[OfferT, Exception, ErrorKind]] = []
        for offer in offers if single else self.order(offers):
            try:
                result = attempt(offer)
            except Exception as error:
                kind = kind_of(error)
                if kind not in REFUSALS:
                    log.error("%s: the cloud refuses %s: %s", where, offer.describe(), error)
                    raise
                refusals.append((offer, error, kind))
                if not single:
                    self.refused(offer)
                    log.info("%s: %s was refused (%s)", where, offer.describe(), kind.value)
            else:
                self.worked(offer)
                return result, offer
        text = "; ".join(f"{offer.describe()}: {error}" for offer, error, _ in refusals)
        if any(kind is ErrorKind.CAPACITY for _, _, kind in refusals):
            raise exceptions.CapacityException(text)
        raise exceptions.QuotaException(text)

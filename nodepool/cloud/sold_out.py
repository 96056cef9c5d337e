"""Try the offers of one label in order, and remember those that were refused (DRV-7.9)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from nodepool import exceptions
from nodepool.cloud.errors import ErrorKind
from nodepool.texts import one_line
from nodepool.zk.drains import moment
from nodepool.zk.sold_out import MEMORY

REFUSALS = (ErrorKind.CAPACITY, ErrorKind.QUOTA)
"""Types of errors that another offer may not have."""


class Offer(Protocol):
    """One offer: a machine type or zone to launch in."""

    def describe(self) -> str:
        """Return a text that differs between offers; launchers recognize them by it."""


OfferT = TypeVar("OfferT", bound=Offer)
T = TypeVar("T")
#: Returns the seconds for which offers are sold out, by their descriptions.
Read = Callable[[], Mapping[str, float]]
#: Replaces all of that and calls back once it has succeeded.
Write = Callable[[Mapping[str, float], Callable[[], object]], object]


class SoldOut(Generic[OfferT]):
    """Remembers which offers were refused recently; shared by all labels of a provider.

    An offer is remembered here until the other launchers of the provider know it. If that cannot be
    written, only this launcher knows it.
    """

    def __init__(self, memory: float = MEMORY, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory = memory
        self._clock = clock
        #: ``_write`` may call back immediately.
        self._lock = threading.RLock()
        self._until: dict[str, float] = {}
        self._read: Read = dict
        self._write: Write = lambda _left, _written: None

    def share(self, read: Read, write: Write) -> None:
        """Use the memory of all launchers of the provider; neither call must block."""
        self._read, self._write = read, write

    def refused(self, offer: OfferT) -> None:
        with self._lock:
            now = self._clock()
            self._until = {name: until for name, until in self._until.items() if until > now}
            self._until[offer.describe()] = now + self.memory
            self._publish(self.left())

    def worked(self, offer: OfferT) -> None:
        with self._lock:
            left = self.left()
            if left.pop(offer.describe(), None) is not None:
                self._until.pop(offer.describe(), None)
                self._publish(left)

    def _publish(self, left: Mapping[str, float]) -> None:
        """Share what is sold out; with the lock."""
        own = self._until.copy()

        def written() -> None:
            with self._lock:
                self._until = {
                    name: until for name, until in self._until.items() if own.get(name) != until
                }

        self._write(left, written)

    def next_after(self, offer: OfferT, offers: Sequence[OfferT]) -> bool:
        """Note the refusal of a machine that was accepted; return whether others are available."""
        if len(offers) == 1:
            return False
        self.refused(offer)
        left = self.left()
        return any(each.describe() not in left for each in offers)

    def left(self) -> dict[str, float]:
        """Return the seconds for which offers, by their descriptions, are sold out."""
        now, until = self._clock(), self._until.copy()
        own = {name: end - now for name, end in until.items() if end > now}
        return dict(sorted({**self._read(), **own}.items()))

    def describe(self) -> str:
        """Return the offers that are sold out, with the times, in one line."""
        now, left = time.time(), self.left()
        return one_line(", ".join(f"{name} until {moment(now + left[name])}" for name in left))

    def order(self, offers: Sequence[OfferT]) -> list[OfferT]:
        """Return the offers to try: those not refused recently, or the one refused longest ago."""
        left = self.left()
        free = [offer for offer in offers if offer.describe() not in left]
        return free or [min(offers, key=lambda offer: left[offer.describe()])]

    def try_in_order(
        self,
        offers: Sequence[OfferT],
        attempt: Callable[[OfferT], T],
        kind_of: Callable[[BaseException], ErrorKind],
        where: str,
        log: logging.Logger | logging.LoggerAdapter[Any],
        settled: bool = True,
    ) -> tuple[T, OfferT]:
        """Return the result of the first offer that can be launched, and that offer.

        :param where: provider, pool and label, for messages.
        :param kind_of: classifies errors of ``attempt``; errors other than refusals are raised
            immediately.
        :param settled: False: success does not mean that the cloud has capacity; the caller calls
            :meth:`worked`.
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
                if settled:
                    self.worked(offer)
                return result, offer
        text = "; ".join(f"{offer.describe()}: {error}" for offer, error, _ in refusals)
        if any(kind is ErrorKind.CAPACITY for _, _, kind in refusals):
            raise exceptions.CapacityException(text)
        raise exceptions.QuotaException(text)

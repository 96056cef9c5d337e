"""Offers of a provider that its launchers found sold out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nodepool.zk.records import RecordError
from nodepool.zk.records.base import LATEST

#: Offers in a record; those that were refused longest ago are forgotten.
MOST = 100
#: Seconds for which a refused offer counts as sold out.
MEMORY = 300.0


@dataclass(frozen=True)
class SoldOutOffers:
    """The offers of a provider, with the UNIX seconds until which each is sold out; immutable.

    :param name: of the provider.
    """

    name: str
    until: Mapping[str, float] = field(default_factory=dict)

    def left(self, now: float) -> dict[str, float]:
        """Return the seconds for which each offer is still sold out.

        :param now: UNIX seconds. Clocks differ: an entry counts for at most :data:`MEMORY`, and
            one of a clock that is further ahead does not count.
        """
        return {
            offer: min(until - now, MEMORY)
            for offer, until in self.until.items()
            if 0 < until - now <= 2 * MEMORY
        }

    # -- as a note

    def values(self) -> dict[str, Any]:
        """Return the stored values."""
        latest = sorted(self.until.items(), key=lambda entry: entry[1])[-MOST:]
        return {"offers": dict(latest)}

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> SoldOutOffers:
        """Return the record without invalid entries.

        :raises RecordError: it is not valid.
        """
        offers = values.get("offers")
        if not name or not isinstance(offers, dict):
            raise RecordError(f"{name!r} names no provider, or has no object of offers")
        valid = {
            offer: float(until)
            for offer, until in offers.items()
            # NaN fails the comparison.
            if isinstance(until, (int, float)) and 0 <= until < LATEST
        }
        return cls(name, dict(sorted(valid.items(), key=lambda entry: entry[1])[-MOST:]))

"""The time as launcher, builder and drivers ask for it when they decide something; tests step one of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def time(self) -> float:
        """UNIX time, as in records."""
        ...


class _System:
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)


#: What everything uses outside tests. Time limits of waits and joins are the system's in any case.
SYSTEM: Clock = _System()

__all__ = ["SYSTEM", "Clock"]

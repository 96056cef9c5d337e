"""The clock that launcher, builder and drivers use for decisions; tests replace it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return monotonic seconds."""
        ...

    def time(self) -> float:
        """Return the UNIX time, as used in records."""
        ...


class _System:
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)


#: The clock outside of tests. Time limits of waits and joins always use the system clock.
SYSTEM: Clock = _System()

__all__ = ["SYSTEM", "Clock"]

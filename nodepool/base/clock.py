"""The clock that launcher, builder and drivers use for decisions; tests replace it."""

from __future__ import annotations

import math
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return monotonic seconds."""

    def time(self) -> float:
        """Return the UNIX time, as used in records."""


class _System:
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)


#: The clock outside of tests. Time limits of waits and joins always use the system clock.
SYSTEM: Clock = _System()
#: Seconds by which two clocks may differ before this is a problem.
MOST_SKEW = 5.0


class ServerTime:
    """Compares our clock with that of a server; a later step of ours is noticed, too."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: The least and the largest possible difference of the server's time and our monotonic
        #: clock.
        self._between = -math.inf, math.inf

    def measured(self, server: float, began: float) -> None:
        """Note the server's time.

        :param server: UNIX seconds, at a moment between ``began`` (monotonic seconds) and now.
        """
        self._between = server - self._clock.monotonic(), server - began

    def ahead(self) -> float:
        """Return by how many seconds, at least, our clock is ahead; negative: behind."""
        ours = self._clock.time() - self._clock.monotonic()
        least, most = self._between
        return max(0.0, ours - most) + min(0.0, ours - least)

    def now(self) -> float:
        """Return the UNIX time on which all clients of the server agree."""
        return self._clock.time() - self.ahead()


__all__ = ["MOST_SKEW", "SYSTEM", "Clock", "ServerTime"]

"""Token buckets, which limit a rate."""

from __future__ import annotations

import time


class Bucket:
    """``rate`` per second, of which ``saved`` may be saved up.

    A user with anything left may start, whatever it will cost: the next one waits until the debt is
    paid.
    """

    def __init__(self, rate: float, saved: float) -> None:
        self._rate = rate
        self._saved = saved
        self._level = saved
        self._since = time.monotonic()

    def use(self, amount: float) -> None:
        self._fill()
        self._level -= amount

    def wait(self) -> float:
        """Return the seconds until it may be used; 0: now."""
        self._fill()
        # Slightly more than 0, or rounding could leave too little after such a wait.
        return 0.0 if self._level > 0 else -self._level / self._rate + 0.001

    @property
    def full(self) -> bool:
        self._fill()
        return self._level >= self._saved

    def _fill(self) -> None:
        now = time.monotonic()
        self._level = min(self._saved, self._level + (now - self._since) * self._rate)
        self._since = now

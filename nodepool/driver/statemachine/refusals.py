"""Labels whose nodes the cloud refuses for quota although the figures that it tells have room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PAUSE = (0.5, 15.0)
"""Seconds before such a node is tried again: first (less than the interval at which pools look at it), and at most."""


class Refusals:
    """A growing pause for each label; a node made and refused each second would be of no use to anybody."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: Label -> how often in sequence, and until when it rests.
        self._refused: dict[str, tuple[int, float]] = {}

    def note(self, label: str) -> None:
        """The cloud has refused a node. Those that were under way together count once."""
        first, longest = PAUSE
        with self._lock:
            count, until = self._refused.get(label, (0, float("-inf")))
            now = self._clock()
            if now >= until:
                self._refused[label] = (count + 1, now + min(longest, first * 2.0 ** min(count, 20)))

    def clear(self, label: str) -> None:
        """A node of it has come into being, or the figures have no room for it."""
        with self._lock:
            self._refused.pop(label, None)

    def rests(self, label: str) -> bool:
        """Whether the next try has to wait; a request that waits for quota is looked at each second anyway."""
        return self._clock() < self._refused.get(label, (0, float("-inf")))[1]

"""Labels for which a pool has no capacity, so that others may serve them (LAU-4)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from nodepool.reasons import Reason

#: Seconds after which a pool is asked again although no event has announced new capacity.
FORGET = 5.0


class Fullness:
    """Labels without capacity, with the reason. Thread-safe: each change replaces the whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._labels: dict[str, tuple[float, Reason]] = {}

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(self._labels)

    def note(self, labels: Iterable[str], reason: Reason) -> None:
        self._labels = {**self._labels, **dict.fromkeys(labels, (self._clock(), reason))}

    def reason(self, labels: Iterable[str]) -> Reason | None:
        """Return why there is no capacity for these labels; None if unknown."""
        return next((self._labels[label][1] for label in labels if label in self._labels), None)

    def forget(self, still: Callable[[str], bool], age: float = -math.inf) -> bool:
        """Forget entries of at least ``age`` seconds unless ``still`` confirms them.

        Return whether there were any.
        """
        limit, before = self._clock() - age, self._labels
        self._labels = {
            label: entry for label, entry in before.items() if entry[0] > limit or still(label)
        }
        return len(self._labels) != len(before)

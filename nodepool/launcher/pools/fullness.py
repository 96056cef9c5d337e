"""What a pool has no room for at present, so that it is not asked in vain and others may serve it (LAU-4)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from nodepool.reasons import Reason

#: Seconds after which a pool is asked again although no event has told that it has room.
FORGET = 5.0


class Fullness:
    """Labels without room, with the reason.  Used by several threads; each change replaces the whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._labels: dict[str, tuple[float, Reason]] = {}

    def __bool__(self) -> bool:
        return bool(self._labels)

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(self._labels)

    def note(self, labels: Iterable[str], reason: Reason) -> None:
        now = self._clock()
        self._labels = {**self._labels, **dict.fromkeys(labels, (now, reason))}

    def reason(self, labels: Iterable[str]) -> Reason | None:
        """Why there is no room for a request of these labels; None when that is not known."""
        return next((self._labels[label][1] for label in labels if label in self._labels), None)

    def forget(self, still: Callable[[str], bool], age: float = -math.inf) -> bool:
        """Forget all that is at least ``age`` seconds old and not known to be ``still`` so; whether there was any."""
        limit, before = self._clock() - age, self._labels
        self._labels = {label: entry for label, entry in before.items() if entry[0] > limit or still(label)}
        return len(self._labels) != len(before)

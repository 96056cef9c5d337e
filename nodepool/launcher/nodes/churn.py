"""Labels whose min-ready nodes expire unused and are launched again, time after time."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from nodepool.base.problems import Problem
from nodepool.launcher.state import LauncherState
from nodepool.status.results import format_duration

#: Expired nodes for each one of min-ready that are a problem, and the time in which they have to expire: a multiple of
#: max-ready-age, and the least number of seconds.
ROUNDS, AGES, LEAST = 3, 4, 3600.0
#: Expired nodes of a label that are remembered.
MOST = 10_000


class Churn:
    """The nodes that this launcher has deleted because of max-ready-age."""

    def __init__(self, state: LauncherState) -> None:
        self._state = state
        self._expired: dict[str, collections.deque[float]] = {}

    def note(self, labels: Iterable[str]) -> None:
        """Note the end of a node with these labels; from any thread."""
        for label in labels:
            self._expired.setdefault(label, collections.deque(maxlen=MOST)).append(self._state.clock.monotonic())

    def problems(self) -> list[Problem]:
        found, now = [], self._state.clock.monotonic()
        for name, expired in sorted(self._expired.copy().items()):
            label = self._state.config.labels.get(name)
            if label is None or not label.max_ready_age or not label.min_ready:
                continue
            window = max(AGES * label.max_ready_age, LEAST)
            count = sum(now - moment < window for moment in expired.copy())
            if count >= ROUNDS * label.min_ready:
                age, period = format_duration(label.max_ready_age), format_duration(window)
                text = (
                    f"{count} ready nodes of label {name} expired unused within {period} (max-ready-age {age}) and were replaced"
                )
                # Without provider and label: it is no reason why a request waits.
                found.append(Problem(text, help="raise `max-ready-age` of the label, or lower its `min-ready`"))
        return found

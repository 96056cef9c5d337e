"""What state machines of clouds have in common that wait for objects by :class:`~nodepool.cloud.polling.Poller`."""

from __future__ import annotations

import math
from typing import Any

from nodepool.cloud.polling import Subscription
from nodepool.driver.statemachine.model import StateMachine
from nodepool.logconfig import Log


class WatchingMachine(StateMachine):
    """Waits for one object at a time, woken by each look at it."""

    def __init__(self, adapter: Any, log: Log) -> None:
        super().__init__()
        self.adapter = adapter
        self.log = log
        self._watch: Subscription[Any] | None = None

    def look_at(self, watch: Subscription[Any]) -> None:
        """Be woken by each look of this watch and by nothing else."""
        self._watch = watch
        self.next_wake = math.inf

    def looked_away(self, reached: bool = True) -> None:
        """Wait no more; ``reached``: how long it took is worth remembering."""
        watch, self._watch, self.next_wake = self._watch, None, None
        if watch is not None:
            watch.end(reached)

    def abandon(self) -> None:
        self.looked_away(reached=False)

    def _wake(self) -> None:
        if self.wake is not None:
            self.wake()

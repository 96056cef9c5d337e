"""The parts of a daemon: one table that says in which order they start and stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import NamedTuple

from nodepool.base import threads

log = logging.getLogger("nodepool.daemon")


class Part(NamedTuple):
    """A row of the table. What a part does not need is None."""

    name: str
    #: Start it; return when it is ready. None: it is started elsewhere, and always stopped.
    start: Callable[[], object] | None = None
    #: Ask it to end, without waiting for other parts.
    stop: Callable[[], object] | None = None
    #: Wait until it has ended.
    join: Callable[[], object] | None = None
    #: Seconds for each of these two, also when those of the group are over.
    least: float = 0.1


class Group:
    """Starts parts in the order of the table and stops them in reverse.

    First all parts are asked to end, then all are waited for. What a part raises is logged, and a
    part that takes too long is left behind: the others are stopped in any case.

    :param seconds: for the whole stop.
    """

    def __init__(self, seconds: float, *parts: Part) -> None:
        self._seconds = seconds
        self._parts = parts
        self._live = {part for part in parts if part.start is None}
        #: When the stop is to end (monotonic seconds); a part may set an earlier time.
        self.deadline = 0.0

    def start(self) -> None:
        """Start the parts.

        :raises BaseException: what the first failing part raises; those before it were stopped.
        """
        started: set[Part] = set()
        try:
            for part in self._parts:
                if part.start is not None and part not in self._live:
                    part.start()
                    started.add(part)
                    self._live.add(part)
        except BaseException:
            others, self._live = self._live - started, started
            self.stop()
            self._live = others
            raise

    def stop(self) -> None:
        """Stop the parts that run; allowed at any time."""
        self.deadline = time.monotonic() + self._seconds
        # What starts meanwhile, in another thread that is a part itself, is stopped in its turn.
        backwards = self._parts[::-1]
        for part, end in [(part, part.stop) for part in backwards] + [
            (part, part.join) for part in backwards
        ]:
            if end is not None and part in self._live:
                seconds = max(part.least, self.deadline - time.monotonic())
                call = threads.shared().lane(f"Thread-stop-{part.name}", 1).submit(end)
                wait([call], seconds)
                if not call.done():
                    log.warning(
                        "Stopping %s takes more than %.1f s; continuing", part.name, seconds
                    )
                elif error := call.exception():
                    log.error("Error while stopping %s:", part.name, exc_info=error)
        self._live = set()

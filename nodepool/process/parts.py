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
    #: Ask it to end, without waiting for other parts; allowed if it has not started.
    stop: Callable[[], object] | None = None
    #: Wait until it has ended.
    join: Callable[[], object] | None = None
    #: Seconds for each of these two, also when those of the group are over.
    least: float = 0.1


class Group:
    """Starts parts in the order of the table and stops them in reverse.

    First all parts are asked to end, then those that have started are waited for. What a part
    raises is logged, and a part that takes too long is left behind: the others are stopped in any
    case.

    :param seconds: for the whole stop.
    """

    def __init__(self, seconds: float, *parts: Part) -> None:
        self._seconds = seconds
        self._parts = parts
        self._live = {part for part in parts if part.start is None}
        #: When the stop is to end (monotonic seconds); a part may set an earlier time.
        self.deadline = 0.0

    def add(self, part: Part) -> None:
        """Append a part that has a start."""
        self._parts = (*self._parts, part)

    def start(self) -> None:
        """Start the parts that have not started.

        After an error, those before the failed one run: call this again, or :meth:`stop`.

        :raises BaseException: what the first failing part raises.
        """
        for part in self._parts:
            if part.start is not None and part not in self._live:
                part.start()
                self._live.add(part)

    def stop(self) -> None:
        """Stop; allowed at any time, also in a part's start in another thread."""
        self.deadline = time.monotonic() + self._seconds
        for part in reversed(self._parts):
            self._end(part, part.stop)
        for part in reversed(self._parts):
            if part in self._live:
                self._end(part, part.join)
        self._live = set()

    def _end(self, part: Part, end: Callable[[], object] | None) -> None:
        if end is not None:
            seconds = max(part.least, self.deadline - time.monotonic())
            call = threads.shared().lane(f"Thread-stop-{part.name}", 1).submit(end)
            wait([call], seconds)
            if not call.done():
                log.warning("Stopping %s takes more than %.1f s; continuing", part.name, seconds)
            elif error := call.exception():
                log.error("Error while stopping %s:", part.name, exc_info=error)

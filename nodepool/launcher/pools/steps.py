"""PoolSteps: runs the steps of a pool, and of its handlers."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from nodepool.base import threads
from nodepool.driver.request.base import RequestHandler
from nodepool.exceptions import FOREIGN

Task = tuple[Callable[..., Any], tuple[Any, ...]]

#: Threads for the steps of drivers that may block.
HELPERS = 8


class PoolSteps:
    """Passes steps to the thread of the pool, or to helper threads if they may block."""

    log: logging.Logger

    def __init__(self, label: str) -> None:
        #: "provider-pool".
        self.label = label
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._helpers = threads.shared().lane(f"PoolWorker.{label}_helper", HELPERS)

    def post(self, handler: RequestHandler, function: Callable[..., Any], *args: object) -> None:
        """Run the next step of a handler; steps of one handler never overlap."""
        if not handler.BLOCKING:
            self._tasks.put((function, args))
            return
        # It is stored in the handler and deleted with it; steps may follow the end of the handler.
        handler.__dict__.setdefault("_mailbox", Mailbox(self.help, self.guard)).put((function, args))

    def guard(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run a step; its exceptions affect only that step."""
        try:
            function(*args)
        except FOREIGN:
            self.log.exception("Error in pool %s:", self.label)

    def help(self, function: Callable[[], None]) -> None:
        try:
            self._helpers.submit(function)
        except RuntimeError:
            self.log.debug("Not running a step: the pool has stopped")


class Mailbox:
    """Runs the steps of one handler sequentially on helper threads.

    :param submit: runs a function on a helper thread.
    :param guard: runs a step.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None], guard: Callable[..., None]) -> None:
        self._submit = submit
        self._guard = guard
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._running = False

    def put(self, task: Task) -> None:
        with self._lock:
            self._tasks.append(task)
            if self._running:
                return
            self._running = True
        self._submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._running = False
                    return
                function, args = self._tasks.popleft()
            self._guard(function, args)

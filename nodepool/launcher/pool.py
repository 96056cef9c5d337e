"""Pool: the steps of a pool and its handlers, and what others see of it."""

from __future__ import annotations

import abc
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from nodepool.base import threads
from nodepool.driver.request.base import RequestHandler
from nodepool.exceptions import FOREIGN
from nodepool.launcher.requests.choice import PoolView
from nodepool.launcher.requests.queue import RequestClass

Task = tuple[Callable[..., Any], tuple[Any, ...]]

#: Threads for the steps of drivers that may block.
HELPERS = 8


class Pool(abc.ABC):
    """A pool of this launcher.

    Its steps run on its thread, or on helper threads if they may block.
    """

    log: logging.Logger
    launcher_id: str

    def __init__(self, provider_name: str, pool_name: str) -> None:
        self.provider_name = provider_name
        self.pool_name = pool_name
        self.label = label = f"{provider_name}-{pool_name}"
        self.paused_handlers: set[RequestHandler] = set()
        self.request_handlers: list[RequestHandler] = []
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._helpers = threads.shared().lane(f"PoolWorker.{label}_helper", HELPERS)

    @property
    def paused(self) -> bool:
        """Return whether a request waits for capacity here."""
        return bool(self.paused_handlers)

    @abc.abstractmethod
    def has(self, request_id: str) -> bool:
        """Return whether this pool processes the request."""

    @abc.abstractmethod
    def view(self, cls: RequestClass) -> PoolView:
        """Return the current state of the pool for requests of this class."""

    @abc.abstractmethod
    def offer(self, request_id: str, check_only: bool, gives_way: bool = False) -> None:
        """Queue a request for this pool."""

    @abc.abstractmethod
    def ask(self, waiting: RequestHandler, unanswered: set[str], others: list[Pool]) -> None:
        """Request a move of what waits elsewhere if this pool has capacity; else ask the others."""

    @abc.abstractmethod
    def active_launches(self) -> int:
        """Return the number of running and expected launches."""

    @abc.abstractmethod
    def capacity_changed(self) -> None:
        """Retry paused handlers in request order, because quota may have become free."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """Check everything again after changes of the configuration and of drains."""

    def session_lost(self) -> None:
        """Drop every handler, because our locks are lost; this or another launcher restarts
        them.
        """
        for handler in list(self.request_handlers):
            self.post(handler, handler.drop)

    def post(self, handler: RequestHandler, function: Callable[..., Any], *args: object) -> None:
        """Run the next step of a handler; steps of one handler never overlap."""
        if not handler.BLOCKING:
            self._tasks.put((function, args))
            return
        # It is stored in the handler and deleted with it; steps may follow the end of the handler.
        handler.__dict__.setdefault("_mailbox", Mailbox(self.help, self.guard)).put(
            (function, args)
        )

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

    def __init__(
        self, submit: Callable[[Callable[[], None]], None], guard: Callable[..., None]
    ) -> None:
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

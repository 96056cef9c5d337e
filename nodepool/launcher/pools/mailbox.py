"""Mailbox: runs the steps of one handler sequentially on helper threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Task = tuple[Callable[..., Any], tuple[Any, ...]]


class Helping(Protocol):
    """Runs functions on helper threads."""

    def help(self, function: Callable[[], None]) -> None: ...

    def guard(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None: ...


class Mailbox:
    """Runs the steps of one handler whose checks may block."""

    def __init__(self, worker: Helping) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._running = False

    def put(self, task: Task) -> None:
        with self._lock:
            self._tasks.append(task)
            if self._running:
                return
            self._running = True
        self._worker.help(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._running = False
                    return
                function, args = self._tasks.popleft()
            self._worker.guard(function, args)

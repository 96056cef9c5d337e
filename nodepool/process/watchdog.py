"""Notices the end of a required thread, without which a daemon only looks alive.

Errors of such threads end a pass, not the thread. If one ends in spite of that, the process is
useless: the service
(``nodepool.process.service``) ends it with status 1, so that its supervisor restarts it; work
continues from the state in ZooKeeper.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("nodepool.Watchdog")


class Watchdog:
    """The threads of one daemon that must live until :meth:`release`."""

    def __init__(self) -> None:
        #: What has ended, and why; empty as long as nothing has.
        self.ended: list[str] = []
        #: Called on the thread that ends, once for each.
        self.on_end: Callable[[], Any] = lambda: None
        self._released = threading.Event()

    def guard(self, thread: threading.Thread, may_end: Callable[[], bool] = lambda: False) -> None:
        """Watch this thread, which is not started yet.

        :param may_end: called when it ends without an error: whether it was stopped.
        """
        run = thread.run

        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # also SystemExit, which Python ignores silently
                self.report(thread.name, error)
            else:
                if not may_end():
                    self.report(thread.name, None)

        thread.run = guarded  # type: ignore[method-assign]

    def report(self, name: str, error: BaseException | None) -> None:
        """Report that a thread has ended; ignored while the daemon is being stopped."""
        if self._released.is_set():
            if error is not None:
                log.error("Thread %s has ended while stopping:", name, exc_info=error)
            return
        reason = "without an error" if error is None else f"{type(error).__name__}: {error}"
        self.ended.append(f"thread {name} has ended ({reason})")
        log.critical(
            "Thread %s has ended (%s); this process cannot continue without it",
            name,
            reason,
            exc_info=error,
        )
        self.on_end()

    def release(self) -> None:
        """Allow all threads to end from now on."""
        self._released.set()


__all__ = ["Watchdog"]

"""Detects immediately when a watched process of a sliver has ended (NM-C.7)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from nodepool.nodemanager.eventloop import IN, EventLoop, Watched
from nodepool.nodemanager.kernel.syscalls import start_time

log = logging.getLogger("nodepool.nodemanager.watch")


class ProcessWatch:
    """One thread that waits for the end of many processes.

    :param ended: called with the name, on that thread; must return immediately.
    :param what: the watched process of a sliver, for the log.
    """

    def __init__(self, ended: Callable[[str], None], what: str = "The first process") -> None:
        self._what = what
        self._ended = ended
        self._loop = EventLoop("Thread-nm-watch")
        #: Name -> process id, and its descriptor in the loop. Used by the loop's thread only.
        self._watched: dict[str, tuple[int, Watched]] = {}

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        if self._loop.stop(5):
            for name in list(self._watched):
                self._remove(name)
            self._loop.close()

    def add(self, name: str, pid: int, started: int | None) -> None:
        """Watch this process for this name, unless its id belongs to another one by now."""
        self._loop.post(lambda: self._add(name, pid, started))

    def remove(self, name: str) -> None:
        self._loop.post(lambda: self._remove(name))

    def _add(self, name: str, pid: int, started: int | None) -> None:
        known = self._watched.get(name)
        if known is not None and known[0] == pid:
            return
        self._remove(name)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            self._ended(name)
            return
        if started is not None and start_time(pid) != started:
            os.close(pidfd)
            self._ended(name)
            return
        watched = Watched(pidfd, lambda: self._over(name))
        self._watched[name] = pid, watched
        self._loop.watch(watched, IN)

    def _remove(self, name: str) -> None:
        known = self._watched.pop(name, None)
        if known is not None:
            self._loop.watch(known[1], None)
            os.close(known[1].number)

    def _over(self, name: str) -> None:
        self._remove(name)
        log.info("%s of sliver %s has ended", self._what, name)
        self._ended(name)

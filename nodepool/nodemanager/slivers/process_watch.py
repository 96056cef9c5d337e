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

    A process is identified by its sliver and by what it is there.
    """

    def __init__(self) -> None:
        self._loop = EventLoop("Thread-nm-watch")
        #: Process id, and its descriptor in the loop. Used by the loop's thread only.
        self._watched: dict[tuple[str, str], tuple[int, Watched]] = {}

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        if self._loop.stop(5):
            for what, name in list(self._watched):
                self._remove(what, name)
            self._loop.close()

    def add(
        self, what: str, name: str, pid: int, started: int | None, ended: Callable[[str], None]
    ) -> None:
        """Watch a process, unless its id belongs to another one by now.

        :param what: kind of the process, for the log.
        :param ended: called with the sliver's name, on that thread; must return immediately.
        """
        self._loop.post(lambda: self._add(what, name, pid, started, ended))

    def remove(self, what: str, name: str) -> None:
        self._loop.post(lambda: self._remove(what, name))

    def _add(
        self, what: str, name: str, pid: int, started: int | None, ended: Callable[[str], None]
    ) -> None:
        known = self._watched.get((what, name))
        if known is not None and known[0] == pid:
            return
        self._remove(what, name)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            ended(name)
            return
        if started is not None and start_time(pid) != started:
            os.close(pidfd)
            ended(name)
            return

        def over() -> None:
            self._remove(what, name)
            log.info("%s of sliver %s has ended", what, name)
            ended(name)

        watched = Watched(pidfd, over)
        self._watched[what, name] = pid, watched
        self._loop.watch(watched, IN)

    def _remove(self, what: str, name: str) -> None:
        if (known := self._watched.pop((what, name), None)) is not None:
            self._loop.watch(known[1], None)
            os.close(known[1].number)

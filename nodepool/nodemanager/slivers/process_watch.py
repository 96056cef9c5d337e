"""Detects immediately when a watched process of a sliver has ended (NM-C.7)."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
from collections.abc import Callable

log = logging.getLogger("nodepool.nodemanager.watch")


def start_time(pid: int) -> int | None:
    """Return clock ticks since boot; None when the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


class ProcessWatch:
    """One thread that waits for the end of many processes.

    :param ended: called with the name, on that thread; must return immediately.
    :param what: the watched process of a sliver, for the log.
    """

    def __init__(self, ended: Callable[[str], None], what: str = "The first process") -> None:
        self._what = what
        self._ended = ended
        self._lock = threading.Lock()
        self._pidfds: dict[str, tuple[int, int]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="Thread-nm-watch", daemon=True)
        self._running = True

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._running = False
        os.write(self._wake_write, b"x")
        if self._thread.ident is not None:
            self._thread.join(5)
        with self._lock:
            for pidfd, _ in self._pidfds.values():
                os.close(pidfd)
            self._pidfds.clear()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def add(self, name: str, pid: int, started: int | None) -> None:
        """Watch this process for this name, unless its id belongs to another one by now."""
        with self._lock:
            known = self._pidfds.get(name)
            if known is not None and known[1] == pid:
                return
        self.remove(name)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            self._ended(name)
            return
        if started is not None and start_time(pid) != started:
            os.close(pidfd)
            self._ended(name)
            return
        with self._lock:
            self._pidfds[name] = pidfd, pid
            self._selector.register(pidfd, selectors.EVENT_READ, name)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def remove(self, name: str) -> None:
        with self._lock:
            known = self._pidfds.pop(name, None)
            if known is not None:
                self._selector.unregister(known[0])
                os.close(known[0])

    def _run(self) -> None:
        while self._running:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    continue
                with self._lock:
                    current = self._pidfds.get(key.data)
                    if current is None or current[0] != key.fd:
                        continue
                self.remove(key.data)
                log.info("%s of sliver %s has ended", self._what, key.data)
                self._ended(key.data)

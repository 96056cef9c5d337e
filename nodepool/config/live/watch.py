"""Notices changed configuration files within a second (CFG-11)."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterable
from typing import Any

COALESCE = 0.05  # seconds; an editor writes a file in several steps
POLL_INTERVAL = 1.0  # seconds; without inotify
SAFETY_INTERVAL = 10.0  # seconds; with inotify, for file systems that send no events


def modification_time(path: str) -> int | None:
    """Return the modification time in ns; None if there is no such file."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


class ConfigWatcher:
    """Calls *callback* in a separate thread when one of *paths* changes, appears or vanishes."""

    log = logging.getLogger("nodepool.config.watch")

    def __init__(self, paths: Iterable[str | None], callback: Callable[[], None], name: str = "CleanupWorker") -> None:
        self._own = [os.path.abspath(path) for path in paths if path]
        self.paths = self._own
        self.callback = callback
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._wake_read, self._wake_write = os.pipe()
        self._pipe_lock = threading.Lock()
        self._stopped = threading.Event()
        self._seen = self._signature()
        self._inotify: Any = None

    def start(self) -> None:
        self._watch_directories()
        self._thread.start()

    def watch_also(self, paths: Iterable[str]) -> None:
        """Also watch these paths, instead of those of the last call.

        They may have changed just before: *callback* is called.
        """
        wanted = [*self._own, *(os.path.abspath(path) for path in paths)]
        with self._pipe_lock:
            if wanted == self.paths or self._stopped.is_set():
                return
            self.paths, self._seen = wanted, []
            os.write(self._wake_write, b"x")

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; harmless if repeated or never started."""
        with self._pipe_lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            os.write(self._wake_write, b"x")
            os.close(self._wake_write)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if not self._thread.is_alive():
            os.close(self._wake_read)

    def _signature(self) -> list[tuple[int, int, int] | None]:
        result: list[tuple[int, int, int] | None] = []
        for path in self.paths:
            try:
                stat = os.stat(path)
                result.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
            except OSError:
                result.append(None)
        return result

    def _watch_directories(self) -> None:
        """Watch the directories, not the files: editors replace files, and links are replaced."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        try:
            from inotify_simple import INotify, flags

            self._inotify = INotify(nonblocking=True)
            mask = (
                flags.CLOSE_WRITE | flags.MOVED_TO | flags.MOVED_FROM | flags.CREATE | flags.DELETE | flags.ATTRIB
                | flags.DELETE_SELF | flags.MOVE_SELF
            )  # fmt: skip
            directories = {os.path.dirname(path) for path in self.paths}
            directories |= {os.path.dirname(os.path.realpath(path)) for path in self.paths}
            for directory in directories:
                if os.path.isdir(directory):
                    self._inotify.add_watch(directory, mask)
        except (ImportError, OSError) as exc:
            self.log.info("inotify is unavailable (%s); polling configuration files every second", exc)

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._inotify is not None:
            poll.register(self._inotify.fileno(), select.POLLIN)
        if self._wake_read in [descriptor for descriptor, _ in poll.poll(seconds * 1000)]:
            os.read(self._wake_read, 1024)
        if self._inotify is not None:
            try:
                self._inotify.read(timeout=0)
            except OSError:
                pass

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._wait(POLL_INTERVAL if self._inotify is None else SAFETY_INTERVAL)
                if self._stopped.is_set() or self._signature() == self._seen:
                    continue
                self._stopped.wait(COALESCE)
                self._seen = self._signature()
                self._watch_directories()
                try:
                    self.callback()
                except Exception:
                    self.log.exception("Cannot process a changed configuration:")
        finally:
            if self._inotify is not None:
                self._inotify.close()

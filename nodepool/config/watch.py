"""Notices changed configuration files within a second (config.md section 11)."""

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


class ConfigWatcher:
    """Calls *callback* in a thread of its own after one of *paths* changed, appeared or vanished."""

    log = logging.getLogger("nodepool.config.watch")

    def __init__(self, paths: Iterable[str | None], callback: Callable[[], None], name: str = "CleanupWorker") -> None:
        self.paths = [os.path.abspath(path) for path in paths if path]
        self.callback = callback
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stop_read, self._stop_write = os.pipe()
        self._stopped = threading.Event()
        self._seen = self._signature()
        self._inotify: Any = None

    def start(self) -> None:
        self._watch_directories()
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; harmless when repeated or never started."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        os.write(self._stop_write, b"x")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if not self._thread.is_alive():
            os.close(self._stop_read)
        os.close(self._stop_write)

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
        """Watch the directories, not the files: editors replace files, and links are swapped."""
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
            self.log.info("Configuration files are looked at every second, inotify is not usable: %s", exc)

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._stop_read, select.POLLIN)
        if self._inotify is not None:
            poll.register(self._inotify.fileno(), select.POLLIN)
        poll.poll(seconds * 1000)
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
                    self.log.exception("Handling a changed configuration failed")
        finally:
            if self._inotify is not None:
                self._inotify.close()

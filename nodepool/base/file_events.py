"""Wait for changes of files, with inotify where it is available."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
from collections.abc import Iterable

from inotify_simple import INotify, flags

log = logging.getLogger("nodepool.files")

#: Longest waits in seconds: without inotify, and with it, since some file systems send no events.
WITHOUT_EVENTS, WITH_EVENTS = 1.0, 10.0
#: What happens to the files of a directory, once they are complete; and to a file that grows.
_IN_DIRECTORY = (
    flags.CLOSE_WRITE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.CREATE
    | flags.DELETE
    | flags.ATTRIB
    | flags.DELETE_SELF
    | flags.MOVE_SELF
)
_IN_FILE = flags.MODIFY | flags.CLOSE_WRITE


class FileEvents:
    """Wakes one thread when a file changes, or when any thread calls `wake`."""

    def __init__(self) -> None:
        self._inotify: INotify | None = None
        self._lock = threading.Lock()
        self._closed = self._woken = False
        self._read, self._write = os.pipe()

    def watch(self, paths: Iterable[str]) -> None:
        """Watch these files or directories, instead of those of the last call."""
        self._release()
        try:
            self._inotify = INotify(nonblocking=True)
            for path in paths:
                if os.path.exists(path):
                    self._inotify.add_watch(
                        path, _IN_DIRECTORY if os.path.isdir(path) else _IN_FILE
                    )
        except OSError as error:
            self._release()
            log.info(
                "inotify is unavailable (%s); files are checked every %.0f s", error, WITHOUT_EVENTS
            )

    def wait(self, longest: float = math.inf) -> None:
        """Wait for an event, for some seconds at most, and not longer than this many."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if self._inotify is not None:
            poll.register(self._inotify.fileno(), select.POLLIN)
        seconds = WITHOUT_EVENTS if self._inotify is None else WITH_EVENTS
        found = poll.poll(min(seconds, longest) * 1000)
        if self._read in [descriptor for descriptor, _event in found]:
            with self._lock:
                os.read(self._read, 1)
                self._woken = False
        if self._inotify is not None:
            with contextlib.suppress(OSError):
                self._inotify.read(timeout=0)

    def wake(self, _what: object = None) -> None:
        """End the present wait, or the next one; harmless after `close`."""
        with self._lock:
            if not self._closed and not self._woken:
                os.write(self._write, b"x")  # does not block: there is one byte at most
                self._woken = True

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._write)
                os.close(self._read)
        self._release()

    def _release(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

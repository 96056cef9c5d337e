"""LogWriter: writes log records on a separate thread.

A write to a file waits for the disk and hands the interpreter to another thread. The threads of a
launcher, above all the one of the ZooKeeper connection, must not do that for each line. They only
hand records over; one thread writes what has arrived in a moment. If the process is killed, the
records of that moment are lost.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
from typing import Any

#: Seconds for which records are collected.
MOMENT = 0.05
#: If more records wait, the thread that logs writes them: whoever logs too much for the disk waits
#: for it.
MOST_WAITING = 10_000


class LogWriter:
    """The records that wait, and the thread that writes them."""

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[logging.Handler, logging.LogRecord]] = (
            collections.deque()
        )
        #: One item wakes the thread; unlike an event, a signal handler may interrupt it anywhere.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._woken = False
        #: Whoever writes holds it; reentrant, because a signal handler may end the process.
        self._writing = threading.RLock()
        self._stopping = threading.Event()
        self._replaced: list[tuple[logging.Logger, list[logging.Handler]]] = []
        self._thread = threading.Thread(target=self._run, name="LogWriter", daemon=True)

    def start(self) -> None:
        """Write for all handlers that are configured by now."""
        known = logging.root.manager.loggerDict.values()
        for logger in [logging.root, *(each for each in known if isinstance(each, logging.Logger))]:
            self._replaced.append((logger, list(logger.handlers)))
            logger.handlers[:] = [
                each if isinstance(each, logging.NullHandler) else _Later(each, self)
                for each in logger.handlers
            ]
        self._thread.start()

    def stop(self) -> None:
        """Write what waits; from now on, each thread writes its records itself."""
        for logger, handlers in self._replaced:
            logger.handlers[:] = handlers
        self._stopping.set()
        self._wake.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self.write()

    def add(self, handler: logging.Handler, record: logging.LogRecord) -> None:
        """Let the handler have the record soon."""
        self._waiting.append((handler, record))
        if len(self._waiting) > MOST_WAITING or self._stopping.is_set():
            self.write()
        elif not self._woken:
            self._woken = True
            self._wake.put(None)

    def write(self) -> None:
        """Write the records that wait, in their order, with one system call per stream."""
        streams: dict[logging.StreamHandler[Any], logging.LogRecord] = {}
        with self._writing:
            for _ in range(len(self._waiting)):
                handler, record = self._waiting.popleft()
                if isinstance(handler, logging.StreamHandler):
                    streams[handler] = record
                    vars(handler)["flush"] = _nothing
                try:
                    handler.handle(record)
                except (
                    Exception
                ):  # of a filter; errors while writing are reported by the handler itself
                    handler.handleError(record)
            for stream, last in streams.items():
                del vars(stream)["flush"]
                try:
                    stream.flush()
                except Exception:  # the disk is full
                    stream.handleError(last)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.get()
            self._stopping.wait(MOMENT)
            self._woken = False
            self.write()


class _Later(logging.Handler):
    """Stands for a handler in its logger."""

    def __init__(self, handler: logging.Handler, writer: LogWriter) -> None:
        super().__init__(handler.level)
        self._handler, self._writer = handler, writer

    def handle(self, record: logging.LogRecord) -> bool:
        """Make the text now, because its parameters may change, and write it later."""
        with contextlib.suppress(Exception):  # the handler reports it
            record.msg, record.args = record.getMessage(), None
        self._writer.add(self._handler, record)
        return True

    def flush(self) -> None:
        """Write now, because the process ends."""
        self._writer.write()


def _nothing() -> None:
    """Replace flush while records are being written."""


__all__ = ["LogWriter"]

"""SIGUSR2: log the stacks of all threads, and profile if the tools are installed (CLI-8)."""

from __future__ import annotations

import io
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

log = logging.getLogger("nodepool.stack_dump")

OBJECT_TYPES = 100


class StackDumper:
    """Handles the signal.

    A thread does the work, because a handler may interrupt a log call.
    """

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._profiling = False

    def handler(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """Start a dump; ignored while one is running."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            threading.Thread(target=self._run, name="StackDump", daemon=True).start()
        except BaseException:
            self._busy.release()
            raise

    def _run(self) -> None:
        try:
            self.dump()
        finally:
            self._busy.release()

    def dump(self) -> None:
        """Log everything; a failing part is logged, and the others follow."""
        _report("Beginning debug handler")
        for part, title in (
            (self._threads, "Thread dump"),
            (self._yappi, "Yappi"),
            (self._objgraph, "Objgraph"),
        ):
            try:
                part()
            except Exception:
                _report(f"{title} error:\n{traceback.format_exc()}")
        _report("End debug handler")

    def _threads(self) -> None:
        _report("\n".join(describe_threads()))

    def _yappi(self) -> None:
        try:
            import yappi
        except ImportError:
            return
        if not self._profiling:
            _report("Starting Yappi")
            yappi.start()
            self._profiling = True
            return
        _report("Stopping Yappi")
        yappi.stop()
        self._profiling = False
        _report(_captured(yappi.get_func_stats().print_all, yappi.get_thread_stats().print_all))
        yappi.clear_stats()

    def _objgraph(self) -> None:
        try:
            import objgraph
        except ImportError:
            return
        text = _captured(lambda out: objgraph.show_growth(limit=OBJECT_TYPES, file=out))
        _report("Most common types:")
        _report(text)


def describe_threads() -> Iterable[str]:
    """Return a line per thread, and its stack as Python prints it."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        name: object = thread.name if thread else "(Unknown)"
        daemon: object = thread.daemon if thread else "(Unknown)"
        yield f"Thread: {ident} {name} d: {daemon}"
        yield "".join(traceback.format_stack(frame)).rstrip("\n")


def _captured(*printers: Callable[[Any], Any]) -> str:
    out = io.StringIO()
    for printer in printers:
        printer(out)
    return out.getvalue()


def _report(text: str) -> None:
    """Log at a level that is enabled, else print to standard error."""
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        if log.isEnabledFor(level) and _would_be_shown(level):
            log.log(level, "%s", text)
            return
    # Debug records are for users who enabled them; the operator gets the text in any case.
    log.debug("%s", text)
    print(text, file=sys.stderr, flush=True)


def _would_be_shown(level: int) -> bool:
    logger: logging.Logger | None = log
    while logger is not None:
        for handler in logger.handlers:
            if not isinstance(handler, logging.NullHandler) and handler.level <= level:
                return True
        logger = logger.parent if logger.propagate else None
    return False


dumper = StackDumper()
stack_dump_handler = dumper.handler


def install() -> None:
    """Handle SIGUSR2 from now on; only from the main thread."""
    signal.signal(signal.SIGUSR2, stack_dump_handler)

"""Running a daemon: foreground or background, pid file, logging, signals, limited stop."""

from __future__ import annotations

import argparse
import concurrent.futures.thread
import contextlib
import hashlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, Protocol

from nodepool.logconfig import LoggingConfig, ServerLoggingConfig, load_config
from nodepool.process import background, stack_dump
from nodepool.process.program import absolute_path, describe, make_parser, report_error
from nodepool.process.watchdog import Watchdog
from nodepool.version import get_version_string

#: Seconds for an orderly stop; unfinished work continues after the restart.
STOP_LIMIT = 9.5
LEFT_BEHIND = 0.2
"""Seconds for threads of executors to end after the stop: the results that they wait for are not
needed any more.
"""

FAILED_STOP_LIMIT = 5.0
"""Seconds for a stop because a thread has ended: others may wait for it forever."""

log = logging.getLogger("nodepool.daemon")


class Service(Protocol):
    """All parts of a daemon together."""

    def start(self) -> None:
        """Start the parts; raise an exception if they cannot start."""

    def stop(self) -> None:
        """Stop the parts and return when all have ended; called on a separate thread."""


def make_daemon_parser(prog: str, description: str, pid_file: str) -> argparse.ArgumentParser:
    parser = make_parser(prog, description)
    parser.add_argument(
        "-p",
        dest="pidfile",
        metavar="FILE",
        type=absolute_path,
        default=pid_file,
        help="pid file (default: %(default)s)",
    )
    parser.add_argument(
        "-d", dest="debug", action="store_true", help="stay in the foreground, with debug logging"
    )
    parser.add_argument("-f", dest="foreground", action="store_true", help="stay in the foreground")
    parser.add_argument(
        "--state-dir",
        metavar="DIRECTORY",
        type=absolute_path,
        default=None,
        help="where the ZooKeeper session is stored, so that the next start can end it immediately "
        "after a kill (default: "
        "systemd's, else that of the pid file, else ~/.local/state/nodepool)",
    )
    parser.add_argument(
        "--repl", action="store_true", help="serve a Python console on localhost, port 3000"
    )
    return parser


def session_file(prog: str, args: argparse.Namespace) -> str:
    """Return the file that stores the session.

    Every daemon with a separate configuration or pid file has its own.
    """
    directory = (
        args.state_dir
        or os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
        or os.path.dirname(args.pidfile)
    )
    if not args.state_dir and not os.access(directory, os.W_OK):
        base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        with contextlib.suppress(OSError):
            os.makedirs(base, 0o700, exist_ok=True)
        directory = os.path.join(base, "nodepool")
    which = "\0".join((args.config, args.secure or "", args.pidfile))
    return os.path.join(
        directory, f"{prog}-{hashlib.sha256(which.encode()).hexdigest()[:16]}.session"
    )


def choose_logging(args: argparse.Namespace, server: str, foreground: bool) -> LoggingConfig:
    """Return the given file, else standard output, or the log file in the background."""
    if args.logconfig:
        return load_config(args.logconfig)
    config = ServerLoggingConfig() if foreground else ServerLoggingConfig(server=server)
    if args.debug:
        config.setDebug()
    return config


def run_daemon(
    prog: str,
    server: str,
    args: argparse.Namespace,
    make_service: Callable[[], Service],
    stop_limit: float = STOP_LIMIT,
    finish_always: bool = False,
) -> int:
    """Run until stopped; a failure to start is one line for the terminal and status 1.

    :param stop_limit: seconds for an orderly stop.
    :param finish_always: every signal to stop means what SIGUSR1 does: finish running work first.
    """
    stack_dump.install()
    foreground = args.foreground or args.debug
    pid_file = background.PidFile(args.pidfile)
    report = background.StartReport(None)
    logging_ready = False
    try:
        logging_config = choose_logging(args, server, foreground)
        if not foreground:
            # Before detaching, so that it is read.
            with pid_file:
                pass
            if background.must_detach():
                report = background.detach(prog)
            pid_file.acquire()
        logging_config.apply()
        logging_ready = True
        status = Runner(pid_file, stop_limit, finish_always).run(make_service, report)
    except Exception as error:
        if logging_ready and not foreground:
            log.error("Cannot start: %s", describe(error), exc_info=args.debug)
        pid_file.release()
        report.failed(describe(error))
        report_error(prog, error, args.debug)
        status = 1
    finally:
        pid_file.release()
    return status


class Runner:
    """One run of a service, from start to stop.

    A service with a method ``finish`` is asked by SIGUSR1 to stop when its running work is done,
    however long that takes; the next signal (``hurry``) turns that into an ordinary stop. For a
    service with a method ``cancel_start`` this method cancels the start: ``start`` then raises, or
    ends as usual. A service with a ``watchdog`` is stopped, with status 1, when a required thread
    has ended.
    """

    def __init__(
        self,
        pid_file: background.PidFile,
        stop_limit: float = STOP_LIMIT,
        finish_always: bool = False,
    ) -> None:
        self._pid_file = pid_file
        self._stop_limit = stop_limit
        self._finish_always = finish_always
        self._signals: list[int] = []
        self._cancelled = self._hung_up = False
        self._impatience = 2

    def run(self, make_service: Callable[[], Service], report: background.StartReport) -> int:
        # A pipe, because a lock or an event that a signal handler sets may be held by the code it
        # interrupts, and because a signal just before the wait would be noticed only after it.
        wakeup, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        # As early as possible: a signal during the start ends the daemon at the latest once it has
        # started.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._signal)
        # On a terminal it means that the terminal was closed. Elsewhere, other daemons reload,
        # which we do without a signal.
        signal.signal(signal.SIGHUP, self._signal if os.isatty(0) else self._hang_up)
        service = make_service()
        watchdog: Watchdog | None = getattr(service, "watchdog", None)
        if watchdog is not None:
            watchdog.on_end = lambda: self._wake(written)
        if hasattr(service, "finish"):
            self._impatience = 3
        try:
            self._start(service, wakeup)
        except BaseException:
            self._end(service.stop, wakeup)
            if not self._cancelled:
                raise
            log.info("Stopped while starting")
            report.failed("stopped by a signal while starting")
            return 0
        log.info("Nodepool %s is running, process %s", get_version_string(), os.getpid())
        report.running()
        background.notify("READY=1")
        self._wait(wakeup, watchdog)
        background.notify("STOPPING=1")
        if not self._signals:
            assert watchdog is not None
            log.critical(
                "Stopping with status 1, so that the supervisor restarts the daemon: %s",
                "; ".join(watchdog.ended),
            )
            self._stop_limit = min(self._stop_limit, FAILED_STOP_LIMIT)
            self._end(service.stop, wakeup)
            self._exit_now(1)
        if hasattr(service, "finish") and (
            self._finish_always or self._signals[0] == signal.SIGUSR1
        ):
            log.info("Stopping when running work is finished; the next signal ends it")
            finished = self._end(service.finish, wakeup, service.hurry)  # type: ignore[attr-defined]
        else:
            log.info("Stopping")
            finished = self._end(service.stop, wakeup)
        if not finished:
            names = sorted(
                t.name for t in threading.enumerate() if t is not threading.current_thread()
            )
            log.warning(
                "These threads have not ended within %g s: %s", self._stop_limit, ", ".join(names)
            )
            self._exit_now()
        if left := _left_behind():
            log.info("Stopped; threads still blocked in calls: %s", ", ".join(left))
            self._exit_now()
        log.info("Stopped")
        return 0

    def _wait(self, wakeup: int, watchdog: Watchdog | None) -> None:
        """Wait for a signal to stop, or the end of a required thread."""
        while not self._signals and not (watchdog is not None and watchdog.ended):
            os.read(wakeup, 512)
            if self._hung_up:
                self._hung_up = False
                log.info(
                    "Ignoring SIGHUP: changed configuration files are applied without a signal, or "
                    "need a restart"
                )

    def _start(self, service: Service, wakeup: int) -> None:
        """Start; a signal ends a start that may wait without limit (``cancel_start``).

        :raises BaseException: what the service raises.
        """
        if not hasattr(service, "cancel_start"):
            service.start()
            return
        errors: list[BaseException] = []

        def work() -> None:
            try:
                service.start()
            except BaseException as error:
                errors.append(error)
            finally:
                os.write(done_written, b"x")

        done, done_written = os.pipe()
        thread = threading.Thread(target=work, name="Thread-start", daemon=True)
        thread.start()
        while done not in select.select([done, wakeup], [], [])[0]:
            os.read(wakeup, 512)
            if self._signals and not self._cancelled:
                self._cancelled = True
                log.info("Stopping")
                service.cancel_start()
                if not select.select([done], [], [], self._stop_limit)[0]:
                    log.warning("The start has not ended within %g s", self._stop_limit)
                    self._exit_now()
                break
        thread.join()
        if errors:
            raise errors[0]

    @staticmethod
    def _wake(written: int) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full: its reader is awake
            os.write(written, b"w")

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) >= self._impatience:
            # Repeated signals end the process: locks end with the session, a restart cleans up.
            self._exit_now()

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        self._hung_up = True

    def _end(
        self, stop: Callable[[], Any], wakeup: int, hurry: Callable[[], Any] | None = None
    ) -> bool:
        """Stop; return False if something still runs at the end of the limit.

        ``hurry`` can start the limit later.
        """

        def work() -> None:
            try:
                stop()
            except Exception:
                log.exception("Error while stopping")
            finally:
                os.write(done_written, b"x")

        done, done_written = os.pipe()
        thread = threading.Thread(target=work, name="Shutdown", daemon=True)
        thread.start()
        if hurry is not None:
            while done not in select.select([done, wakeup], [], [])[0]:
                os.read(wakeup, 512)
                if len(self._signals) > 1:
                    log.info("Stopping now")
                    hurry()
                    break
        deadline = time.monotonic() + self._stop_limit
        thread.join(self._stop_limit)
        # The interpreter would wait for these without limit.
        waiting = [
            thread,
            *(
                t
                for t in threading.enumerate()
                if not t.daemon and t is not threading.current_thread() and t not in _pooled()
            ),
        ]
        for one in waiting:
            one.join(max(0.0, deadline - time.monotonic()))
        return not any(one.is_alive() for one in waiting)

    def _exit_now(self, status: int = 0) -> None:
        try:
            self._pid_file.release()
            # In a signal handler this may find a half-written line of the same thread.
            logging.shutdown()
        finally:
            os._exit(status)


def _pooled() -> Collection[threading.Thread]:
    """Return executor threads, for which the interpreter waits even if they are daemons."""
    return getattr(concurrent.futures.thread, "_threads_queues", ())


def _left_behind() -> list[str]:
    """Return the names of threads that do not end."""
    waiting = [t for t in threading.enumerate() if t in _pooled()]
    deadline = time.monotonic() + LEFT_BEHIND
    for one in waiting:
        one.join(max(0.0, deadline - time.monotonic()))
    return sorted(one.name for one in waiting if one.is_alive())

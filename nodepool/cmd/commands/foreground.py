"""Use of nodes by a command in the foreground, until it or a signal ends it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException

from nodepool.cmd.commands.context import CommandError, note
from nodepool.process.program import ending_signals
from nodepool.ssh import patience
from nodepool.texts import killed
from nodepool.zk.history import HistoryReader, kills_of, wait_for_write
from nodepool.zk.mirror.feed import KILLED, Event
from nodepool.zk.records import Node

#: Seconds after which a signal just before the wait is noticed.
SIGNAL_LATENCY = 0.5
#: Bytes of a variable: Linux starts no program with a longer one (MAX_ARG_STRLEN, 128 KiB with its
#: name).
LONGEST_VARIABLE = 120_000


class Foreground:
    """Ends the use of the nodes on INT, TERM and HUP (not below ``nohup``); a child gets TERM.

    This process continues, to return the nodes.

    :ivar using: before the use begins, a signal ends this process.
    """

    def __init__(self, using: bool = False) -> None:
        self.using = using
        self.ended = False
        # Not an event: the interrupted code may hold its lock.
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Foreground:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handler) for n in ending_signals()}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a command with these variables; return its exit status, or 128 plus its signal.

        One that is too long is missing; the file that ``NAME_FILE`` names has the content of
        ``NAME`` if that is JSON.
        """
        with contextlib.ExitStack() as files:
            given = {
                name: text
                for name, text in environment.items()
                if len(os.fsencode(text)) < LONGEST_VARIABLE
            }
            for name, text in (
                (name, text) for name, text in environment.items() if name.endswith("_JSON")
            ):
                file = files.enter_context(tempfile.TemporaryFile())
                file.write(os.fsencode(text))
                file.flush()
                # It has no other name, and nothing remains of it if this process is killed.
                given[f"{name}_FILE"] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            try:
                self._process = subprocess.Popen(list(command), env={**os.environ, **given})
            except OSError as error:
                raise CommandError(f"cannot run {command[0]}: {error.strerror}") from error
            if self.ended:
                self._process.terminate()
            status = self._process.wait()
        return status if status >= 0 else 128 - status

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the use, at most ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.ended:
            left = (
                SIGNAL_LATENCY
                if deadline is None
                else min(SIGNAL_LATENCY, deadline - time.monotonic())
            )
            if left <= 0:
                return
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=left)

    def end(self) -> None:
        """End the use, from any thread."""
        self._handler(signal.SIGTERM, None)

    def _handler(self, number: int, _frame: FrameType | None) -> None:
        if not self.using:
            raise SystemExit(128 + number)
        self.ended = True
        self._queue.put(number)
        # The terminal sends INT to the child directly.
        if self._process is not None and number != signal.SIGINT:
            self._process.terminate()


class Kills:
    """Processes that are killed for memory on nodes from now on."""

    def __init__(self, kazoo: KazooClient, nodes: Iterable[Node]) -> None:
        self._kazoo, self._nodes = kazoo, {(node.id or "", node.provider) for node in nodes}
        self._reader, self._began = HistoryReader(KILLED), time.monotonic()
        with contextlib.suppress(KazooException, TimeoutError):
            self._reader.skip(kazoo)

    def show(self, status: int) -> None:
        """Print a line for each kill if the command has failed, at most a second later."""
        if status:
            with contextlib.suppress(KazooException, TimeoutError):
                for kill in self._find(patience(status, time.monotonic() - self._began)):
                    note(killed(kill))

    def _find(self, longest: float) -> list[Event]:
        until, written = time.monotonic() + longest, threading.Event()
        while True:
            written.clear()
            wait_for_write(self._kazoo, written.set)
            found = kills_of(self._reader, self._kazoo, self._nodes)
            if found or not written.wait(max(0.0, until - time.monotonic())):
                return found

"""Writes nodes that have ended to the file ``usage-log`` (doc/operation/usage.rst)."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading

from kazoo.exceptions import KazooException

from nodepool.base.problems import Problem, error_line, may_be_bug, one_line
from nodepool.exceptions import FOREIGN
from nodepool.launcher.state import LauncherState
from nodepool.status import usage_file
from nodepool.status.usage import Ledger, price_of
from nodepool.zk.connection.protocol import BROKEN
from nodepool.zk.history import HistoryFollower

#: Seconds between two passes, and until nodes are forgotten whose end the history does not have.
INTERVAL, FORGET_AFTER = 60.0, 3600.0
#: Nodes that are written together, and most of them that wait for a file that cannot be written.
BATCH, MOST = 5_000, 100_000


class UsageLog:
    """Follows the history while this launcher is elected.

    The first pass reads the whole history, as does the first one of a new file; others read what
    was written since. Nodes are kept in a ledger until they have ended.
    """

    log = logging.getLogger("nodepool.UsageLog")
    name = "usage log"

    def __init__(self, state: LauncherState) -> None:
        self._state = state
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._due = -math.inf
        #: The file to write, if any.
        self._path: str | None = None
        self._problem: Problem | None = None
        self._begin()

    def problems(self) -> list[Problem]:
        problem = self._problem
        return [problem] if problem is not None and self._path is not None else []

    # -- calls of other threads, which do not wait

    def check(self, elected: bool) -> None:
        """Start a pass, if one is due."""
        config, now = self._state.config, self._state.clock.monotonic()
        wanted = config is not None and elected and self._state.zk.synced
        path = config.usage_log if wanted else None
        if (path == self._path and now < self._due) or self._stopping:
            return
        if path != self._path:
            self._problem = None
        self._path, self._due = path, now + INTERVAL
        if self._thread is None and path is not None:
            self._thread = threading.Thread(
                target=self._run, name="ThreadPoolExecutor-usage-log", daemon=True
            )
            self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    # -- the thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            self._pass()

    def _pass(self) -> None:
        path = self._path
        try:
            if path is not None and not self._stopping:
                self._update(path)
            self._problem = None
        except (KazooException, *BROKEN) as error:
            self.log.debug("The history cannot be read: %r", error)
        except FOREIGN as error:
            self._failed(path, error)

    def _begin(self) -> None:
        """Forget everything; the next pass reads the whole history."""
        self._ledger, self._history = Ledger(), HistoryFollower()
        self._missing: set[str] = set()
        self._forget_at = -math.inf

    def _failed(self, path: str | None, error: BaseException) -> None:
        text = str(error) if isinstance(error, (OSError, sqlite3.Error)) else error_line(error)
        problem = Problem(
            one_line(f"usage-log {path} cannot be written: {text}"),
            help="make it a file that this launcher may write, with free space, or move it away "
            "and a new one is created; each minute is another attempt, and the history keeps a day",
        )
        if problem != self._problem:
            self.log.error("%s", problem, exc_info=error if may_be_bug(error) else None)
        self._problem = problem
        if len(self._ledger.uses) > MOST:
            self._begin()

    def _update(self, path: str) -> None:
        if not os.path.isabs(path):
            raise OSError("it is not an absolute path")
        with usage_file.create(path) as file:
            if file.oldest() is None:
                self._begin()
            for events in self._history.read(self._state.zk.kazoo_client):
                for event in events:
                    self._ledger.add(event)
                if len(self._ledger.uses) > BATCH:
                    self._write(file)
                if self._stopping:
                    return
            self._write(file)
            while not self._stopping and file.sum_up():
                pass
        now = self._state.clock.monotonic()
        if now >= self._forget_at:
            self._forget_at = now + FORGET_AFTER
            self._forget()

    def _write(self, file: usage_file.UsageFile) -> None:
        config, uses = self._state.config, self._ledger.uses
        ended = [use for use in uses.values() if use.removed is not None]
        file.write(ended, lambda use: price_of(config, use))
        for use in ended:
            del uses[use.node]
        # What node managers report late.
        for use in [use for use in uses.values() if use.created is None and use.measured]:
            if file.complete(use):
                del uses[use.node]

    def _forget(self) -> None:
        """Drop nodes and requests that have not existed for an hour."""
        zk, ledger = self._state.zk, self._ledger
        missing = {node for node in ledger.uses if zk.node_tree.get(node) is None}
        missing |= {request for request in ledger.users if zk.request_tree.get(request) is None}
        for each in missing & self._missing:
            ledger.uses.pop(each, None)
            ledger.users.pop(each, None)
        self._missing = missing

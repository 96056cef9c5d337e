"""Processes that the kernel has killed because a sliver's memory limit was reached.

The kernel names them in its log, in a line that programs cannot write: what is written to
``/dev/kmsg`` has another facility (Documentation/ABI/testing/dev-kmsg of Linux 6.12).
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from nodepool.nodemanager.eventloop import IN, EventLoop, Watched

log = logging.getLogger("nodepool.nodemanager")

#: Priority (of facility 0, the kernel), sequence number, µs since the boot; process, name, user.
_KILL = re.compile(
    rb"[0-7],(\d+),(\d+),[^;]*;Memory cgroup out of memory: Killed process (\d+) \((.*)\) "
    rb"total-vm:.* UID:(\d+) "
)
#: Bytes of one record; the kernel's own limit is less.
_RECORD = 1 << 14
#: Records that are read before it is the turn of others.
_BATCH = 1000


class Kill(NamedTuple):
    """A line of the kernel: its number since the boot, and UNIX seconds.

    User and process are those of the host.
    """

    sequence: int
    when: float
    uid: int
    pid: int
    program: str
    #: It was read when it was written.
    is_new: bool


class MemoryKills:
    """One thread that waits for lines of the kernel.

    :param killed: is called with each kill; must return immediately.
    :param path: of the kernel's log.
    """

    def __init__(self, killed: Callable[[Kill], object], path: str = "/dev/kmsg") -> None:
        self._killed, self._path = killed, path
        self._loop = EventLoop("Thread-nm-kills")
        #: All lines were read that are older than this process.
        self._is_new = False
        self._log = -1

    def start(self) -> None:
        """Start with the oldest line; without access to the log, kills are counted only."""
        try:
            self._log = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            log.warning(
                "Programs that are killed for memory cannot be named: %s: %s",
                self._path,
                error.strerror,
            )
            return
        self._loop.start()
        self._watched = Watched(self._log, self._read)
        self._loop.post(lambda: self._loop.watch(self._watched, IN))

    def stop(self) -> None:
        if self._loop.stop(5):
            self._loop.close()
            if self._log >= 0:
                os.close(self._log)
                self._log = -1

    def _read(self) -> None:
        for _ in range(_BATCH):
            try:
                record = os.read(self._log, _RECORD)
            except BlockingIOError:
                self._is_new = True
                return
            except BrokenPipeError:  # the oldest lines were overwritten
                continue
            except OSError as error:
                log.error("Kills for memory are not named any more: %s: %s", self._path, error)
                self._loop.watch(self._watched, None)
                return
            if found := _KILL.match(record):
                sequence, since_boot, pid, uid = (int(found[each]) for each in (1, 2, 3, 5))
                # The clock of the kernel's log is not corrected: it may be seconds behind.
                now = time.clock_gettime(time.CLOCK_MONOTONIC)
                age = 0.0 if self._is_new else now - since_boot / 1e6
                program = found[4].decode("utf-8", "replace")
                try:
                    when = time.time() - max(0.0, age)
                    self._killed(Kill(sequence, when, uid, pid, program, self._is_new))
                except Exception:  # it concerns that kill only
                    log.exception("Kill of process %d (%s):", pid, program)

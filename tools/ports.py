"""Ports on loopback that stay free between choosing and binding them. Standard library only.

Each process owns one range of ports below those that outgoing connections take. An abstract Unix
socket marks the range as taken, so that other test runs and demonstrations on this machine choose
another one. The kernel removes the mark when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

#: Linux takes ports of outgoing connections from 32768 on.
FIRST, SIZE, RANGES = 10240, 1536, 14


class _Range:
    """The range of this process, which is reserved at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Descriptor of the socket that marks the range as taken; open until the process ends.
        self._mark = -1
        self._pid = 0
        self._number = 0
        self._next = 0

    def number(self) -> int:
        """Return the number of this process's range, which no other process on this machine has.

        :raises OSError: all ranges are in use.
        """
        with self._lock:
            if self._mark < 0 or self._pid != os.getpid():
                self._take()
            return self._number

    def _take(self) -> None:
        self._pid, self._next = os.getpid(), 0
        for number in range(RANGES):
            mark = socket.socket(socket.AF_UNIX)
            try:
                mark.bind(f"\0nodepool-ports-{number}")
            except OSError:
                mark.close()
            else:
                self._mark, self._number = mark.detach(), number
                return
        raise OSError(
            f"All {RANGES} ranges of ports are in use: too many test runs on this machine"
        )

    def reserve(self, count: int = 1) -> int:
        """Return the first of *count* adjacent ports that nobody uses; a range is walked through
        before any is reused.

        :raises OSError: there are none.
        """
        start = FIRST + self.number() * SIZE
        with self._lock:
            for _ in range(2 * SIZE):
                if self._next + count > SIZE:
                    self._next = 0
                first = start + self._next
                taken = self._taken(first, count)
                self._next = (taken + 1 if taken is not None else first + count) - start
                if taken is None:
                    return first
        raise OSError(f"No {count} adjacent free ports between {start} and {start + SIZE}")

    @staticmethod
    def _taken(first: int, count: int) -> int | None:
        with contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probe = probes.enter_context(socket.socket())
                # As servers do: connections that have just ended do not matter.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    return port
        return None


_range = _Range()
number = _range.number
reserve = _range.reserve

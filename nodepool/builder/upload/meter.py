"""Progress of an upload, measured from outside.

Works with every driver that reads the file in this process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

#: Seconds over which the rate is averaged.
WINDOW = 10.0

_lock = threading.Lock()
#: Inode -> meters of uploads of this file, oldest first: a file is often uploaded to several providers concurrently.
_meters: dict[tuple[int, int], list[UploadMeter]] = {}


class UploadMeter:
    """Follows the read position of an open file.

    Drivers often read a file twice (checksums, then the upload): a position that falls to less than half starts a new
    pass, within which :attr:`sent` never decreases. If one file is uploaded several times concurrently, each open file
    belongs to one meter; they are matched by age.
    """

    def __init__(self, path: str, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.total: int | None = None
        #: Bytes read in this pass; None until the file was opened.
        self.sent: int | None = None
        self._inode: tuple[int, int] | None = None
        self._files: set[int] = set()
        self._samples: deque[tuple[float, int]] = deque()
        try:
            stat = os.stat(path)
        except OSError:
            return
        self.total = stat.st_size
        self._inode = (stat.st_dev, stat.st_ino)
        with _lock:
            _meters.setdefault(self._inode, []).append(self)

    def close(self) -> None:
        """Stop counting."""
        if self._inode is None:
            return
        with _lock:
            left = [meter for meter in _meters.get(self._inode, []) if meter is not self]
            if left:
                _meters[self._inode] = left
            else:
                _meters.pop(self._inode, None)
        self._inode = None

    @property
    def rate(self) -> float | None:
        """Return bytes per second over the last seconds; None if unknown yet."""
        if len(self._samples) < 2:
            return None
        (first, start), (last, end) = self._samples[0], self._samples[-1]
        return (end - start) / (last - first) if last > first else None

    def sample(self) -> None:
        """Read the position now."""
        if self._inode is None:
            return
        positions = self._positions(self._inode)
        if positions:
            self._take(max(positions))
        if self.sent is None:
            return
        now = self._now()
        self._samples.append((now, self.sent))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW:
            self._samples.popleft()

    def _take(self, position: int) -> None:
        if self.sent is None or position < self.sent / 2:
            self.sent = position
            self._samples.clear()
        else:
            self.sent = max(self.sent, position)

    def _positions(self, inode: tuple[int, int]) -> list[int]:
        with _lock:
            found = _open_files(inode)
            meters = _meters.get(inode, [])
            for meter in meters:
                meter._files &= found
            for number in sorted(found.difference(*(meter._files for meter in meters))):
                min(meters, key=lambda meter: len(meter._files))._files.add(number)
            mine = sorted(self._files)
        return [position for number in mine if (position := _position(number)) is not None]


def _open_files(inode: tuple[int, int]) -> set[int]:
    """Return the descriptors of this process for the file."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed in the meantime
                stat = os.stat(int(name))
                if (stat.st_dev, stat.st_ino) == inode:
                    found.add(int(name))
    return found


def _position(number: int) -> int | None:
    try:
        with open(f"/proc/self/fdinfo/{number}", encoding="ascii") as info:
            for line in info:
                if line.startswith("pos:"):
                    return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None

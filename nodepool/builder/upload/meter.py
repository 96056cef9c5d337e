"""Progress of an upload, measured from outside.

Works with every driver that reads the file in this process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable


class UploadMeter:
    """Follows the read position of a file.

    Drivers often read a file twice (checksums, then the upload): a position that falls to less than half starts a new
    pass, within which :attr:`sent` never decreases.
    """

    def __init__(self, path: str, now: Callable[[], float] = time.monotonic) -> None:
        stat = os.stat(path)
        self._now = now
        self._inode = (stat.st_dev, stat.st_ino)
        self._start = (0.0, 0)
        self.total = stat.st_size
        #: Bytes read in this pass; None until the file was opened.
        self.sent: int | None = None
        #: Bytes per second in this pass; None if unknown yet.
        self.rate: float | None = None

    def sample(self) -> None:
        now, position = self._now(), max(_positions(self._inode), default=self.sent)
        if position is None:
            return
        if self.sent is None or position < self.sent / 2:
            self.sent, self.rate, self._start = position, None, (now, position)
            return
        self.sent = max(self.sent, position)
        since, before = self._start
        self.rate = (self.sent - before) / (now - since) if now > since else None


def _positions(inode: tuple[int, int]) -> list[int]:
    """Return the positions of all descriptors of this process for the file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            stat = os.stat(int(name))
            if (stat.st_dev, stat.st_ino) == inode:
                with open(f"/proc/self/fdinfo/{name}", encoding="ascii") as info:
                    found.append(int(info.readline().removeprefix("pos:")))
    return found

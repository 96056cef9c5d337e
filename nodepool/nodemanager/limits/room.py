"""Room on the file system of the state directory: what may be promised, and a ballast for the day when it is full.

Others of the host may fill the file system to the last byte and inode.  What the daemon needs to go on and to delete slivers
(a log of the database, a few directory entries) is in a ballast, which is given up then, and made again when there is room.

The disk of a sliver has a ballast, too, for a job may fill it: what the next start writes there takes that place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger("nodepool.nodemanager.room")

MIB = 1 << 20
#: Never promised to slivers: root trees of images, uploads, database and logs share the file system.
RESERVE_PARTS = 20
RESERVE_MOST = 2048 * MIB
BALLAST = 64 * MIB
#: Files of the ballast without content: inodes.
SPARE = 32
#: Files of the ballast of a sliver's disk, and the bytes of each: a start needs a directory for each overlay, and writes files
#: anew before the old ones go.
DISK_FILES, DISK_PIECE = 16, 16384
#: Bytes and inodes below which the file system counts as full.
LEAST = 8 * MIB
LEAST_INODES = 4


def give_up(directory: Path) -> bool:
    """Remove the files of a directory; whether there were any. What cannot be removed stays."""
    given = False
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            os.unlink(entry)
            given = True
    return given


def keep_on_disk(directory: Path) -> None:
    """Make the ballast of a sliver's disk, or as much of it as there is room for."""
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        for number in range(DISK_FILES):
            descriptor = os.open(directory / f"{number}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, DISK_PIECE)
            finally:
                os.close(descriptor)


class Room:
    """All methods may be called from any thread.

    :param overcommit: how many times the room may be promised.
    """

    def __init__(self, directory: str | os.PathLike[str], overcommit: float = 1.0) -> None:
        self._directory = Path(directory)
        self._ballast = self._directory / "ballast"
        self.overcommit = overcommit
        self._lock = threading.Lock()
        self._said = False
        #: The whole ballast is there.
        self._complete = False

    def _state(self) -> os.statvfs_result:
        return os.statvfs(self._directory)

    def reserve(self) -> int:
        """Bytes."""
        state = self._state()
        return min(RESERVE_MOST, state.f_blocks * state.f_frsize // RESERVE_PARTS)

    def free(self) -> int:
        """Bytes that files may take without touching the reserve; below 0: it is touched already."""
        state = self._state()
        return state.f_bavail * state.f_frsize - self.reserve()

    def total(self, taken: int) -> int:
        """Bytes that slivers may have in all.

        :param taken: what their disks occupy already; to be found out before this is called, so that a disk that is just made
            never counts twice.
        """
        return max(0, int((self.free() + taken) * self.overcommit))

    # --- ballast -----------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        state = self._state()
        # Of what it keeps for root, a file system gives no part to others. Some tell no inodes: they make them when needed.
        return state.f_bavail * state.f_frsize < LEAST or (state.f_files > 0 and state.f_favail < LEAST_INODES)

    def ensure(self) -> None:
        """To be called before something that must succeed is written: on a full file system the ballast goes."""
        if not self._is_full():
            return
        with self._lock:
            self._complete = False
            if not self._said:
                self._said = True
                log.error("The file system of %s is full. Slivers run and can be deleted; remove what fills it", self._directory)
            # Templates of disks are made again when they are needed.
            for directory in (self._ballast, self._directory / "disks"):
                if give_up(directory):
                    return

    def keep(self) -> None:
        """Make the ballast, or as much of it as there is room for; to be called when room may have become free."""
        with self._lock, contextlib.suppress(OSError):
            if self._complete or self._is_full():
                return
            if self._said:
                self._said = False
                log.warning("The file system of %s has room again", self._directory)
            self._ballast.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self._ballast / "room", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                state = self._state()
                has = os.fstat(descriptor).st_blocks * 512
                size = min(BALLAST, has + state.f_bavail * state.f_frsize - 2 * LEAST)
                if size > has:
                    os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
            for number in range(SPARE):
                if state.f_files > 0 and state.f_favail - number < 2 * LEAST_INODES:
                    return
                (self._ballast / f"spare{number}").touch(mode=0o600)
            self._complete = size >= BALLAST

"""Disk space of the state directory: free space that may be promised, and a ballast.

Other programs of the host may fill the file system to the last byte and inode.  The daemon keeps a
ballast with the space that it needs to continue and to delete slivers (a database log, a few
directory entries).  The ballast is released when the file system is full, and created again when
space is free.

The disk of a sliver also has a ballast, for the files that the next start writes: a job may fill
the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

from nodepool.nodemanager.kernel.descriptors import held

log = logging.getLogger("nodepool.nodemanager.free_space")

MIB = 1 << 20
#: Never promised to slivers: root trees of images, uploads, database and logs share the file
#: system.
RESERVE_PARTS = 20
RESERVE_MOST = 2048 * MIB
BALLAST = 64 * MIB
#: Files of the ballast without content: inodes.
SPARE = 32
#: Files of the ballast of a sliver's disk, and the bytes of each: a start needs a directory for
#: each overlay, and writes new files before the old ones are deleted.
DISK_FILES, DISK_PIECE = 16, 16384
#: Bytes and inodes below which the file system counts as full.
LEAST = 8 * MIB
LEAST_INODES = 4


def give_up(directory: Path) -> bool:
    """Remove the files of a directory that can be removed; return whether there were any."""
    given = False
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            os.unlink(entry)
            given = True
    return given


def keep_on_disk(directory: Path) -> None:
    """Create the ballast of a sliver's disk, as far as there is free space."""
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        for number in range(DISK_FILES):
            with held(
                os.open(directory / f"{number}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            ) as descriptor:
                os.posix_fallocate(descriptor, 0, DISK_PIECE)


class FreeSpace:
    """Free space and ballast of the state directory. Thread-safe.

    :param overcommit: factor by which more space may be promised than exists.
    """

    def __init__(self, directory: str | os.PathLike[str], overcommit: float = 1.0) -> None:
        self._directory = Path(directory)
        self._ballast = self._directory / "ballast"
        self.overcommit = overcommit
        self._lock = threading.Lock()
        self._said = False
        #: The whole ballast exists.
        self._complete = False

    def _state(self) -> os.statvfs_result:
        return os.statvfs(self._directory)

    def reserve(self) -> int:
        """Return the bytes that are kept free."""
        state = self._state()
        return min(RESERVE_MOST, state.f_blocks * state.f_frsize // RESERVE_PARTS)

    def free(self) -> int:
        """Return the bytes that files may use besides the reserve; negative: it is in use."""
        state = self._state()
        return state.f_bavail * state.f_frsize - self.reserve()

    def total(self, taken: int) -> int:
        """Return the bytes that slivers may have in total.

        :param taken: bytes that their disks occupy already; determine them before the call, so that
            a disk that is just created never counts twice.
        """
        return max(0, int((self.free() + taken) * self.overcommit))

    # --- ballast
    # ----------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        state = self._state()
        # The part that a file system keeps for root is not counted. Some report no inodes: they
        # create them on demand.
        return state.f_bavail * state.f_frsize < LEAST or (
            state.f_files > 0 and state.f_favail < LEAST_INODES
        )

    def ensure(self) -> None:
        """Release the ballast if the file system is full; call it before vital writes."""
        if not self._is_full():
            return
        with self._lock:
            self._complete = False
            if not self._said:
                self._said = True
                log.error(
                    "The file system of %s is full. Slivers still run and can be deleted; free "
                    "disk space",
                    self._directory,
                )
            # Disk templates are created again when needed.
            for directory in (self._ballast, self._directory / "disks"):
                if give_up(directory):
                    return

    def keep(self) -> None:
        """Create the ballast as far as there is space; call it when space may have become free."""
        with self._lock, contextlib.suppress(OSError):
            if self._complete or self._is_full():
                return
            if self._said:
                self._said = False
                log.warning("The file system of %s has free space again", self._directory)
            self._ballast.mkdir(mode=0o700, exist_ok=True)
            with held(
                os.open(self._ballast / "room", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            ) as descriptor:
                state = self._state()
                has = os.fstat(descriptor).st_blocks * 512
                size = min(BALLAST, has + state.f_bavail * state.f_frsize - 2 * LEAST)
                if size > has:
                    os.posix_fallocate(descriptor, 0, size)
            for number in range(SPARE):
                if state.f_files > 0 and state.f_favail - number < 2 * LEAST_INODES:
                    return
                (self._ballast / f"spare{number}").touch(mode=0o600)
            self._complete = size >= BALLAST

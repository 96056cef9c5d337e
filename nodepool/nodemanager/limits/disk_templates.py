"""Preformatted disk images, so that a new disk of a known size is only a copy (C.3).

A template of some GiB holds only a few MiB of data, so that a copy is cheap.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from pathlib import Path

from nodepool.nodemanager.kernel import commands
from nodepool.nodemanager.kernel.descriptors import held
from nodepool.nodemanager.outcomes import BackendError

log = logging.getLogger("nodepool.nodemanager.disks")

KIB = 1024
BLOCK = 4096
#: Minimum size of a disk with a journal.
JOURNAL_KIB = 32 * KIB
FORMAT_TIMEOUT = 60.0
#: Changes with the options of the format: a template of another version is not used.
TEMPLATE = "template-1"
#: This many sizes are kept ready; the least recently used one is dropped first.
TEMPLATES = 8
#: Copies of a template that are kept for the next disks.
STOCK = 4
_SEEK_STEP = 1 << 20


class DiskError(BackendError):
    """A disk cannot be created, mounted or changed; the text contains the reason."""


class Templates:
    """The templates in one directory; all methods may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()

    def copy(self, kib: int, target: Path) -> None:
        """Create an image of that size. Raises DiskError, OSError; FileNotFoundError: retry."""
        if not self._take(kib, target):
            _copy_sparse(self._template(kib), target, kib * KIB)

    def stock(self, *sizes: int) -> None:
        """Create copies of the templates, synced to the host's disk, for the next disks.

        A loop device waits for that sync.

        :param sizes: also create templates of these sizes, in KiB.
        """
        try:
            for kib in sizes:
                self._template(kib)
            for template in self._directory.glob(f"{TEMPLATE}-*.img"):
                for number in range(STOCK):
                    ready = template.with_suffix(f".ready{number}")
                    if not ready.exists():
                        new = ready.with_suffix(".new")
                        _copy_sparse(template, new, template.stat().st_size, synced=True)
                        new.replace(ready)
        except (DiskError, OSError) as error:
            log.warning("Disk templates cannot be created now: %s", error)

    def _take(self, kib: int, new: Path) -> bool:
        """Use one of the prepared copies; return False if there is none."""
        for number in range(STOCK):
            with contextlib.suppress(FileNotFoundError):
                (self._directory / f"{TEMPLATE}-{kib}.ready{number}").rename(new)
                return True
        return False

    def _template(self, kib: int) -> Path:
        """Return a formatted image of that size that is never mounted itself."""
        path = self._directory / f"{TEMPLATE}-{kib}.img"
        with self._lock:
            if not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                new = path.with_suffix(".new")
                try:
                    self._format(new, kib)
                    new.replace(path)
                finally:
                    new.unlink(missing_ok=True)
                kept = sorted(
                    path.parent.glob("template-*.img"), key=lambda entry: entry.stat().st_mtime
                )
                for old in kept[:-TEMPLATES]:
                    for each in (old, *old.parent.glob(f"{old.stem}.*")):
                        each.unlink(missing_ok=True)
            else:
                os.utime(path)
        return path

    @staticmethod
    def _format(path: Path, kib: int) -> None:
        """Create a new ext4 image. Raises DiskError."""
        tool = commands.find("mke2fs")
        if tool is None:
            raise DiskError("mke2fs is missing: install e2fsprogs")
        with held(
            os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        ) as descriptor:
            os.ftruncate(descriptor, kib * KIB)
        large = kib >= JOURNAL_KIB
        command = [
            tool,
            "-q",
            "-F",
            "-t",
            "ext4",
            "-b",
            str(BLOCK),
            "-m",
            "0",
            "-i",
            "16384",
            "-I",
            "256",
            "-O",
            f"64bit,^resize_inode,meta_bg,{'' if large else '^'}has_journal",
            *(["-J", f"size={16 if kib >= 1 << 20 else 4}"] if large else []),
            "-E",
            "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0",
            str(path),
        ]
        commands.run(command, FORMAT_TIMEOUT, f"mke2fs of {kib} KiB", error=DiskError)


def _copy_sparse(source: Path, target: Path, size: int, synced: bool = False) -> None:
    """Copy only what is not a hole; the copy is `size` bytes long."""
    with (
        open(source, "rb", buffering=0) as old,
        held(
            os.open(
                target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        ) as descriptor,
    ):
        os.ftruncate(descriptor, size)
        position = 0
        while True:
            try:
                start = os.lseek(old.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            position = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            while start < position:
                piece = os.pread(old.fileno(), min(_SEEK_STEP, position - start), start)
                start += os.pwrite(descriptor, piece, start)
        if synced:
            os.fsync(descriptor)

"""Atomic replacement of files, and locks on files."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO

FileIdentity = tuple[int, ...]
"""Times of modification and change of status (ns), size, inode and device."""

#: Prefix of incomplete files; a crash may leave one behind.
NEW = ".new-"


def file_identity(path: str) -> FileIdentity | None:
    """Return what changes with the content of a file; None if there is no such file.

    The modification time alone can be equal: in image volumes, after ``cp -p``, or in the Nix
    store.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev


def open_now(path: str, flags: int) -> int:
    """Open a file: an ``opener`` for which a named pipe without a writer is an empty file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


@contextlib.contextmanager
def new_file(path: str, mode: int = 0o600, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` if the block ends without an error.

    Until then, and after a crash, ``path`` keeps its former content. Other users cannot read the
    new file before it is complete. After an error it is deleted.

    :param sync: flush the file and its directory to disk before returning.
    """
    directory = os.path.dirname(path)
    fd, temporary = tempfile.mkstemp(
        dir=directory or ".", prefix=f"{NEW}{os.path.basename(path)[:64]}-"
    )
    try:
        with open(temporary, "wb", opener=lambda *_: fd) as file:
            yield file
            file.flush()
            if mode != 0o600:  # which this is; some file systems do not support modes
                os.fchmod(fd, mode)
            if sync:
                os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if sync:
        sync_directory(directory)


def replace_file(path: str, content: bytes | str, mode: int = 0o600, *, sync: bool = True) -> None:
    """Replace a file atomically by this content, see :func:`new_file`."""
    with new_file(path, mode, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def remove_unfinished(directory: str) -> None:
    """Delete what a crash has left of new files; call it before anything is written there."""
    for name in glob.glob(f"{NEW}*", root_dir=directory):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, name))


def sync_directory(path: str) -> None:
    """Make created, renamed and deleted names in the directory durable."""
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_file(fd: int, timeout: float = 0.0, *, shared: bool = False) -> None:
    """Lock an open file or directory until it is closed; flock() itself has no time limit.

    :param timeout: seconds to wait for the current holders of the lock.
    :raises BlockingIOError: the lock is still held.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            return fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        pause.wait(0.05)

"""Files that are complete or as they were, and locks on files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

#: Beginning of the names of files that are not complete yet; a crash may leave such a one.
NEW = ".new-"


@contextlib.contextmanager
def new_file(
    path: str, mode: int = 0o600, *, sync: bool = True, place: Callable[[str, str], Any] = os.replace
) -> Iterator[BinaryIO]:
    """A file that becomes ``path`` when the block ends in order; until then, and after a crash, that is as it was.

    Other users cannot read it before it is complete. After an error nothing is left of it.

    :param sync: on the disk, and in its directory, before this returns.
    :param place: gives it its name.
    """
    directory = os.path.dirname(path)
    fd, temporary = tempfile.mkstemp(dir=directory or ".", prefix=f"{NEW}{os.path.basename(path)[:64]}-")
    try:
        with open(temporary, "wb", opener=lambda *_: fd) as file:
            yield file
            file.flush()
            if mode != 0o600:  # which it has; some file systems know no modes
                os.fchmod(fd, mode)
            if sync:
                os.fsync(fd)
        place(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if sync:
        sync_directory(directory)


def replace_file(path: str, content: bytes | str, mode: int = 0o600, *, sync: bool = True) -> None:
    """:func:`new_file` with this content."""
    with new_file(path, mode, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_directory(path: str) -> None:
    """Make it durable what has got, or lost, its name in the directory."""
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_file(fd: int, timeout: float = 0.0, *, shared: bool = False) -> None:
    """Lock the open file, or directory, until it is closed; flock() itself knows no time limit.

    :param timeout: seconds to wait for those that have it.
    :raises BlockingIOError: they still have it.
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

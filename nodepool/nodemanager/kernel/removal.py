"""Removal of directory trees with untrusted content."""

from __future__ import annotations

import os
import secrets
import stat

from nodepool.nodemanager.kernel.descriptors import held

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a directory with everything in it, at any depth.

    Directories inside are moved up to the top before they are emptied: this needs neither recursion
    nor a growing path, and a crash in between does no harm. Links are not
    followed, and other file systems are not entered. A failure does not stop the rest.
    Without root, directories that their owner may not enter or change are opened up first.

    :raises FileNotFoundError: the directory does not exist.
    :raises OSError: something could not be removed; the first such error.
    """
    if os.geteuid() != 0:
        _open_up(os.fspath(path), None)
    with held(os.open(path, _DIRECTORY)) as top:
        failure = _Removal(top).run()
    if failure is not None:
        raise failure
    os.rmdir(path)


def _open_up(name: str, directory: int | None) -> None:
    """Give the owner all rights to a directory, not to what a link leads to."""
    with held(os.open(name, _DIRECTORY | os.O_PATH, dir_fd=directory)) as descriptor:
        os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IRWXU)


class _Removal:
    def __init__(self, top: int) -> None:
        self._top = top
        self._failure: OSError | None = None
        self._prefix = f".removed-{secrets.token_hex(8)}-"
        self._count = 0
        #: Number of directories that were moved to the top.
        self._directories: list[str] = []

    def run(self) -> OSError | None:
        self._empty(self._top)
        while self._directories:
            name = self._directories.pop()
            try:
                with held(os.open(name, _DIRECTORY, dir_fd=self._top)) as directory:
                    self._empty(directory)
                os.rmdir(name, dir_fd=self._top)
            except OSError as error:
                self._failed(error)
        return self._failure

    def _empty(self, directory: int) -> None:
        with os.scandir(directory) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_directory in found:
            try:
                if not is_directory:
                    os.unlink(name, dir_fd=directory)
                    continue
                if os.geteuid() != 0:
                    _open_up(name, directory)
                if directory == self._top:
                    self._directories.append(name)
                else:
                    self._count += 1
                    here = f"{self._prefix}{self._count}"
                    os.rename(name, here, src_dir_fd=directory, dst_dir_fd=self._top)
                    self._directories.append(here)
            except OSError as error:
                self._failed(error)

    def _failed(self, error: OSError) -> None:
        # Another process may remove the same tree.
        if not isinstance(error, FileNotFoundError):
            self._failure = self._failure or error

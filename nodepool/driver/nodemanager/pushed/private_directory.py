"""The directory of a launcher's connections to backing nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from nodepool.base.files import lock_file

_PREFIX = "nodepool-backing-"
#: Bytes; socket paths must be short, and the SSH client appends to ours.
MAX_DIRECTORY = 60
#: Seconds.
NEW = 10.0


class PrivateDirectory:
    """Locked directory for sockets and keys of hosts; those of ended processes are removed."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(base) > MAX_DIRECTORY:
            base = "/tmp"
        for entry in os.scandir(base):
            with contextlib.suppress(OSError):
                if (
                    entry.name.startswith(_PREFIX)
                    and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                ):
                    self._remove_unused(entry.path)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        lock_file(self._lock, NEW)

    @staticmethod
    def _remove_unused(path: str) -> None:
        """Remove the directory. Raises OSError: it is in use."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            lock_file(descriptor)
            # A new one may not be locked yet.
            if time.time() - os.fstat(descriptor).st_mtime > NEW:
                shutil.rmtree(path)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

"""Limits the netlink sockets of slivers: nobody is charged for their buffers (NM-C.2)."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable

from nodepool.nodemanager.outcomes import BackendError

log = logging.getLogger("nodepool.nodemanager")

#: Sockets of one sliver, each of which holds up to net.core.rmem_max, and of the kernel itself in
#: each network at most. Programs usually have one for a moment.
MOST, KERNEL = 512, 32
#: Seconds between two checks: the kernel has no event for it.
PERIOD = 1.0


class NetlinkLimit:
    """Checks the slivers in one thread, and kills the processes of one with too many sockets.

    :param kill: kills all processes of a sliver.
    """

    def __init__(self, kill: Callable[[str], None]) -> None:
        self._kill = kill
        self._lock = threading.Lock()
        #: Name -> descriptor of the directory in /proc of process 1, which never becomes that of
        #: another process.
        self._known: dict[str, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="Thread-nm-netlink", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(5)
        for name in list(self._known):
            self.remove(name)

    def add(self, name: str, pid: int) -> None:
        """Check this sliver from now on; its process 1 may be a new one."""
        self.remove(name)
        with contextlib.suppress(OSError):
            if os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net"):
                return
            directory = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            with self._lock:
                self._known[name] = directory

    def remove(self, name: str) -> None:
        with self._lock:
            if (directory := self._known.pop(name, None)) is not None:
                os.close(directory)

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD):
            for name in list(self._known):
                with self._lock:
                    many = name in self._known and _has_many(self._known[name])
                if many:
                    log.warning(
                        "Sliver %s has more than %s netlink sockets: killing its processes",
                        name,
                        MOST,
                    )
                    try:
                        self._kill(name)
                    except BackendError as error:
                        log.warning(
                            "Processes of sliver %s cannot be killed, retrying in %g s: %s",
                            name,
                            PERIOD,
                            error,
                        )


def _has_many(directory: int) -> bool:
    """Return whether the network of a process has more sockets than a sliver may have."""
    try:
        descriptor = os.open("net/netlink", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:  # the process has ended
        return False
    with open(descriptor, "rb") as file, contextlib.suppress(OSError):
        return len(list(itertools.islice(file, MOST + KERNEL + 1))) > MOST + KERNEL
    return False

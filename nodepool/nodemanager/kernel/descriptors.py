"""Many descriptors: each sliver has three, each SSH session two."""

from __future__ import annotations

import logging
import resource
import select
from collections.abc import Iterable

log = logging.getLogger("nodepool.nodemanager")

_TERMINALS = "/proc/sys/kernel/pty/max"
#: What the kernel takes at most (NR_UNIX98_PTY_MAX).
MOST_TERMINALS = 1 << 20


def raise_limit() -> None:
    """As many as this process may have; the usual 1024 are there for programs that cannot count further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("The limit of open files stays at %s: %s", soft, error)


def raise_terminals() -> None:
    """Let the host have as many terminals as the kernel can count.

    A sliver that mounts a devpts of its own has no limit there but its memory and its descriptors; with the usual 4096 of the
    host, one sliver could take those of all others.
    """
    try:
        with open(_TERMINALS, "r+") as file:
            if int(file.read()) < MOST_TERMINALS:
                file.seek(0)
                file.write(str(MOST_TERMINALS))
    except (OSError, ValueError) as error:
        log.warning("A sliver with the privilege mount can use up the host's terminals; raise %s: %s", _TERMINALS, error)


def readable(descriptors: Iterable[int], timeout: float) -> set[int]:
    """Those that can be read from, or whose other end is gone, within so many seconds; whatever their numbers are."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, timeout) * 1000)}

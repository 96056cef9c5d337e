"""Limits of descriptors: each sliver has three, each SSH session two."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
from collections.abc import Iterable, Iterator

log = logging.getLogger("nodepool.nodemanager")

_TERMINALS = "/proc/sys/kernel/pty/max"
#: Maximum of the kernel (NR_UNIX98_PTY_MAX).
MOST_TERMINALS = 1 << 20


def raise_limit() -> None:
    """Raise the soft limit of open files of this process to its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("The limit of open files stays at %s: %s", soft, error)


def raise_terminals() -> None:
    """Allow as many terminals on the host as the kernel supports.

    A sliver that mounts its own devpts is limited there only by its memory and descriptors: with
    the default of 4096 per host, one sliver could use up the terminals of all others.
    """
    try:
        with open(_TERMINALS, "r+") as file:
            if int(file.read()) < MOST_TERMINALS:
                file.seek(0)
                file.write(str(MOST_TERMINALS))
    except (OSError, ValueError) as error:
        log.warning(
            "A sliver with the privilege mount can use up the host's terminals; raise %s: %s",
            _TERMINALS,
            error,
        )


def readable(descriptors: Iterable[int], timeout: float) -> set[int]:
    """Return the descriptors that become readable or are closed within `timeout` seconds."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, timeout) * 1000)}


@contextlib.contextmanager
def held(descriptor: int) -> Iterator[int]:
    """Close the descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)

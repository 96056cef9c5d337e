"""Many descriptors: each sliver has three, each SSH session two."""

from __future__ import annotations

import logging
import resource
import select
from collections.abc import Iterable

log = logging.getLogger("nodepool.nodemanager")


def raise_limit() -> None:
    """As many as this process may have; the usual 1024 are there for programs that cannot count further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("The limit of open files stays at %s: %s", soft, error)


def readable(descriptors: Iterable[int], timeout: float) -> set[int]:
    """Those that can be read from, or whose other end is gone, within so many seconds; whatever their numbers are."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, timeout) * 1000)}

"""Kills all processes of a sliver by its cgroups (C.3)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nodepool.nodemanager.kernel.descriptors import held
from nodepool.nodemanager.limits.cgroups import v1 as cgroup_v1
from nodepool.nodemanager.limits.cgroups.detect import FILES
from nodepool.nodemanager.limits.cgroups.files import CgroupError, Place, processes

#: Seconds until processes that have joined after the kernel's kill are killed, too.
AGAIN = 0.5


def kill(
    find: Callable[[], Sequence[tuple[Place, Path]]],
    thaw: Callable[[], None],
    name: str,
    timeout: float,
) -> None:
    """Kill all processes and wait until they have ended, for at most `timeout` seconds.

    :param find: returns the existing groups of the sliver.
    :param thaw: thaws processes that version 1's freezer holds: they cannot die while frozen.
    :raises CgroupError: some processes still exist.
    """
    end = time.monotonic() + timeout
    while True:
        groups = find()
        whole = [(place, group) for place, group in groups if FILES[place.kind].kill(group)]
        thaw()
        if not whole:
            _signal({pid for _, group in groups for pid in processes(group)}, groups)
        for place, group in whole or groups[:1]:
            FILES[place.kind].wait_empty(group, min(AGAIN, end - time.monotonic()))
        # A process that is joining may be in some hierarchies only.
        rest = {pid for _, group in groups for pid in processes(group)}
        if not rest:
            return
        if time.monotonic() > end:
            raise CgroupError(f"sliver {name}: processes {sorted(rest)[:8]} do not end", retry=True)
        _signal(rest, groups)
        cgroup_v1.wait_empty(groups[0][1], end - time.monotonic())


def _signal(pids: Iterable[int], groups: Sequence[tuple[Place, Path]]) -> None:
    """Send SIGKILL; each process is rechecked once a descriptor holds it (reused ids)."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, OSError), held(os.pidfd_open(pid)) as pidfd:
            if any(pid in processes(group) for _, group in groups):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

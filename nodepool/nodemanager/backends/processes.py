"""The processes of slivers, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from nodepool.base.boot import boot_id
from nodepool.nodemanager.backends.base import (
    IDS_PER_SLIVER,
    BackendError,
    Handle,
    Services,
    SliverSpec,
)
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.kernel.descriptors import held, readable

KILL_TIMEOUT = 10.0


def alive(handle: Handle) -> bool:
    """Return whether process 1 of the sliver exists."""
    pid = handle.get("pid")
    return bool(
        pid
        and handle.get("boot_id") == boot_id()
        and syscalls.start_time(int(pid)) == handle["start_time"]
    )


def with_ids(first: int) -> list[int]:
    """Return the processes in the user namespace of the sliver with these ids."""
    return [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and syscalls.uid_range(int(entry)) == (first, IDS_PER_SLIVER)
    ]


class Processes:
    """The processes of slivers, known by their cgroups where there are any.

    :param members: returns processes of a sliver with this name and number, for hosts without
        cgroups.
    """

    def __init__(self, services: Services, members: Callable[[str, int], list[int]]) -> None:
        self.cgroups = services.cgroups
        self.members = members

    def limit(self, spec: SliverSpec, handle: Handle) -> Handle:
        """Create the cgroups of the sliver, after its disk, whose I/O they limit."""
        return (
            handle
            if self.cgroups is None
            else {**handle, "cgroups": self.cgroups.create(spec.name, spec.rspec)}
        )

    def procs(self, name: str) -> list[str]:
        """Return the files to which a new process writes itself."""
        return self.cgroups.procs_files(name) if self.cgroups is not None else []

    def empty(self, name: str, index: int) -> bool:
        return not self.members(name, index) if self.cgroups is None else self.cgroups.empty(name)

    def kill(self, name: str, index: int, handle: Handle | None) -> None:
        """End all processes, or raise BackendError."""
        deadline = time.monotonic() + KILL_TIMEOUT
        if handle and alive(handle):
            self._kill_first(handle, deadline)
        if self.cgroups is None:
            self.kill_members(name, index)
        elif not self.cgroups.empty(name):
            self.cgroups.kill(name, max(0.1, deadline - time.monotonic()))

    def _kill_first(self, handle: Handle, deadline: float) -> None:
        """Kill process 1; the kernel kills its whole pid namespace with it."""
        if self.cgroups is not None:
            with contextlib.suppress(BackendError, OSError):
                # Frozen by the old freezer it could not even die.
                self.cgroups.freeze(handle["name"], False)
        with (
            contextlib.suppress(ProcessLookupError),
            held(os.pidfd_open(int(handle["pid"]))) as pidfd,
        ):
            if syscalls.start_time(int(handle["pid"])) == handle["start_time"]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                readable([pidfd], deadline - time.monotonic())

    def kill_members(self, name: str, index: int) -> None:
        """Kill until there are no processes; each is rechecked once a descriptor holds it."""
        deadline = time.monotonic() + KILL_TIMEOUT
        while found := self.members(name, index):
            if time.monotonic() > deadline:
                raise BackendError(f"sliver {name}: processes {found[:8]} do not end", retry=True)
            for pid in found:
                with contextlib.suppress(ProcessLookupError), held(os.pidfd_open(pid)) as pidfd:
                    if pid in self.members(name, index):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        readable([pidfd], deadline - time.monotonic())


class ContainerProcesses(Processes):
    """Processes of slivers of which some may be outside of the cgroups.

    A crash may have happened between the start of process 1 and its move to our cgroups.
    """

    def empty(self, name: str, index: int) -> bool:
        return super().empty(name, index) and not self.members(name, index)

    def kill(self, name: str, index: int, handle: Handle | None) -> None:
        super().kill(name, index, handle)
        self.kill_members(name, index)

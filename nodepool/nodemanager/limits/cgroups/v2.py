"""Limits in cgroup version 2 (NM-C.3). Each function takes the directory of a group."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

from nodepool.nodemanager.kernel.descriptors import held
from nodepool.nodemanager.kernel.syscalls import write
from nodepool.nodemanager.limits.cgroups.files import (
    MIB,
    CgroupError,
    Counters,
    field,
    format_list,
    number,
    quota,
    read,
)

FREEZE_TIMEOUT = 5.0
#: What is counted; all groups have the first ones.
COUNTERS: Counters = {
    "": (
        ("cpu.stat", "usage_usec ", "cpu_usec", 1),
        ("cpu.stat", "throttled_usec ", "throttled_usec", 1),
        ("cpu.pressure", "some ", "cpu_stalled_usec", 1),
        ("memory.pressure", "some ", "memory_stalled_usec", 1),
        ("io.pressure", "some ", "io_stalled_usec", 1),
    ),
    "memory": (
        ("memory.current", "", "memory_bytes", 1),
        ("memory.peak", "", "memory_peak", 1),
        ("memory.events", "oom_kill ", "oom_kills", 1),
    ),
    "pids": (("pids.current", "", "pids", 1), ("pids.peak", "", "pids_peak", 1)),
}


def made(group: Path) -> None:
    """Do nothing after mkdir."""


def cpu_weight(group: Path, weight: int) -> None:
    """Set the weight, 1 to 10000."""
    write(group / "cpu.weight", min(10_000, max(1, weight)))


def get_cpu_weight(group: Path) -> int | None:
    return number(group / "cpu.weight")


def cpu_limit(group: Path, per_mille: int, processors: int) -> None:
    if not (group / "cpu.max").exists():
        if per_mille:
            raise CgroupError(
                "nm_cpu_limit: this kernel has no CPU bandwidth control (CONFIG_CFS_BANDWIDTH)"
            )
        return
    write(
        group / "cpu.max",
        "{} {}".format(*quota(per_mille, processors)) if per_mille else "max 100000",
    )


def cpus(group: Path, processors: Iterable[int], nodes: Iterable[int]) -> None:
    write(group / "cpuset.cpus", format_list(processors))
    write(group / "cpuset.mems", format_list(nodes))


def get_cpus(group: Path) -> str:
    return read(group / "cpuset.cpus") or read(group / "cpuset.cpus.effective")


def memory(group: Path, limit: int, guaranteed: int) -> None:
    """Set limits in MiB; 0: none. Reclaims first, as a limit below the use would kill.

    :raises CgroupError: more is in use and cannot be reclaimed.
    """
    value = limit * MIB
    if limit and (number(group / "memory.current") or 0) > value:
        _reclaim(group, value)
    write(group / "memory.min", guaranteed * MIB)
    write(group / "memory.max", value if limit else "max")
    if (group / "memory.swap.max").exists():
        write(group / "memory.swap.max", 0 if limit else "max")


def _reclaim(group: Path, value: int) -> None:
    """Reclaim: a write to memory.high below the use does so before it returns."""
    before = read(group / "memory.high")
    write(group / "memory.high", value)
    try:
        for _attempt in range(3):
            used = number(group / "memory.current") or 0
            if used <= value:
                return
            with contextlib.suppress(OSError):
                write(group / "memory.reclaim", used - value)
        raise CgroupError(
            f"nm_mem_limit: {used // MIB} MiB are in use, more than {value // MIB}, and cannot be "
            "reclaimed"
        )
    finally:
        write(group / "memory.high", before)


def pids(group: Path, maximum: int) -> None:
    write(group / "pids.max", maximum)


def io(group: Path, devices: Iterable[str], read_bps: int, write_bps: int) -> None:
    """Set limits in bytes per second; 0: no limit."""
    for device in devices:
        write(group / "io.max", f"{device} rbps={read_bps or 'max'} wbps={write_bps or 'max'}")


def _wait_event(group: Path, key: str, value: int, timeout: float) -> bool:
    """Wait until cgroup.events says so; the kernel wakes us when it changes."""
    deadline = time.monotonic() + timeout
    with held(os.open(group / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        poll = select.poll()
        poll.register(descriptor, select.POLLPRI)
        while True:
            if f"{key} {value}" in os.pread(descriptor, 4096, 0).decode().splitlines():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poll.poll(left * 1000)


def freeze(group: Path, frozen: bool) -> None:
    """Freeze or thaw; returns when that is done.

    :raises CgroupError: some process does not stop.
    """
    write(group / "cgroup.freeze", int(frozen))
    if not _wait_event(group, "frozen", int(frozen), FREEZE_TIMEOUT):
        if frozen:
            write(group / "cgroup.freeze", 0)
        raise CgroupError(
            f"{group.name}: not {'frozen' if frozen else 'thawed'} after {FREEZE_TIMEOUT:g} s",
            retry=True,
        )


def frozen(group: Path) -> bool:
    return number(group / "cgroup.freeze") == 1


def cpu_usec(group: Path) -> int | None:
    return field(group / "cpu.stat", "usage_usec")


def kill(group: Path) -> bool:
    """Kill the group and all below it at one stroke; False: this kernel (before 5.14) cannot."""
    try:
        write(group / "cgroup.kill", 1)
    except FileNotFoundError:
        return False
    return True


def wait_empty(group: Path, timeout: float) -> None:
    """Wait until no process is in or below the group, or until the timeout."""
    with contextlib.suppress(FileNotFoundError):
        _wait_event(group, "populated", 0, timeout)


def delegate(group: Path, controllers: Iterable[str]) -> None:
    """Enable controllers for the groups below, skipping those that the kernel refuses."""
    for name in sorted(controllers):
        with contextlib.suppress(OSError):
            write(group / "cgroup.subtree_control", f"+{name}")


def available(group: Path) -> frozenset[str]:
    """Return the controllers that the group may delegate; every group has the freezer (5.2)."""
    return frozenset(
        {"cpu", "cpuset", "memory", "pids", "io"}.intersection(
            read(group / "cgroup.controllers").split()
        )
    )

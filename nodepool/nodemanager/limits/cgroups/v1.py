"""Limits in cgroup version 1 (NM-C.3). Each function takes the directory of a group."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable
from pathlib import Path

from nodepool.nodemanager.kernel.syscalls import write
from nodepool.nodemanager.limits.cgroups.files import (
    MIB,
    CgroupError,
    Counters,
    format_list,
    number,
    quota,
    read,
)

FREEZE_TIMEOUT = 5.0
#: What is counted, by controller.
COUNTERS: Counters = {
    "cpu": (("cpu.stat", "throttled_time ", "throttled_usec", 1000),),
    "cpuacct": (("cpuacct.usage", "", "cpu_usec", 1000),),
    "memory": (
        ("memory.usage_in_bytes", "", "memory_bytes", 1),
        ("memory.max_usage_in_bytes", "", "memory_peak", 1),
        ("memory.oom_control", "oom_kill ", "oom_kills", 1),
    ),
    "pids": (("pids.current", "", "pids", 1), ("pids.peak", "", "pids_peak", 1)),
}
#: Buffers of TCP connections are allowed in addition to the memory limit: at most this part of it,
#: at least this many bytes.
TCP_PART, TCP_LEAST = 4, 16 * MIB
#: cpu.shares per unit of version 2's cpu.weight: the default weights are 1024 and 100.
_SHARES = 10.24


def made(group: Path) -> None:
    """Initialize a new group: a cpuset accepts no process before it has CPUs and memory nodes."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists() and not read(group / name):
            write(group / name, read(group.parent / name))
    with contextlib.suppress(OSError):
        if (group / "memory.use_hierarchy").exists() and read(
            group / "memory.use_hierarchy"
        ) == "0":
            write(group / "memory.use_hierarchy", 1)


def cpu_weight(group: Path, weight: int) -> None:
    """Set the weight in units of version 2: 1 to 10000."""
    write(group / "cpu.shares", min(262_144, max(2, round(weight * _SHARES))))


def get_cpu_weight(group: Path) -> int | None:
    shares = number(group / "cpu.shares")
    return None if shares is None else round(shares / _SHARES)


def cpu_limit(group: Path, per_mille: int, processors: int) -> None:
    if not (group / "cpu.cfs_quota_us").exists():
        if per_mille:
            raise CgroupError(
                "nm_cpu_limit: this kernel has no CPU bandwidth control (CONFIG_CFS_BANDWIDTH)"
            )
        return
    # The old quota with the new period may for a moment be below the kernel's minimum.
    write(group / "cpu.cfs_quota_us", -1)
    if per_mille:
        amount, period = quota(per_mille, processors)
        write(group / "cpu.cfs_period_us", period)
        write(group / "cpu.cfs_quota_us", amount)


def cpus(group: Path, processors: Iterable[int], nodes: Iterable[int]) -> None:
    write(group / "cpuset.cpus", format_list(processors))
    # Memory is migrated to the new nodes.
    with contextlib.suppress(OSError):
        write(group / "cpuset.memory_migrate", 1)
    write(group / "cpuset.mems", format_list(nodes))


def get_cpus(group: Path) -> str:
    return read(group / "cpuset.cpus")


def memory(group: Path, limit: int, guaranteed: int) -> None:
    """Set limit and guarantee in MiB; 0: none. Reclaim spares `guaranteed` as long as it can.

    :raises CgroupError: more is in use and cannot be reclaimed.
    """
    value = limit * MIB if limit else -1
    plain, both = group / "memory.limit_in_bytes", group / "memory.memsw.limit_in_bytes"
    previous = number(plain)
    order = [plain, both]
    if value == -1 or (previous is not None and value > previous):
        order.reverse()
    try:
        for file in order:
            if file.exists():
                write(file, value)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        if previous is not None:
            with contextlib.suppress(OSError):
                write(plain, previous)
        used = (number(group / "memory.usage_in_bytes") or 0) // MIB
        raise CgroupError(
            f"nm_mem_limit: {used} MiB are in use, more than {limit}, and cannot be reclaimed"
        ) from None
    # Buffers of TCP are not part of the limit here. A limit below the current use cannot be
    # written.
    tcp = group / "memory.kmem.tcp.limit_in_bytes"
    if tcp.exists():
        with contextlib.suppress(OSError):
            write(tcp, max(TCP_LEAST, value // TCP_PART) if limit else -1)
    with contextlib.suppress(OSError):
        write(group / "memory.soft_limit_in_bytes", guaranteed * MIB if guaranteed else -1)


def pids(group: Path, maximum: int) -> None:
    write(group / "pids.max", maximum)


def io(group: Path, devices: Iterable[str], read_bps: int, write_bps: int) -> None:
    """Set limits in bytes per second; 0: no limit."""
    for device in devices:
        write(group / "blkio.throttle.read_bps_device", f"{device} {read_bps}")
        write(group / "blkio.throttle.write_bps_device", f"{device} {write_bps}")


def freeze(group: Path, frozen: bool) -> None:
    """Freeze or thaw; returns when that is done.

    :raises CgroupError: some process does not stop.
    """
    wanted = "FROZEN" if frozen else "THAWED"
    deadline = time.monotonic() + FREEZE_TIMEOUT
    write(group / "freezer.state", wanted)
    # Version 1 does not notify us of the end of freezing; each read also advances it.
    while read(group / "freezer.state") != wanted:
        if time.monotonic() > deadline:
            if frozen:
                write(group / "freezer.state", "THAWED")
            raise CgroupError(
                f"{group.name}: not {wanted.lower()} after {FREEZE_TIMEOUT:g} s", retry=True
            )
        time.sleep(0.002)
        if frozen:
            write(group / "freezer.state", wanted)


def frozen(group: Path) -> bool:
    with contextlib.suppress(OSError):
        return read(group / "freezer.state") != "THAWED"
    return False


def cpu_usec(group: Path) -> int | None:
    nanoseconds = number(group / "cpuacct.usage")
    return None if nanoseconds is None else nanoseconds // 1000


def kill(group: Path) -> bool:
    """Return False: version 1 cannot kill a group as a whole."""
    return False


def wait_empty(group: Path, timeout: float) -> None:
    """Sleep for at most 2 ms before the caller checks again: version 1 reports no changes."""
    time.sleep(min(0.002, max(0.0, timeout)))


def delegate(group: Path, controllers: Iterable[str]) -> None:
    """Do nothing: all controllers of a hierarchy are in every group."""

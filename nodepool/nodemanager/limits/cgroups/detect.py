"""Finds the cgroup controllers of this host, in version 1, 2 or both (NM-C.3)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.limits.cgroups import v1 as cgroup_v1
from nodepool.nodemanager.limits.cgroups import v2 as cgroup_v2
from nodepool.nodemanager.limits.cgroups.files import Place
from nodepool.nodemanager.outcomes import Problem

CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "pids", "io", "freezer")
#: Limits in each version.
FILES = {"v1": cgroup_v1, "v2": cgroup_v2}
#: First kernel whose version 2 can freeze.
FREEZER_KERNEL = (5, 2)


def detect_places(newer_too: bool = True) -> list[Place]:
    """Return the mounted hierarchies.

    Version 2's freezer is preferred: frozen processes can still be killed. Without `newer_too` only
    version 1 is considered.
    """
    places: list[Place] = []
    newer: Place | None = None
    with open("/proc/self/mountinfo") as file:
        for line in file:
            head, _, tail = line.partition(" - ")
            kind, _, options = tail.split()[:3]
            mount = Path(head.split()[4])
            if kind == "cgroup2" and newer is None and newer_too:
                base = _delegated(mount)
                found = cgroup_v2.available(base)
                if _release() >= FREEZER_KERNEL:
                    found |= {"freezer"}
                newer = Place("v2", mount, found, base)
            elif kind == "cgroup":
                used = frozenset(
                    "io" if name == "blkio" else name for name in options.split(",")
                ) & set(CONTROLLERS)
                if used and not any(
                    place.mount == mount or place.controllers & used for place in places
                ):
                    places.append(Place("v1", mount, used, mount))
    if newer is not None:
        if "freezer" in newer.controllers:
            places = [place for place in places if place.controllers != {"freezer"}]
        # Each controller is in one version only; the core functions of version 2 are used in any
        # case.
        taken = {name for place in places for name in place.controllers}
        places.append(
            Place(
                "v2",
                newer.mount,
                (newer.controllers - taken) | (newer.controllers & {"freezer"}),
                newer.base,
            )
        )
    return places


#: Consequences of a missing controller.
_MISSING = {
    "cpu": "nm_cpu_share, nm_cpu_guaranteed_share and nm_cpu_limit have no effect",
    "cpuset": "nm_cpu_cores has no effect",
    "memory": "nm_mem_limit has no effect: a sliver can use up the memory of the host",
    "pids": "nm_pids_max has no effect: a sliver can use up the processes of the host",
    "io": "nm_io_read_bps and nm_io_write_bps have no effect",
    "freezer": "nm_enabled 0 stops slivers instead of freezing them",
}


def problems(controllers: Mapping[str, str | None]) -> list[Problem]:
    """Return what these controllers (name -> "v1", "v2" or None) do not support."""
    found = [
        Problem(
            f"cgroup controller {name}",
            False,
            f"{effect}; enable it in the kernel and mount it (cgroup2, or cgroup -o "
            f"{'blkio (io)' if name == 'io' else name})",
        )
        for name, effect in _MISSING.items()
        if controllers[name] is None
    ]
    if controllers["memory"] == "v1":
        found += [
            Problem(
                "memory guarantee",
                False,
                "nm_mem_guaranteed is only a hint with cgroup version 1; boot with version 2",
            ),
            Problem(
                "network buffers",
                False,
                "with cgroup version 1, nm_mem_limit does not include buffers of UDP sockets, and "
                "those of TCP are added to it "
                "(a quarter at most): a sliver can use more memory than its limit; boot with "
                "version 2",
            ),
        ]
    if controllers["io"] == "v1":
        found.append(
            Problem(
                "I/O limits",
                False,
                "nm_io_write_bps holds for direct writes only with cgroup version 1: "
                "what goes through the page cache is not limited; boot with version 2",
            )
        )
    return found


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


def keep_moves_quick() -> int:
    """Open a descriptor that keeps moves between cgroups quick (favordynmods), or return -1.

    Otherwise each move waits for all processors, and for every process of the host that is in the
    middle of a fork: a sliver that only forks, with little CPU, delays the creation and deletion of
    all others by seconds.  The setting applies to the whole host. It is held by an empty hierarchy
    of our own that is mounted nowhere: no option of others is changed, and the setting ends with
    the daemon, even if it is killed.  It costs each fork a memory barrier.

    All node managers of a host share the hierarchy: container runtimes mount every hierarchy of the
    kernel into a new container, and fail if one of them is removed meanwhile.
    """
    try:
        return syscalls.new_mount(
            "cgroup", {"none": None, "name": "nodepool-nm", "favordynmods": None}
        )
    except OSError:  # before Linux 6.0, or without version 1
        return -1


def own_group(mount: Path, controllers: Collection[str] = ()) -> Path:
    """Return this process's group: of version 1 with these controllers, or of version 2."""
    wanted = {"blkio" if name == "io" else name for name in controllers}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _number, names, path = line.rstrip("\n").split(":", 2)
            if wanted & set(names.split(",")) if wanted else not names:
                return mount / path.lstrip("/")
    return mount


def _delegated(mount: Path) -> Path:
    """Return our own or its parent group if systemd delegated it to us, else the root."""
    group = own_group(mount)
    for candidate in (group, group.parent):
        if candidate == mount or not candidate.is_relative_to(mount):
            break
        for attribute in ("trusted.delegate", "user.delegate"):
            with contextlib.suppress(OSError):
                if os.getxattr(candidate, attribute) == b"1":
                    return candidate
    return mount

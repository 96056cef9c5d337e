"""The groups of slivers in each hierarchy of the host."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nodepool.nodemanager.limits.cgroups.detect import FILES
from nodepool.nodemanager.limits.cgroups.files import (
    CgroupError,
    Place,
    enter,
    processes,
    read,
    walk,
)
from nodepool.nodemanager.records.rspec import check_name

ROOT_NAME = "nodepool-nm"
BESTEFFORT = "besteffort"
#: Sliver names have no dot, so that no sliver conflicts with a kernel file or another group.
SUFFIX = ".sliver"
#: Group of the daemon where a group with processes may not have children (version 2, delegated by
#: systemd).
DAEMON = "daemon"
REMOVE_TIMEOUT = 10.0
MOVE_TIMEOUT = 10.0


class Tree:
    """Our root in each hierarchy and the groups below it. The caller locks."""

    def __init__(self, places: Sequence[Place], root_name: str) -> None:
        self.places = list(places)
        self.root_name = root_name
        #: Controller -> its hierarchy: the first one that has it.
        self.where = {
            controller: place for place in reversed(self.places) for controller in place.controllers
        }
        #: Preferably version 2's: its frozen processes can be killed.
        self.freezer = self.where.get("freezer")
        if (
            newer := next((place for place in self.places if place.kind == "v2"), None)
        ) is not None:
            self.where.setdefault("cpuacct", newer)  # it counts CPU time in every group
            if "freezer" in newer.controllers:
                self.freezer = newer

    def prepare(self) -> None:
        """Create our part of each hierarchy, keeping existing groups. Raises CgroupError."""
        try:
            for place in self.places:
                files, root = FILES[place.kind], self.root(place)
                if place.kind == "v2":
                    if place.base != place.mount and place.controllers:
                        empty_base(place.base)
                    files.delegate(place.base, place.controllers)
                make(place, root)
                files.delegate(root, place.controllers)
                if "cpu" in place.controllers or "cpuset" in place.controllers:
                    make(place, root / BESTEFFORT)
                    files.delegate(root / BESTEFFORT, place.controllers)
        except OSError as error:
            raise CgroupError(
                f"cgroups: cannot create the group {self.root_name} ({error}); run as root, "
                "or let systemd "
                "delegate a group (Delegate=yes)"
            ) from error

    def root(self, place: Place) -> Path:
        return place.base / self.root_name

    def parents(self, place: Place) -> tuple[Path, ...]:
        root = self.root(place)
        return (root, root / BESTEFFORT) if "cpu" in place.controllers else (root,)

    def slivers(self, place: Place) -> Iterator[tuple[str, Path]]:
        """Yield the name and the group of each sliver in a hierarchy."""
        root = self.root(place)
        for parent in (root, root / BESTEFFORT):
            with contextlib.suppress(OSError):
                for entry in list(os.scandir(parent)):
                    if entry.name.endswith(SUFFIX) and entry.is_dir(follow_symlinks=False):
                        yield entry.name.removesuffix(SUFFIX), Path(entry.path)

    def existing(self, place: Place, name: str) -> list[Path]:
        """Return the groups of a sliver; more than one only during or after an interrupted move."""
        directory = check_name(name) + SUFFIX
        return [
            parent / directory for parent in self.parents(place) if (parent / directory).is_dir()
        ]

    def groups(self, name: str) -> Iterator[tuple[Place, Path]]:
        """Yield the existing groups of a sliver in all hierarchies."""
        for place in self.places:
            for group in self.existing(place, name):
                yield place, group

    def wanted(self, place: Place, name: str, guarantee: int) -> Path:
        return self.parents(place)[0 if guarantee > 0 else -1] / (check_name(name) + SUFFIX)


def empty_base(base: Path) -> None:
    """Move the processes of the group to a leaf: a group with processes cannot delegate."""
    leaf = base / DAEMON
    leaf.mkdir(exist_ok=True)
    enter(leaf, map(int, read(base / "cgroup.procs").split()))


def make(place: Place, group: Path) -> None:
    group.mkdir(exist_ok=True)
    FILES[place.kind].made(group)


def move(place: Place, old: Path, new: Path) -> None:
    """Move all processes to another group and remove the old one."""
    files = FILES[place.kind]
    if files.frozen(old):
        files.freeze(new, True)
    deadline = time.monotonic() + MOVE_TIMEOUT
    # Processes that fork meanwhile leave children behind: repeat until there are none.
    while pids := processes(old):
        enter(new, pids)
        if time.monotonic() > deadline:
            raise CgroupError(f"{old}: processes start faster than they can be moved", retry=True)
    remove(old, deadline)


def remove(group: Path, deadline: float) -> None:
    """Remove the group and all groups below it. Raises CgroupError."""
    for each in list(walk(group)):
        while each.is_dir():
            try:
                each.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                # Busy for a moment after the last process, until that is torn down.
                left = deadline - time.monotonic()
                if error.errno != errno.EBUSY or left <= 0 or processes(each):
                    raise CgroupError(
                        f"cgroup {each} cannot be removed: {error.strerror}", retry=True
                    ) from error
                time.sleep(0.001)

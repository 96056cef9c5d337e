"""CPU, memory and process limits of slivers in the host's cgroups (NM-B.4, NM-C.3).

Groups that are created in every hierarchy with a controller we need::

    nodepool-nm/                     weight: the guarantees, plus as much as one other group of the
                                     host for best effort
        <name>.sliver/               slivers with a guarantee: weight ~ guarantee
        besteffort/                  weight ~ its share of the CPU that is not guaranteed to others
            <name>.sliver/           weight ~ nm_cpu_share, times 8 for those that use little
                                     (:mod:`cpu_pace`)
    nodepool-nm-daemon/              the daemon and its helper (controller ``cpu``): calls work
                                     while slivers are busy

Best effort must not outrank the host's own services; see :mod:`cgroup_weights`. A guarantee never
reduces what a sliver gets: a sliver whose nm_cpu_share entitles it to more gets the larger weight.

Hierarchies without the controller ``cpu`` do not use weights: all slivers are directly below our
root there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodepool.nodemanager.kernel.syscalls import SHORTAGE, write
from nodepool.nodemanager.limits.cgroups import kill as cgroup_kill
from nodepool.nodemanager.limits.cgroups import tree as cgroup_tree
from nodepool.nodemanager.limits.cgroups import weights as cgroup_weights
from nodepool.nodemanager.limits.cgroups.detect import (
    CONTROLLERS,
    FILES,
    detect_places,
    keep_moves_quick,
    problems,
)
from nodepool.nodemanager.limits.cgroups.files import (
    CgroupError,
    Place,
    counted,
    parse_list,
    processes,
    read,
)
from nodepool.nodemanager.limits.cgroups.tree import BESTEFFORT, REMOVE_TIMEOUT, ROOT_NAME, Tree
from nodepool.nodemanager.limits.cgroups.weights import HOST_RESERVE, CpuShares
from nodepool.nodemanager.limits.cores import Cores, topology
from nodepool.nodemanager.outcomes import Problem
from nodepool.nodemanager.records.rspec import DEFAULT_RSPEC, check_name

__all__ = ["CgroupError", "Cgroups"]


class Cgroups:
    """The cgroups of all slivers. All methods may be called from any thread.

    :param io_devices: returns "major:minor" of the devices for a sliver's I/O limits.
    """

    def __init__(
        self,
        places: Sequence[Place],
        root_name: str = ROOT_NAME,
        processors: int | None = None,
        io_devices: Callable[[str], Sequence[str]] = lambda name: (),
    ) -> None:
        self._lock = threading.RLock()
        self.tree = Tree(places, root_name)
        self.cpu = CpuShares(self.tree, self._lock, processors)
        self._cores: Cores | None = None
        self._prepared = False
        #: Keeps moves quick while it is open.
        self._quick = -1
        self._io_devices = io_devices
        self.controllers: dict[str, str | None] = {
            name: place.kind if (place := self.tree.where.get(name)) is not None else None
            for name in CONTROLLERS
        }

    @classmethod
    def detect(
        cls,
        root_name: str = ROOT_NAME,
        io_devices: Callable[[str], Sequence[str]] = lambda name: (),
    ) -> Cgroups:
        """Return where each controller can be used on this host, in either generation."""
        return cls(detect_places(), root_name, io_devices=io_devices)

    def problems(self) -> list[Problem]:
        return problems(self.controllers)

    def prepare(self, host_reserve: int = HOST_RESERVE) -> None:
        """Create our part of each hierarchy, keeping existing groups. Raises CgroupError."""
        with self._lock:
            self.cpu.reserve = host_reserve
            self.tree.prepare()
            if self._quick < 0:
                self._quick = keep_moves_quick()
            self.cpu.load()
            self._load_cores()
            self._prepared = True
            self.cpu.balance()

    def _load_cores(self) -> None:
        """Load the cores of existing slivers."""
        if (place := self.tree.where.get("cpuset")) is not None:
            files, root = FILES[place.kind], self.tree.root(place)
            everything = parse_list(files.get_cpus(root))
            shared = parse_list(files.get_cpus(root / BESTEFFORT)) or everything
            mems = root / ("cpuset.mems" if place.kind == "v1" else "cpuset.mems.effective")
            self._cores = Cores(
                everything, *topology(everything), parse_list(read(mems) if mems.exists() else "")
            )
            for name, group in self.tree.slivers(place):
                has = parse_list(files.get_cpus(group))
                if has != shared and has - shared:
                    self._cores.restore(name, has - shared, shared <= has)

    # --- one sliver
    # ----------------------------------------------------------------------------------------------

    def create(self, name: str, rspec: Mapping[str, Any]) -> list[str]:
        """Create the groups with all limits, one per hierarchy, keeping existing ones.

        :raises CgroupError: a limit cannot be set.
        """
        check_name(name)
        with self._lock:
            # Others may have removed our tree while it was empty: service managers do so.
            if not self._prepared or not all(
                parent.is_dir() for place in self.tree.places for parent in self.tree.parents(place)
            ):
                self.prepare(self.cpu.reserve)
            self._apply(name, rspec)
            return [str(group) for _, group in self.tree.groups(name)]

    def apply(self, name: str, rspec: Mapping[str, Any]) -> None:
        """Apply other limits immediately, also to running processes.

        :raises CgroupError: no such sliver; more memory in use than the new limit; too few cores.
        """
        with self._lock:
            if not any(self.tree.groups(name)):
                raise CgroupError(f"sliver {name} has no cgroup")
            self._apply(name, rspec)

    def _apply(self, name: str, rspec: Mapping[str, Any]) -> None:
        given = {**DEFAULT_RSPEC, **rspec}
        guarantee = int(given["nm_cpu_guaranteed_share"])
        wanted_cores, both = _cores_of(given)
        if self._cores is not None:
            before = self._cores.of(name)
            self._cores.reserve(name, wanted_cores, both)
        elif wanted_cores:
            raise CgroupError("nm_cpu_cores: this host has no cgroup controller cpuset")
        try:
            # Memory is the only limit that may be refused: it is set first, so that a refusal
            # changes nothing.
            for place in sorted(
                self.tree.places, key=lambda each: "memory" not in each.controllers
            ):
                group = self.tree.wanted(place, name, guarantee)
                existing = self.tree.existing(place, name)
                cgroup_tree.make(place, group)
                self._limit(place, group, name, given)
                for old in existing:
                    if old != group:
                        cgroup_tree.move(place, old, group)
        except (OSError, CgroupError) as error:
            if self._cores is not None:
                self._cores.put_back(name, before)
            if isinstance(error, CgroupError):
                raise
            raise CgroupError(
                f"limits of sliver {name}: {error}", retry=error.errno in SHORTAGE
            ) from error
        finally:
            self._write_cores()
        self.cpu.put(name, guarantee, int(given["nm_cpu_share"]))

    def _limit(self, place: Place, group: Path, name: str, given: Mapping[str, Any]) -> None:
        files, controllers = FILES[place.kind], place.controllers
        guarantee = int(given["nm_cpu_guaranteed_share"])
        if "memory" in controllers:
            files.memory(group, int(given["nm_mem_limit"]), int(given["nm_mem_guaranteed"]))
        if "cpu" in controllers:
            files.cpu_weight(
                group,
                guarantee * 10
                if guarantee > 0
                else self.cpu.weight(name, int(given["nm_cpu_share"])),
            )
            files.cpu_limit(group, int(given["nm_cpu_limit"]), self.cpu.processors)
        if "pids" in controllers:
            files.pids(group, int(given["nm_pids_max"]))
        if "io" in controllers:
            files.io(
                group,
                self._io_devices(name),
                int(given["nm_io_read_bps"]),
                int(given["nm_io_write_bps"]),
            )

    def rebalance(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the weights for these effective RSpecs; after a start only weights were known."""
        with self._lock:
            self.cpu.rebalance(specs)

    def start(self) -> None:
        """Start favoring slivers that use little CPU."""
        self.cpu.start()

    def _write_cores(self) -> None:
        """Write reserved cores, and the rest for all others; slivers that lose cores first."""
        place = self.tree.where.get("cpuset")
        if place is None or self._cores is None:
            return
        files, root = FILES[place.kind], self.tree.root(place)
        for name, group in self.tree.slivers(place):
            with contextlib.suppress(FileNotFoundError):
                files.cpus(group, *self._cores.placement(name))
        with contextlib.suppress(FileNotFoundError):
            # Slivers with cores may be below it: it has the shared cores only while it has none of
            # theirs.
            own = {
                core
                for name, group in self.tree.slivers(place)
                if group.parent != root
                for core in self._cores.placement(name)[0]
            }
            files.cpus(root / BESTEFFORT, self._cores.placement(None)[0] | own, self._cores.nodes)

    # --- processes
    # ----------------------------------------------------------------------------------------------

    def procs_files(self, name: str) -> list[str]:
        """Return files to which a new process writes "0" to join; last: controller cpu."""
        return [
            str(path / "cgroup.procs")
            for place in sorted(self.tree.places, key=lambda place: "cpu" in place.controllers)
            for path in self.tree.existing(place, name)[:1]
        ]

    def freeze(self, name: str, frozen: bool) -> None:
        """Freeze or thaw all processes and wait until that is done. Raises CgroupError."""
        place = self.tree.freezer
        if place is None:
            raise CgroupError("this host has no cgroup freezer")
        with self._lock:
            groups = self.tree.existing(place, name)
            if not groups:
                raise CgroupError(f"sliver {name} has no cgroup")
        try:
            for group in groups:
                FILES[place.kind].freeze(group, frozen)
        except OSError as error:
            raise CgroupError(f"sliver {name} cannot be frozen: {error.strerror}") from error

    def kill(self, name: str, deadline: float = 10.0) -> None:
        """Kill all processes and wait until they have ended, for at most `deadline` seconds.

        :raises CgroupError: some processes still exist.
        """
        cgroup_kill.kill(
            lambda: list(self.tree.groups(name)), lambda: self._thaw(name), name, deadline
        )

    def _thaw(self, name: str) -> None:
        """Thaw the processes that version 1's freezer holds: they cannot die while frozen."""
        for place, group in self.tree.groups(name):
            older = place is self.tree.where.get("freezer") and place.kind == "v1"
            if older and FILES[place.kind].frozen(group):
                write(group / "freezer.state", "THAWED")

    def empty(self, name: str) -> bool:
        return not any(processes(group) for _, group in self.tree.groups(name))

    # --- the end, and numbers
    # ----------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Remove the groups of a sliver without processes; none is fine.

        :raises CgroupError: processes still exist.
        """
        deadline = time.monotonic() + REMOVE_TIMEOUT
        with self._lock:
            for _, group in self.tree.groups(name):
                cgroup_tree.remove(group, deadline)
            if self._cores is not None and self._cores.release(name):
                self._write_cores()
            self.cpu.remove(name)

    def shelter(self, pids: Iterable[int]) -> None:
        """Move the daemon's processes to a separate group; see :func:`cgroup_weights.shelter`."""
        if (place := self.tree.where.get("cpu")) is not None:
            cgroup_weights.shelter(place, self.tree.root(place), pids)

    def stop(self) -> None:
        """Stop measuring, and remove our groups if there are no slivers."""
        self.cpu.stop()
        if self._quick >= 0:
            os.close(self._quick)
            self._quick = -1
        if (place := self.tree.where.get("cpu")) is not None:
            cgroup_weights.unshelter(place, self.tree.root(place))
        if not self.found():
            with contextlib.suppress(CgroupError):
                self.destroy_tree()

    def destroy_tree(self) -> None:
        """Remove our whole tree, when no sliver is left. Raises CgroupError."""
        with self._lock:
            for place in self.tree.places:
                if self.tree.root(place).is_dir():
                    cgroup_tree.remove(self.tree.root(place), time.monotonic() + REMOVE_TIMEOUT)
            self._prepared = False

    def found(self) -> list[str]:
        return sorted({name for place in self.tree.places for name, _ in self.tree.slivers(place)})

    def usage(self, name: str) -> dict[str, int]:
        """Return what the groups of a sliver have counted; what is not known is absent.

        cpu_usec, throttled_usec, memory_bytes, memory_peak, pids, pids_peak, oom_kills, and
        cpu_stalled_usec, memory_stalled_usec and io_stalled_usec (pressure, version 2).
        """
        found: dict[str, int] = {}
        for place in self.tree.places:
            counters, controllers = FILES[place.kind].COUNTERS, {"", *place.controllers}
            if counters.keys() & controllers:
                for group in self.tree.existing(place, name)[:1]:
                    found = {**counted(group, counters, controllers), **found}
        return found


def _cores_of(given: Mapping[str, Any]) -> tuple[int, bool]:
    """Return count and sibling use from ``"2b"``, or from a number and nm_cpu_cores_both."""
    value = given["nm_cpu_cores"]
    if isinstance(value, str):
        return int(value.removesuffix("b") or 0), value.endswith("b")
    return int(value), bool(given.get("nm_cpu_cores_both"))

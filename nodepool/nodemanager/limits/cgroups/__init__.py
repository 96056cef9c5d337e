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
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodepool.nodemanager.kernel.syscalls import SHORTAGE, write
from nodepool.nodemanager.limits.cgroups import kill as cgroup_kill
from nodepool.nodemanager.limits.cgroups import v1 as cgroup_v1
from nodepool.nodemanager.limits.cgroups import v2 as cgroup_v2
from nodepool.nodemanager.limits.cgroups import weights as cgroup_weights
from nodepool.nodemanager.limits.cgroups.detect import (
    CONTROLLERS,
    detect_places,
    keep_moves_quick,
    problems,
)
from nodepool.nodemanager.limits.cgroups.files import (
    CgroupError,
    Place,
    parse_list,
    processes,
    read,
    walk,
)
from nodepool.nodemanager.limits.cgroups.pace import FAVOUR, CpuPace
from nodepool.nodemanager.limits.cgroups.weights import BESTEFFORT, DAEMON, REST, ROOT_NAME, SUFFIX
from nodepool.nodemanager.limits.cores import Cores, topology
from nodepool.nodemanager.outcomes import Problem
from nodepool.nodemanager.records.rspec import DEFAULT_RSPEC, check_name

__all__ = ["CgroupError", "Cgroups"]

REMOVE_TIMEOUT = 10.0
MOVE_TIMEOUT = 10.0
HOST_RESERVE = 50

_FILES = {"v1": cgroup_v1, "v2": cgroup_v2}


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
        self._places = list(places)
        self._root_name = root_name
        self._processors = processors or os.cpu_count() or 1
        self._lock = threading.RLock()
        self._guarantees: dict[str, int] = {}
        #: nm_cpu_share of each sliver.
        self._shares: dict[str, int] = {}
        #: Relative weights of slivers with a guarantee, and of all others together.
        self._weights: dict[str, int] = {}
        #: Slivers that use much CPU now.
        self._heavy: set[str] = set()
        self._active: set[str] | None = None
        self._pace: CpuPace | None = None
        self._cores: Cores | None = None
        self._prepared = False
        #: Keeps moves quick while it is open.
        self._quick = -1
        self._reserve = HOST_RESERVE
        self._io_devices = io_devices
        self._where: dict[str, Place] = {}
        for place in self._places:
            for controller in place.controllers:
                self._where.setdefault(controller, place)
        self.controllers: dict[str, str | None] = {
            name: self._where[name].kind if name in self._where else None for name in CONTROLLERS
        }
        if self.controllers["cpuacct"] is None and any(
            place.kind == "v2" for place in self._places
        ):
            self.controllers["cpuacct"] = "v2"

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

    # --- our tree
    # ----------------------------------------------------------------------------------------------

    def prepare(self, host_reserve: int = HOST_RESERVE) -> None:
        """Create our part of each hierarchy, keeping existing groups. Raises CgroupError."""
        with self._lock:
            self._reserve = host_reserve
            try:
                for place in self._places:
                    self._prepare(place)
            except OSError as error:
                raise CgroupError(
                    f"cgroups: cannot create the group {self._root_name} ({error}); run as root, "
                    "or let systemd "
                    "delegate a group (Delegate=yes)"
                ) from error
            if self._quick < 0:
                self._quick = keep_moves_quick()
            self._load()
            self._prepared = True
            self._balance()

    def _prepare(self, place: Place) -> None:
        files = _FILES[place.kind]
        root = self._root(place)
        if place.kind == "v2":
            if place.base != place.mount and place.controllers:
                self._empty_base(place.base)
            files.delegate(place.base, place.controllers)
        self._mkdir(place, root)
        files.delegate(root, place.controllers)
        if "cpu" in place.controllers or "cpuset" in place.controllers:
            self._mkdir(place, root / BESTEFFORT)
            files.delegate(root / BESTEFFORT, place.controllers)

    @staticmethod
    def _empty_base(base: Path) -> None:
        leaf = base / DAEMON
        leaf.mkdir(exist_ok=True)
        for pid in read(base / "cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                write(leaf / "cgroup.procs", pid)

    def _root(self, place: Place) -> Path:
        return place.base / self._root_name

    @staticmethod
    def _mkdir(place: Place, group: Path) -> None:
        group.mkdir(exist_ok=True)
        _FILES[place.kind].made(group)

    def _load(self) -> None:
        """Load the guarantees, shares and cores of existing slivers."""
        self._guarantees.clear()
        self._shares.clear()
        place = self._where.get("cpu")
        if place is not None:
            for name, group in self._groups(place):
                weight = _FILES[place.kind].get_cpu_weight(group) or 0
                if group.parent == self._root(place):
                    self._guarantees[name] = weight // 10
                    self._shares[name] = DEFAULT_RSPEC["nm_cpu_share"]
                else:
                    self._shares[name] = max(1, weight // FAVOUR)
        if (place := self._where.get("cpuset")) is not None:
            files, root = _FILES[place.kind], self._root(place)
            everything = parse_list(files.get_cpus(root))
            shared = parse_list(files.get_cpus(root / BESTEFFORT)) or everything
            mems = root / ("cpuset.mems" if place.kind == "v1" else "cpuset.mems.effective")
            self._cores = Cores(
                everything, *topology(everything), parse_list(read(mems) if mems.exists() else "")
            )
            for name, group in self._groups(place):
                has = parse_list(files.get_cpus(group))
                if has != shared and has - shared:
                    self._cores.restore(name, has - shared, shared <= has)

    def _groups(self, place: Place) -> Iterator[tuple[str, Path]]:
        root = self._root(place)
        for parent in (root, root / BESTEFFORT):
            with contextlib.suppress(OSError):
                for entry in list(os.scandir(parent)):
                    if entry.name.endswith(SUFFIX) and entry.is_dir(follow_symlinks=False):
                        yield entry.name.removesuffix(SUFFIX), Path(entry.path)

    # --- one sliver
    # ----------------------------------------------------------------------------------------------

    def _parents(self, place: Place) -> tuple[Path, ...]:
        root = self._root(place)
        return (root, root / BESTEFFORT) if "cpu" in place.controllers else (root,)

    def _existing(self, place: Place, name: str) -> list[Path]:
        """Return the groups of a sliver; more than one only during or after an interrupted move."""
        directory = check_name(name) + SUFFIX
        return [
            parent / directory for parent in self._parents(place) if (parent / directory).is_dir()
        ]

    def _wanted(self, place: Place, name: str, guarantee: int) -> Path:
        return self._parents(place)[0 if guarantee > 0 else -1] / (check_name(name) + SUFFIX)

    def create(self, name: str, rspec: Mapping[str, Any]) -> list[str]:
        """Create the groups with all limits, one per hierarchy, keeping existing ones.

        :raises CgroupError: a limit cannot be set.
        """
        check_name(name)
        with self._lock:
            # Others may have removed our tree while it was empty: service managers do so.
            if not self._prepared or not all(
                parent.is_dir() for place in self._places for parent in self._parents(place)
            ):
                self.prepare(self._reserve)
            self._apply(name, rspec)
            return [str(path) for place in self._places for path in self._existing(place, name)]

    def apply(self, name: str, rspec: Mapping[str, Any]) -> None:
        """Apply other limits immediately, also to running processes.

        :raises CgroupError: no such sliver; more memory in use than the new limit; too few cores.
        """
        with self._lock:
            if not any(self._existing(place, name) for place in self._places):
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
            for place in sorted(self._places, key=lambda each: "memory" not in each.controllers):
                group = self._wanted(place, name, guarantee)
                existing = self._existing(place, name)
                self._mkdir(place, group)
                self._limit(place, group, name, given)
                for old in existing:
                    if old != group:
                        self._move(place, old, group)
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
        if guarantee > 0:
            self._guarantees[name] = guarantee
        else:
            self._guarantees.pop(name, None)
        self._shares[name] = int(given["nm_cpu_share"])
        self._balance()

    def _limit(self, place: Place, group: Path, name: str, given: Mapping[str, Any]) -> None:
        files, controllers = _FILES[place.kind], place.controllers
        guarantee = int(given["nm_cpu_guaranteed_share"])
        if "memory" in controllers:
            files.memory(group, int(given["nm_mem_limit"]), int(given["nm_mem_guaranteed"]))
        if "cpu" in controllers:
            files.cpu_weight(
                group,
                guarantee * 10 if guarantee > 0 else self._weight(name, int(given["nm_cpu_share"])),
            )
            files.cpu_limit(group, int(given["nm_cpu_limit"]), self._processors)
        if "pids" in controllers:
            files.pids(group, int(given["nm_pids_max"]))
        if "io" in controllers:
            files.io(
                group,
                self._io_devices(name),
                int(given["nm_io_read_bps"]),
                int(given["nm_io_write_bps"]),
            )

    def _move(self, place: Place, old: Path, new: Path) -> None:
        """Move all processes to another group and remove the old one."""
        files = _FILES[place.kind]
        if files.frozen(old):
            files.freeze(new, True)
        deadline = time.monotonic() + MOVE_TIMEOUT
        # Processes that fork meanwhile leave children behind: repeat until there are none.
        while pids := processes(old):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    write(new / "cgroup.procs", pid)
            if time.monotonic() > deadline:
                raise CgroupError(
                    f"{old}: processes start faster than they can be moved", retry=True
                )
        self._rmdir(place, old, deadline)

    def rebalance(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the weights for these effective RSpecs; after a start only weights were known."""
        with self._lock:
            self._shares = {
                name: int(spec.get("nm_cpu_share", DEFAULT_RSPEC["nm_cpu_share"]))
                for name, spec in specs.items()
            }
            self._guarantees = {
                name: int(spec["nm_cpu_guaranteed_share"])
                for name, spec in specs.items()
                if int(spec.get("nm_cpu_guaranteed_share", 0)) > 0
            }
            self._balance()
            self._write_weights(self._shares.keys() - self._guarantees.keys())

    def _weight(self, name: str, share: int) -> int:
        return share * (1 if name in self._heavy else FAVOUR)

    def _write_weights(self, names: Iterable[str]) -> None:
        """Write the weights of slivers without a guarantee."""
        if (place := self._where.get("cpu")) is not None:
            for name in names:
                for group in self._existing(place, name):
                    with contextlib.suppress(FileNotFoundError):
                        _FILES[place.kind].cpu_weight(group, self._weight(name, self._shares[name]))

    def start(self) -> None:
        """Start favoring slivers that use little CPU."""
        if "cpu" in self._where and self.controllers["cpuacct"] is not None:
            self._pace = CpuPace(
                self._processors, self._cpu_times, self._competitors, self._favour_others
            )
            self._pace.start()

    def _competitors(self) -> list[dict[str, int]]:
        """Return the weights of slivers that compete with each other."""
        with self._lock:
            besteffort = {
                name: share for name, share in self._shares.items() if name not in self._guarantees
            }
            return [besteffort, self._weights] if self._guarantees else [besteffort]

    def _cpu_times(self) -> dict[str, int]:
        place = self._where.get("cpuacct") or next(
            place for place in self._places if place.kind == "v2"
        )
        found = {}
        with self._lock:
            names, guaranteed = list(self._shares), set(self._guarantees)
        for name in names:
            for group in self._existing(place, name)[:1]:
                if (spent := _FILES[place.kind].cpu_usec(group)) is not None:
                    found[name] = spent
        found[REST] = sum(spent for name, spent in found.items() if name not in guaranteed)
        return found

    def _favour_others(self, heavy: set[str], active: set[str] | None) -> None:
        with self._lock:
            changed = heavy ^ self._heavy
            others = active != self._active and bool(self._guarantees)
            self._heavy, self._active = heavy, active
            self._write_weights(changed & self._shares.keys() - self._guarantees.keys())
            if changed & self._weights.keys() or others:
                self._balance()

    def _balance(self) -> None:
        if (place := self._where.get("cpu")) is not None:
            self._weights = cgroup_weights.balance(
                place,
                self._root(place),
                self._guarantees,
                self._shares,
                self._reserve,
                self._heavy,
                self._active,
            )

    def _write_cores(self) -> None:
        """Write reserved cores, and the rest for all others; slivers that lose cores first."""
        place = self._where.get("cpuset")
        if place is None or self._cores is None:
            return
        files, root = _FILES[place.kind], self._root(place)
        for name, group in self._groups(place):
            with contextlib.suppress(FileNotFoundError):
                files.cpus(group, *self._cores.placement(name))
        with contextlib.suppress(FileNotFoundError):
            if "cpu" not in place.controllers:
                files.cpus(root / BESTEFFORT, *self._cores.placement(None))
            else:
                # Slivers with cores may be below it: it has the shared cores only while it has none
                # of theirs.
                own = {
                    core
                    for name, group in self._groups(place)
                    if group.parent != root
                    for core in self._cores.placement(name)[0]
                }
                files.cpus(
                    root / BESTEFFORT, self._cores.placement(None)[0] | own, self._cores.nodes
                )

    # --- processes
    # ----------------------------------------------------------------------------------------------

    def procs_files(self, name: str) -> list[str]:
        """Return files to which a new process writes "0" to join; last: controller cpu."""
        places = sorted(self._places, key=lambda place: "cpu" in place.controllers)
        return [
            str(path / "cgroup.procs")
            for place in places
            for path in self._existing(place, name)[:1]
        ]

    def _freezer(self) -> Place | None:
        """Return the freezer, preferably version 2's: its frozen processes can be killed."""
        newer = next((place for place in self._places if place.kind == "v2"), None)
        return (
            newer
            if newer is not None and "freezer" in newer.controllers
            else self._where.get("freezer")
        )

    def freeze(self, name: str, frozen: bool) -> None:
        """Freeze or thaw all processes and wait until that is done. Raises CgroupError."""
        place = self._freezer()
        if place is None:
            raise CgroupError("this host has no cgroup freezer")
        with self._lock:
            groups = self._existing(place, name)
            if not groups:
                raise CgroupError(f"sliver {name} has no cgroup")
        try:
            for group in groups:
                _FILES[place.kind].freeze(group, frozen)
        except OSError as error:
            raise CgroupError(f"sliver {name} cannot be frozen: {error.strerror}") from error

    def kill(self, name: str, deadline: float = 10.0) -> None:
        """Kill all processes and wait until they have ended, for at most `deadline` seconds.

        :raises CgroupError: some processes still exist.
        """
        cgroup_kill.kill(
            lambda: [
                (place, group) for place in self._places for group in self._existing(place, name)
            ],
            lambda: self._thaw(name),
            name,
            deadline,
        )

    def _thaw(self, name: str) -> None:
        """Thaw the processes that version 1's freezer holds: they cannot die while frozen."""
        place = self._where.get("freezer")
        if place is not None and place.kind == "v1":
            for group in self._existing(place, name):
                if cgroup_v1.frozen(group):
                    write(group / "freezer.state", "THAWED")

    def empty(self, name: str) -> bool:
        return not any(
            processes(group) for place in self._places for group in self._existing(place, name)
        )

    # --- the end, and numbers
    # ----------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Remove the groups of a sliver without processes; none is fine.

        :raises CgroupError: processes still exist.
        """
        deadline = time.monotonic() + REMOVE_TIMEOUT
        with self._lock:
            for place in self._places:
                for group in self._existing(place, name):
                    self._rmdir(place, group, deadline)
            self._guarantees.pop(name, None)
            self._shares.pop(name, None)
            if self._cores is not None and self._cores.release(name):
                self._write_cores()
            self._balance()

    @staticmethod
    def _rmdir(place: Place, group: Path, deadline: float) -> None:
        for each in list(walk(group)):
            while True:
                try:
                    each.rmdir()
                    break
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

    def shelter(self, pids: Iterable[int]) -> None:
        """Move the daemon's processes to a separate group; see :func:`cgroup_weights.shelter`."""
        if (place := self._where.get("cpu")) is not None:
            cgroup_weights.shelter(place, self._root(place), pids)

    def stop(self) -> None:
        """Stop measuring, and remove our groups if there are no slivers."""
        if self._pace is not None:
            self._pace.stop()
            with self._lock:  # nothing measures anymore whether guarantees are used
                self._heavy = self._heavy - self._weights.keys()
                self._balance()
        if self._quick >= 0:
            os.close(self._quick)
            self._quick = -1
        if (place := self._where.get("cpu")) is not None:
            cgroup_weights.unshelter(place, self._root(place))
        if not self.found():
            with contextlib.suppress(CgroupError):
                self.destroy_tree()

    def destroy_tree(self) -> None:
        """Remove our whole tree, when no sliver is left. Raises CgroupError."""
        with self._lock:
            for place in self._places:
                if self._root(place).is_dir():
                    self._rmdir(place, self._root(place), time.monotonic() + REMOVE_TIMEOUT)
            self._prepared = False

    def found(self) -> list[str]:
        return sorted({name for place in self._places for name, _ in self._groups(place)})

    def usage(self, name: str) -> dict[str, int]:
        """Return cpu_usec, memory_bytes, memory_peak, pids, oom_kills; unknown ones are absent."""
        found: dict[str, int] = {}
        for place in self._places:
            for group in self._existing(place, name)[:1]:
                found = {**_FILES[place.kind].usage(group), **found}
        return {**found, "oom_kills": self.oom_kills(name)}

    def oom_kills(self, name: str) -> int:
        place = self._where.get("memory")
        if place is None:
            return 0
        return sum(
            _FILES[place.kind].oom_kills(group) or 0 for group in self._existing(place, name)
        )


def _cores_of(given: Mapping[str, Any]) -> tuple[int, bool]:
    """Return count and sibling use from ``"2b"``, or from a number and nm_cpu_cores_both."""
    value = given["nm_cpu_cores"]
    if isinstance(value, str):
        return int(value.removesuffix("b") or 0), value.endswith("b")
    return int(value), bool(given.get("nm_cpu_cores_both"))

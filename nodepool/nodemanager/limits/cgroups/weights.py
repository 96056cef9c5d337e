"""CPU weights of guaranteed and best effort slivers, the host's services and the daemon.

Weights are in units of version 2, where 100 is the default.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import RLock
from typing import Any

from nodepool.nodemanager.limits.cgroups.detect import FILES, own_group
from nodepool.nodemanager.limits.cgroups.files import Place, enter, processes
from nodepool.nodemanager.limits.cgroups.pace import FAVOUR, CpuPace
from nodepool.nodemanager.limits.cgroups.tree import BESTEFFORT, DAEMON, ROOT_NAME, SUFFIX, Tree
from nodepool.nodemanager.records.rspec import DEFAULT_RSPEC

HOST_RESERVE = 50
#: Stands for all slivers without a guarantee together; no sliver has this name.
REST = ""
#: Minimum weight of slivers without a guarantee in per mille, so that they make progress.
LEAST_BESTEFFORT = 10
#: Weight of the group of the daemon and its helper, which need little CPU.
DAEMON_WEIGHT = 1000
REMOVE_TIMEOUT = 2.0


def division(guaranteed: int, reserve: int, others: int = 100) -> tuple[int, int]:
    """Return the minimum shares of the host's services and best effort, in per mille.

    :param others: weight of the host's other groups; best effort weighs as much as one of them,
        100.
    """
    rest = max(0, 1000 - guaranteed)
    host = max(reserve, 10, rest * others // (others + 100))
    return host, max(LEAST_BESTEFFORT, rest - host)


class CpuShares:
    """The shares and guarantees of slivers, and the weights that follow from them.

    :param lock: held by callers of all methods except :meth:`start` and :meth:`stop`.
    """

    def __init__(self, tree: Tree, lock: RLock, processors: int | None) -> None:
        self._tree = tree
        self._lock = lock
        self._place = tree.where.get("cpu")
        self.processors = processors or os.cpu_count() or 1
        #: Of the host's services, in per mille.
        self.reserve = HOST_RESERVE
        self.guarantees: dict[str, int] = {}
        #: nm_cpu_share of each sliver.
        self._shares: dict[str, int] = {}
        #: Relative weights of slivers with a guarantee, and of all others together.
        self._weights: dict[str, int] = {}
        #: Slivers that use much CPU now, and :data:`REST`; see :mod:`cpu_pace`.
        self._heavy: set[str] = set()
        #: Slivers that use CPU now; None: not known, all count.
        self._active: set[str] | None = None
        self._pace: CpuPace | None = None

    def load(self) -> None:
        """Load the guarantees and shares of existing slivers."""
        self.guarantees, self._shares = {}, {}
        if self._place is not None:
            for name, group in self._tree.slivers(self._place):
                weight = FILES[self._place.kind].get_cpu_weight(group) or 0
                if group.parent == self._tree.root(self._place):
                    self.guarantees[name] = weight // 10
                    self._shares[name] = DEFAULT_RSPEC["nm_cpu_share"]
                else:
                    self._shares[name] = max(1, weight // FAVOUR)

    def put(self, name: str, guarantee: int, share: int) -> None:
        self.guarantees.pop(name, None)
        if guarantee > 0:
            self.guarantees[name] = guarantee
        self._shares[name] = share
        self.balance()

    def remove(self, name: str) -> None:
        self.guarantees.pop(name, None)
        self._shares.pop(name, None)
        self.balance()

    def rebalance(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the weights for these effective RSpecs; after a start only weights were known."""
        self._shares = {
            name: int(spec.get("nm_cpu_share", DEFAULT_RSPEC["nm_cpu_share"]))
            for name, spec in specs.items()
        }
        self.guarantees = {
            name: int(spec["nm_cpu_guaranteed_share"])
            for name, spec in specs.items()
            if int(spec.get("nm_cpu_guaranteed_share", 0)) > 0
        }
        self.balance()
        self._write_weights(self._shares.keys() - self.guarantees.keys())

    def weight(self, name: str, share: int) -> int:
        """Return the weight of a sliver without a guarantee."""
        return share * (1 if name in self._heavy else FAVOUR)

    def _write_weights(self, names: Iterable[str]) -> None:
        """Write the weights of slivers without a guarantee."""
        if self._place is not None:
            for name in names:
                for group in self._tree.existing(self._place, name):
                    with contextlib.suppress(FileNotFoundError):
                        FILES[self._place.kind].cpu_weight(
                            group, self.weight(name, self._shares[name])
                        )

    def balance(self) -> None:
        """Write the weights of our root, of best effort, and of the slivers with a guarantee.

        CPU that active slivers do not use goes to the other slivers in best effort, so that a
        sliver with a small guarantee, which is not among them, would get less than they do.
        """
        if self._place is None:
            return
        files, root = FILES[self._place.kind], self._tree.root(self._place)
        others = _weight_of_others(self._place, root)
        host, besteffort = division(sum(self.guarantees.values()), self.reserve, others)
        left = besteffort * 10
        counted = {
            name: share
            for name, share in self._shares.items()
            if self._active is None or name in self._active
        }
        competing = any(name not in self.guarantees for name in self._shares)
        weights: dict[str, int] = {}
        for name, guarantee in self.guarantees.items():
            weight = guarantee * 10
            if competing:  # with best effort: a sliver whose share entitles it to more gets that
                everybody = sum((counted if name in counted else self._shares).values())
                more = max(0, besteffort * 10 * self._shares.get(name, 0) // everybody - weight)
                weight += more
                if name in counted:
                    left -= more
            weights[name] = weight
        weights[REST] = max(LEAST_BESTEFFORT * 10, left)
        for name, weight in weights.items():
            group = root / (BESTEFFORT if name == REST else name + SUFFIX)
            with contextlib.suppress(FileNotFoundError):
                files.cpu_weight(group, weight // FAVOUR if name in self._heavy else weight)
        with contextlib.suppress(FileNotFoundError):
            files.cpu_weight(root, others * (1000 - host) // host)
        self._weights = weights

    def start(self) -> None:
        """Start favoring slivers that use little CPU."""
        if self._tree.where.keys() >= {"cpu", "cpuacct"}:
            self._pace = CpuPace(
                self.processors, self._cpu_times, self._competitors, self._favour_others
            )
            self._pace.start()

    def stop(self) -> None:
        if self._pace is not None:
            self._pace.stop()
            with self._lock:  # nothing measures anymore whether guarantees are used
                self._heavy = self._heavy - self._weights.keys()
                self.balance()

    def _competitors(self) -> list[dict[str, int]]:
        """Return the weights of slivers that compete with each other."""
        with self._lock:
            besteffort = {
                name: share for name, share in self._shares.items() if name not in self.guarantees
            }
            return [besteffort, self._weights] if self.guarantees else [besteffort]

    def _cpu_times(self) -> dict[str, int]:
        place, found = self._tree.where["cpuacct"], {}
        with self._lock:
            names, guaranteed = list(self._shares), set(self.guarantees)
        for name in names:
            for group in self._tree.existing(place, name)[:1]:
                if (spent := FILES[place.kind].cpu_usec(group)) is not None:
                    found[name] = spent
        found[REST] = sum(spent for name, spent in found.items() if name not in guaranteed)
        return found

    def _favour_others(self, heavy: set[str], active: set[str] | None) -> None:
        with self._lock:
            changed = heavy ^ self._heavy
            others = active != self._active and bool(self.guarantees)
            self._heavy, self._active = heavy, active
            self._write_weights(changed & self._shares.keys() - self.guarantees.keys())
            if changed & self._weights.keys() or others:
                self.balance()


def _weight_of_others(place: Place, root: Path) -> int:
    """Return the weight of the host's other groups; processes in no group count as one."""
    weights = []
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(place.base)):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(
                (ROOT_NAME, root.name, DAEMON)
            ):
                with contextlib.suppress(OSError):
                    weights.append(FILES[place.kind].get_cpu_weight(Path(entry.path)) or 100)
    return min(1000, max(100, sum(weights)))


def shelter(place: Place, root: Path, pids: Iterable[int]) -> None:
    """Create a group for the daemon's processes: it must run when slivers are fully busy.

    Processes that are in a group already, as of a service manager, stay there.
    """
    group = _shelter(root)
    own = own_group(place.mount, place.controllers if place.kind == "v1" else ())
    if own == place.base / DAEMON:
        group = own
    elif own not in (place.base, group):
        return
    try:
        group.mkdir(exist_ok=True)
        FILES[place.kind].made(group)
        FILES[place.kind].cpu_weight(group, DAEMON_WEIGHT)
        enter(group, pids)
    except OSError:  # comfort only
        unshelter(place, root)


def unshelter(place: Place, root: Path) -> None:
    """Move the daemon's processes back and remove the group."""
    group = _shelter(root)
    deadline = time.monotonic() + REMOVE_TIMEOUT
    while group.is_dir() and time.monotonic() <= deadline:
        with contextlib.suppress(OSError):
            enter(place.base, processes(group))
            group.rmdir()
        time.sleep(0.001)  # busy until the last that left is torn down


def _shelter(root: Path) -> Path:
    return root.with_name(f"{root.name}-daemon")

"""Dedicated whole cores for slivers (NM-B.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nodepool.nodemanager.limits.cgroups.files import CgroupError, parse_list

CPUS = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")


def topology(processors: Iterable[int]) -> tuple[dict[int, set[int]], dict[int, int]]:
    """Return siblings and memory node of each CPU."""
    siblings, nodes = {}, {}
    for number in processors:
        try:
            siblings[number] = parse_list(
                (CPUS / f"cpu{number}/topology/thread_siblings_list").read_text().strip()
            )
        except (OSError, ValueError):
            siblings[number] = {number}
    for node in NODES.glob("node[0-9]*"):
        try:
            nodes.update(
                dict.fromkeys(
                    parse_list((node / "cpulist").read_text().strip()),
                    int(node.name.removeprefix("node")),
                )
            )
        except (OSError, ValueError):
            continue
    return siblings, {number: nodes.get(number, 0) for number in processors}


class Cores:
    """The CPUs that each sliver has reserved. Does no I/O; the caller locks.

    :param usable: memory nodes that may be used; empty: all.
    """

    def __init__(
        self,
        processors: Iterable[int],
        siblings: Mapping[int, set[int]],
        nodes: Mapping[int, int],
        usable: Iterable[int] = (),
    ) -> None:
        self._all = frozenset(processors)
        self._siblings = siblings
        self._node = nodes
        self.nodes = set(usable) or set(nodes.values()) or {0}
        self._reserved: dict[str, tuple[frozenset[int], bool]] = {}

    def reserved(self) -> set[int]:
        return {core for cores, _ in self._reserved.values() for core in cores}

    def of(self, name: str) -> tuple[frozenset[int], bool] | None:
        return self._reserved.get(name)

    def put_back(self, name: str, before: tuple[frozenset[int], bool] | None) -> None:
        if before is None:
            self._reserved.pop(name, None)
        else:
            self._reserved[name] = before

    def restore(self, name: str, cores: Iterable[int], both: bool) -> None:
        self._reserved[name] = (frozenset(cores) & self._all, both)

    def release(self, name: str) -> bool:
        return self._reserved.pop(name, None) is not None

    def reserve(self, name: str, count: int, both: bool) -> None:
        """Assign `count` cores to a sliver: the ones it has, then their siblings, then others.

        :raises CgroupError: fewer are free; one must stay for everything else.
        """
        mine, _ = self._reserved.get(name, (frozenset(), False))
        free = set(self._all) - self.reserved()
        if count - len(mine) > len(free) - 1:
            raise CgroupError(
                f"nm_cpu_cores: {count} cores requested, {max(0, len(free) - 1) + len(mine)} "
                "available "
                "(one stays for everything else)"
            )
        kept = set(sorted(mine)[:count])
        while len(kept) < count:
            kept.add(self._next(kept, free - kept))
        if kept:
            self._reserved[name] = (frozenset(kept), both)
        else:
            self._reserved.pop(name, None)

    def _next(self, kept: set[int], free: set[int]) -> int:
        """Return a sibling of a kept core, or one of the core with most free siblings."""
        nodes = {self._node.get(core, 0) for core in kept}

        def rank(core: int) -> tuple[bool, bool, int, int]:
            siblings = self._siblings.get(core, {core})
            # Prefer high numbers: whatever is bound to the first CPU stays with everything else.
            return (
                not siblings & kept,
                bool(nodes) and self._node.get(core, 0) not in nodes,
                -len(siblings & free),
                -core,
            )

        return min(free, key=rank)

    def placement(self, name: str | None) -> tuple[set[int], set[int]]:
        """Return CPUs and memory nodes of a sliver; None: the shared ones."""
        shared = set(self._all) - self.reserved()
        own, both = (
            self._reserved.get(name, (frozenset(), True))
            if name is not None
            else (frozenset[int](), True)
        )
        cpus = set(own) | (shared if both else set())
        nodes = {self._node.get(core, 0) for core in cpus} if own and not both else set(self.nodes)
        return cpus, nodes & self.nodes or set(self.nodes)

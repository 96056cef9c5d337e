"""Shared code of both cgroup versions: small files, hierarchies, CPU lists."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nodepool.nodemanager.kernel.descriptors import held
from nodepool.nodemanager.kernel.syscalls import write
from nodepool.nodemanager.outcomes import BackendError

MIB = 1 << 20


class CgroupError(BackendError):
    """A limit cannot be set or a group cannot be created; the text contains the reason."""


@dataclass(frozen=True)
class Place:
    """A mounted hierarchy and the controllers in it that we use."""

    kind: str
    """"v1" or "v2"."""
    mount: Path
    controllers: frozenset[str]
    base: Path
    """Parent of our groups: the root of the hierarchy or the group delegated to the daemon."""


def read(path: Path) -> str:
    return path.read_text().strip()


def number(path: Path) -> int | None:
    """Return the number in the file; None: no file, or not a number such as ``max``."""
    try:
        return int(read(path))
    except (OSError, ValueError):
        return None


def field(path: Path, key: str) -> int | None:
    """Return the number of a line ``key number``."""
    with contextlib.suppress(OSError, ValueError):
        for line in read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return None


#: Controller -> file, start of its line, name of the counter, and how many units of the kernel are
#: one of ours.
Counters = Mapping[str, tuple[tuple[str, str, str, int], ...]]


def counted(group: Path, counters: Counters, controllers: Container[str]) -> dict[str, int]:
    """Return the counters of a group, as far as the kernel has them."""
    found: dict[str, int] = {}
    for controller, entries in counters.items():
        for file, start, name, unit in entries if controller in controllers else ():
            with contextlib.suppress(OSError, ValueError, StopIteration):
                # Not by pathlib, which takes longer than the kernel.
                with held(os.open(f"{group}/{file}", os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
                    lines = os.read(descriptor, 1 << 14).decode().splitlines()
                line = next(line for line in lines if line.startswith(start))
                found[name] = int(line.replace("=", " ").rpartition(" ")[2]) // unit
    return found


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,7``."""
    found: set[int] = set()
    for part in text.replace("\n", "").split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def format_list(numbers: Iterable[int]) -> str:
    return ",".join(str(item) for item in sorted(numbers))


def walk(directory: Path) -> Iterator[Path]:
    """Yield the group and all groups below it, deepest first."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            if entry.is_dir(follow_symlinks=False):
                yield from walk(Path(entry.path))
    yield directory


def processes(directory: Path) -> list[int]:
    """Return the process ids in the group and below, except 0 (of a hidden namespace)."""
    found = []
    for group in walk(directory):
        with contextlib.suppress(OSError):
            found += [int(line) for line in read(group / "cgroup.procs").split() if line != "0"]
    return found


def enter(group: Path, pids: Iterable[int]) -> None:
    """Move processes into the group, except those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            write(group / "cgroup.procs", pid)


def quota(per_mille: int, processors: int) -> tuple[int, int]:
    """Return quota and period (microseconds) for a cap in per mille of the host, min. 1 ms."""
    period = 100_000
    while per_mille * processors * period // 1000 < 2000 and period < 1_000_000:
        period = min(period * 2, 1_000_000)
    return max(1000, per_mille * processors * period // 1000), period

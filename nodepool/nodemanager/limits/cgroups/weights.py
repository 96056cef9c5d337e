"""CPU weights of guaranteed and best effort slivers, the host's services and the daemon.

Weights are in units of version 2, where 100 is the default.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from nodepool.nodemanager.kernel.syscalls import write
from nodepool.nodemanager.limits.cgroups import v1 as cgroup_v1
from nodepool.nodemanager.limits.cgroups import v2 as cgroup_v2
from nodepool.nodemanager.limits.cgroups.detect import own_group
from nodepool.nodemanager.limits.cgroups.files import Place, processes
from nodepool.nodemanager.limits.cgroups.pace import FAVOUR

ROOT_NAME = "nodepool-nm"
BESTEFFORT = "besteffort"
#: Stands for all slivers without a guarantee together; no sliver has this name.
REST = ""
#: Sliver names have no dot, so that no sliver conflicts with a kernel file or another group.
SUFFIX = ".sliver"
#: Group of the daemon where a group with processes may not have children (version 2, delegated by
#: systemd).
DAEMON = "daemon"
#: Minimum weight of slivers without a guarantee in per mille, so that they make progress.
LEAST_BESTEFFORT = 10
#: Weight of the group of the daemon and its helper, which need little CPU.
DAEMON_WEIGHT = 1000
REMOVE_TIMEOUT = 2.0

_FILES = {"v1": cgroup_v1, "v2": cgroup_v2}


def division(guaranteed: int, reserve: int, beside: int = 100) -> tuple[int, int]:
    """Return the minimum shares of the host's services and best effort, in per mille.

    :param beside: weight of the host's other groups; best effort weighs as much as one of them,
        100.
    """
    rest = max(0, 1000 - guaranteed)
    host = max(reserve, 10, rest * beside // (beside + 100))
    return host, max(LEAST_BESTEFFORT, rest - host)


def balance(
    place: Place,
    root: Path,
    guarantees: Mapping[str, int],
    shares: Mapping[str, int],
    reserve: int,
    heavy: Collection[str] = (),
    active: Collection[str] | None = None,
) -> dict[str, int]:
    """Write the weights of our root, of best effort, and of the slivers with a guarantee.

    :param heavy: slivers that are not favored, and :data:`REST`; see :mod:`cpu_pace`.
    :param active: slivers that use CPU now; None: not known, all count. Unused CPU goes to the
        other slivers in best effort, so that a sliver with a small guarantee, which is not among
        them, would get less than they do.
    :return: the weight of each when all are treated alike.
    """
    files = _FILES[place.kind]
    beside = _beside(place, root)
    host, besteffort = division(sum(guarantees.values()), reserve, beside)
    left = besteffort * 10
    counted = {name: share for name, share in shares.items() if active is None or name in active}
    competing = any(name not in guarantees for name in shares)
    weights: dict[str, int] = {}
    for name, guarantee in guarantees.items():
        weight = guarantee * 10
        if competing:  # with best effort: a sliver whose share entitles it to more gets that
            everybody = sum((counted if name in counted else shares).values())
            more = max(0, besteffort * 10 * shares.get(name, 0) // everybody - weight)
            weight += more
            if name in counted:
                left -= more
        weights[name] = weight
    weights[REST] = max(LEAST_BESTEFFORT * 10, left)
    for name, weight in weights.items():
        group = root / (BESTEFFORT if name == REST else name + SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            files.cpu_weight(group, weight // FAVOUR if name in heavy else weight)
    with contextlib.suppress(FileNotFoundError):
        files.cpu_weight(root, beside * (1000 - host) // host)
    return weights


def _beside(place: Place, root: Path) -> int:
    """Return the weight of the host's other groups; processes in no group count as one."""
    weights = []
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(place.base)):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(
                (ROOT_NAME, root.name, DAEMON)
            ):
                with contextlib.suppress(OSError):
                    weights.append(_FILES[place.kind].get_cpu_weight(Path(entry.path)) or 100)
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
        _FILES[place.kind].made(group)
        _FILES[place.kind].cpu_weight(group, DAEMON_WEIGHT)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                write(group / "cgroup.procs", pid)
    except OSError:  # comfort only
        unshelter(place, root)


def unshelter(place: Place, root: Path) -> None:
    """Move the daemon's processes back and remove the group."""
    group = _shelter(root)
    deadline = time.monotonic() + REMOVE_TIMEOUT
    while group.is_dir():
        with contextlib.suppress(OSError):
            for pid in processes(group):
                with contextlib.suppress(ProcessLookupError):
                    write(place.base / "cgroup.procs", pid)
            group.rmdir()
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)  # busy until the last that left is torn down


def _shelter(root: Path) -> Path:
    return root.with_name(f"{root.name}-daemon")

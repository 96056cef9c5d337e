"""Slivers with systemd inside, by systemd-nspawn under systemd of the host (NM-C.2).

The results of `check` and the command lines are tested everywhere. Slivers themselves need a host
whose process 1 is systemd and cgroup v2: tests/integration/nodemanager/backends/test_nspawn.py
creates them in a virtual machine (tools/vm).

Root trees, disk quota and networks are those of backend `native`. The cgroup belongs to systemd:
limits are properties of the sliver's unit. Programs inside are started through the namespaces of
its process 1 and moved into its unit's cgroup.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nodepool.base.boot import boot_id
from nodepool.nodemanager.backends.base import BackendError, Handle, Problem, Services, SliverSpec
from nodepool.nodemanager.backends.mounted import MountedTreeBackend
from nodepool.nodemanager.backends.processes import Processes, alive
from nodepool.nodemanager.client.privileges import PRIVILEGES
from nodepool.nodemanager.kernel import commands, syscalls
from nodepool.nodemanager.limits.cgroups import v2 as cgroup_v2
from nodepool.nodemanager.limits.cgroups.files import counted
from nodepool.nodemanager.rootfs.templates import RootTree

COMMAND_TIMEOUT = 30.0
START_TIMEOUT = 90.0
CGROUP = Path("/sys/fs/cgroup")
#: Units that wait for a network: the first start of many images enables them, and a sliver gets its
#: network only when it has started.
NETWORK_WAITS = ("systemd-networkd-wait-online.service", "NetworkManager-wait-online.service")


def properties(rspec: Mapping[str, Any], cores: int) -> list[str]:
    """Return the limits of a systemd unit (NM-C.3), from per mille of the whole host."""
    weight = int(rspec.get("nm_cpu_guaranteed_share", 0)) or int(rspec.get("nm_cpu_share", 32))
    limit = int(rspec.get("nm_cpu_limit", 0))
    memory = int(rspec.get("nm_mem_limit", 0))
    return [
        f"CPUWeight={max(1, min(10000, weight))}",
        f"TasksMax={int(rspec.get('nm_pids_max', 1024))}",
        f"CPUQuota={max(1, limit * cores // 10)}%" if limit else "CPUQuota=",
        f"MemoryMax={memory}M" if memory else "MemoryMax=infinity",
        f"MemorySwapMax={0 if memory else 'infinity'}",
        f"MemoryMin={int(rspec.get('nm_mem_guaranteed', 0))}M",
    ]


def run_argv(
    machine: str, spec: SliverSpec, root: str, base: int, count: int, cores: int
) -> list[str]:
    """Return the command that starts a sliver as its own unit, which outlives the daemon."""
    argv = [
        "systemd-run",
        "--quiet",
        f"--unit={machine}",
        "--collect",
        "--property=Type=notify",
        "--property=Delegate=yes",
        "--property=KillMode=mixed",
        "--property=TimeoutStopSec=5",
        f"--property=TimeoutStartSec={START_TIMEOUT:g}",
        # Its lock files would be next to the trees of slivers.
        "--setenv=SYSTEMD_NSPAWN_LOCK=0",
        *(f"--property={text}" for text in properties(spec.rspec, cores)),
        "--",
        "systemd-nspawn",
        "--quiet",
        "--keep-unit",
        "--register=yes",
        f"--machine={machine}",
        f"--hostname={spec.hostname or spec.name}",
        f"--directory={root}",
        f"--private-users={base}:{count}",
        "--private-users-ownership=off",
        "--private-network",
        "--boot",
        "--notify-ready=yes",
        "--link-journal=no",
        "--resolv-conf=off",
        "--timezone=off",
        "--console=passive",
    ]
    if spec.api_socket:
        target = (
            "/run/nodepool" if os.path.isdir(spec.api_socket) else "/run/nodepool/nodemanager.api"
        )
        argv.append(f"--bind-ro={spec.api_socket}:{target}")
    # The image's own /etc/hostname would override --hostname.
    name = f"systemd.hostname={spec.hostname or spec.name}"
    return [*argv, name, *(f"systemd.mask={unit}" for unit in NETWORK_WAITS)]


def limits_argv(machine: str, rspec: Mapping[str, Any], cores: int) -> list[str]:
    """Return the command that changes limits immediately."""
    return [
        "systemctl",
        "set-property",
        "--runtime",
        f"{machine}.service",
        *properties(rspec, cores),
    ]


def run_command(argv: list[str], timeout: float = COMMAND_TIMEOUT) -> str:
    return commands.run(argv, timeout, argv[0], retry=True)


class Units(Processes):
    """Processes in the units of slivers, which systemd starts and limits."""

    def __init__(
        self, label: str, services: Services, members: Callable[[str, int], list[int]]
    ) -> None:
        super().__init__(services, members)
        self._label = label

    def machine(self, name: str) -> str:
        # Machine names have no "_"; the hash distinguishes a_b from a-b, and limits the length to
        # 64.
        short = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"nm-{self._label[:6]}-{name.replace('_', '-')[:30].rstrip('-')}-{short}"

    def cgroup(self, name: str) -> Path:
        return CGROUP / "system.slice" / f"{self.machine(name)}.service"

    def procs(self, name: str) -> list[str]:
        """Return the leaf that holds processes: cgroups that pass on controllers have none."""
        files = [
            self.cgroup(name) / leaf / "cgroup.procs" for leaf in ("payload/init.scope", "payload")
        ]
        return [str(path) for path in files if path.exists()][:1]

    def end(self, name: str, *words: str) -> None:
        """End a unit; one that has ended may be unloaded at any moment."""
        if self.cgroup(name).exists():
            try:
                run_command(["systemctl", *words, f"{self.machine(name)}.service"])
            except BackendError as error:
                if "not loaded" not in str(error) and self.cgroup(name).exists():
                    raise

    def empty(self, name: str, index: int) -> bool:
        return not self.cgroup(name).exists() and super().empty(name, index)

    def kill(self, name: str, index: int, handle: Handle | None) -> None:
        self.end(name, "kill", "--kill-whom=all", "--signal=SIGKILL")
        self.end(name, "stop")
        self.kill_members(name, index)


class NspawnBackend(MountedTreeBackend):
    counts_to_the_end = False
    """Slivers with systemd; requires root and systemd on the host."""

    name = "nspawn"
    privileges = frozenset(PRIVILEGES)

    def __init__(self, state_dir: str | os.PathLike[str], services: Services) -> None:
        # systemd owns the cgroups of its units: ours would conflict.
        super().__init__(state_dir, replace(services, cgroups=None))
        self.processes: Units = Units(self.label, self.services, self.processes.members)
        self._cores = os.cpu_count() or 1

    def check(self) -> list[Problem]:
        problems = [problem for problem in super().check() if problem.feature != "cgroups"]
        if not os.path.isdir("/run/systemd/system"):
            problems.append(
                Problem(
                    "systemd", True, "process 1 of this host is not systemd; use the backend native"
                )
            )
        problems += [
            Problem(program, True, "install systemd-container, or use the backend native")
            for program in ("systemd-nspawn", "systemd-run", "machinectl")
            if shutil.which(program) is None
        ]
        if not (CGROUP / "cgroup.controllers").exists():
            problems.append(
                Problem(
                    "cgroup v2",
                    True,
                    "boot with systemd.unified_cgroup_hierarchy=1, or use the backend native",
                )
            )
        return problems

    @property
    def freezes(self) -> bool:
        return True

    def _tree(self, spec: SliverSpec) -> RootTree:
        if spec.image == "host":
            raise BackendError(
                "image host: backend nspawn has none of this; use tar:, dir: or an uploaded image "
                "with systemd"
            )
        return super()._tree(spec)

    def _run(self, spec: SliverSpec, handle: Handle, layers: Mapping[str, list[str]]) -> Handle:
        self.folders.ensure_disk(spec)
        machine = self.processes.machine(spec.name)
        private, public = self.folders.host_key(spec.name)
        run_command(
            run_argv(
                machine,
                spec,
                str(self._mount(spec, layers)),
                self.base(spec.index),
                self.ids,
                self._cores,
            ),
            START_TIMEOUT + 10,
        )
        shown = run_command(["machinectl", "show", "--property=Leader", "--value", machine]).strip()
        started = syscalls.start_time(int(shown)) if shown.isdigit() else None
        if started is None:
            raise BackendError(
                f"machine {machine} ended immediately; check that {spec.image} contains systemd"
            )
        handle = {
            **handle,
            "pid": int(shown),
            "start_time": started,
            "boot_id": boot_id(),
            "host_key": public,
            "machine": machine,
        }
        return self._furnish(spec, handle, private, public)

    def configure(self, spec: SliverSpec, handle: Handle) -> Handle:
        handle = super().configure(spec, handle)
        if alive(handle):
            run_command(limits_argv(self.processes.machine(spec.name), spec.rspec, self._cores))
        return handle

    def freeze(self, spec: SliverSpec, handle: Handle, frozen: bool) -> None:
        run_command(
            [
                "systemctl",
                "freeze" if frozen else "thaw",
                f"{self.processes.machine(spec.name)}.service",
            ]
        )

    def _forget(self, name: str) -> None:
        if shutil.which("systemctl") is not None:
            self.processes.end(name, "stop")

    def usage(self, name: str, handle: Handle) -> dict[str, int]:
        counters = cgroup_v2.COUNTERS
        used = counted(self.processes.cgroup(name), counters, counters)
        return {**super().usage(name, handle), **used}

"""Slivers of an ordinary user: one id, /usr read-only, limits by rlimit (NM-C.2)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nodepool.nodemanager.backends.base import (
    BackendError,
    Handle,
    Problem,
    Services,
    SliverSpec,
    missing_ssh_server,
)
from nodepool.nodemanager.backends.native import NativeBackend
from nodepool.nodemanager.backends.processes import ContainerProcesses
from nodepool.nodemanager.helper.operations import ALL_NAMESPACES
from nodepool.nodemanager.kernel import removal
from nodepool.nodemanager.setup.rootless import MARK

_RLIMITS = (
    ("nm_pids_max", "NPROC", 1),
    ("nm_mem_limit", "DATA", 1 << 20),
    ("nm_disk_quota", "FSIZE", 1024),
)
"""Resource, limit, factor; of each process, but for the number of processes."""


class RootlessBackend(NativeBackend):
    """Slivers without root and cgroups, for laptops and for evaluation."""

    name = "rootless"
    default_username = "zuul"
    # From outside, processes inside run as the daemon's own user, who may do everything. With
    # api.tcp they use port 812 inside.
    shares_socket = False
    operation = "make_rootless"
    ids = 1
    privileges = frozenset()

    def __init__(self, state_dir: str | os.PathLike[str], services: Services) -> None:
        super().__init__(state_dir, services)
        self.processes = ContainerProcesses(services, self._marked)

    def check(self) -> list[Problem]:
        problems = [
            Problem(
                "limits",
                False,
                "rlimits only (processes, memory of each process, size of a file); run as root for "
                "more",
            ),
            Problem(
                "root inside", False, "one user without sudo, /usr read-only; run as root for more"
            ),
            *missing_ssh_server(),
        ]
        self.folders.prepare()
        directory = Path(tempfile.mkdtemp(prefix="probe-", dir=self.state_dir))
        try:
            trial = RootlessBackend(directory, self.services)
            try:
                trial.create(SliverSpec("probe", 1, "host", {}, username="zuul"))
            finally:
                trial.destroy("probe", 1, None)
        except BackendError as error:
            problems.insert(0, Problem("user namespaces", True, str(error)))
        finally:
            with contextlib.suppress(OSError):
                removal.remove_tree(directory)
        return problems

    def base(self, index: int) -> int:
        return os.getuid()

    def create(self, spec: SliverSpec) -> Handle:
        if spec.username == "root":
            raise BackendError(
                "slivers of an ordinary user have no root inside: set a username in the label or "
                "image"
            )
        if spec.network != "none":
            raise BackendError(
                f"network {spec.network!r}: slivers of an ordinary user have only network none"
            )
        return super().create(spec)

    def _mark(self, name: str) -> str:
        return f"{self.state_dir.resolve()}/{name}"

    @staticmethod
    def _limits(rspec: Mapping[str, Any]) -> dict[str, int]:
        return {
            "CORE": 0,
            **{
                name: int(rspec[resource]) * unit
                for resource, name, unit in _RLIMITS
                if int(rspec.get(resource, 0)) > 0
            },
        }

    def _furnishing(self, spec: SliverSpec) -> dict[str, Any]:
        return {
            **super()._furnishing(spec),
            "api": None,
            "mark": self._mark(spec.name),
            "limits": self._limits(spec.rspec),
            "owner": 1000,
        }

    def _identity(self, handle: Handle) -> dict[str, Any]:
        return {
            **super()._identity(handle),
            "rootless": True,
            "namespaces": ALL_NAMESPACES,
            "limits": handle.get("limits", {}),
        }

    def _run(self, spec: SliverSpec, handle: Handle, layers: Mapping[str, list[str]]) -> Handle:
        return super()._run(spec, {**handle, "limits": self._limits(spec.rspec)}, layers)

    def configure(self, spec: SliverSpec, handle: Handle) -> Handle:
        return super().configure(spec, {**handle, "limits": self._limits(spec.rspec)})

    def _marked(self, name: str, _index: int) -> list[int]:
        """Return process 1 of the sliver by its environment; several only after crashes."""
        wanted = f"{MARK}={self._mark(name)}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                        found.append(int(entry))
        return found

    def remove(self, name: str) -> None:
        # The work directory of an overlay has mode 0; its owner may change that.
        with contextlib.suppress(FileNotFoundError):
            for path in self.folders.writable(name).glob("*-work/work"):
                path.chmod(0o700)
        super().remove(name)

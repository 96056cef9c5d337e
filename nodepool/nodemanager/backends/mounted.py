"""Backends in which another program creates the container, from a mounted root tree."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from nodepool.nodemanager.backends.base import Handle, Services, SliverSpec
from nodepool.nodemanager.backends.native import MAKE_TIMEOUT, NativeBackend, own_files, resolv_conf
from nodepool.nodemanager.backends.processes import ContainerProcesses
from nodepool.nodemanager.kernel import syscalls


class MountedTreeBackend(NativeBackend):
    """Trees, disks, networks, files and programs inside are those of backend `native`."""

    def __init__(self, state_dir: str | os.PathLike[str], services: Services) -> None:
        super().__init__(state_dir, services)
        self.processes = ContainerProcesses(services, self.processes.members)
        #: Of this node manager's containers: several may share a host.
        self.label = hashlib.sha256(os.path.realpath(state_dir).encode()).hexdigest()[:10]
        #: Here, because the sliver's root, which sets up the container, has no access to our
        #: directories.
        self.trees = Path(f"/run/nodepool-nm-{self.label}")

    def _mount(self, spec: SliverSpec, layers: Mapping[str, list[str]]) -> Path:
        target = self.trees / spec.name
        with self.folders.lock:
            self.trees.mkdir(mode=0o711, exist_ok=True)
            target.mkdir(mode=0o700, exist_ok=True)
        if not os.path.ismount(target):
            self.services.zygote.call(
                "mount_tree",
                {
                    "base": self.base(spec.index),
                    "count": self.ids,
                    "writable": str(self.folders.writable(spec.name)),
                    "stage": str(self.folders.stage),
                    "layers": dict(layers),
                    "target": str(target),
                },
                timeout=MAKE_TIMEOUT,
            )
        return target

    def _furnish(self, spec: SliverSpec, handle: Handle, private: bytes, public: str) -> Handle:
        """Write files, network and init script of a new container; end it after a failure."""
        try:
            self._confine(spec, handle)
            request = self._furnishing(spec)
            names = resolv_conf(spec, self.services)
            request["files"] += own_files(private, public, names)
            self.services.zygote.call(
                "furnish",
                {
                    **self._identity(handle),
                    "hostname": spec.hostname or spec.name,
                    "directories": [
                        "/run/sshd"
                    ],  # missing in systemd's own /run until its unit has run
                    **request,
                },
                timeout=MAKE_TIMEOUT,
            )
            handle = {**handle, "resolv_conf": names}
            self._begin_work(spec, handle)
        except BaseException:
            self.processes.kill(spec.name, spec.index, handle)
            raise
        return handle

    def _confine(self, spec: SliverSpec, handle: Handle) -> None:
        """Confine process 1, in backends that create it outside its cgroup."""

    def _forget(self, name: str) -> None:
        """Remove what the container's program still has of it. Raises BackendError."""

    def remove(self, name: str) -> None:
        if self.services.net is not None:
            self.services.net.destroy(name)
        self._forget(name)
        tree = self.trees / name
        if os.path.ismount(tree):
            syscalls.umount(str(tree))
        with self.folders.lock:
            with contextlib.suppress(FileNotFoundError):
                tree.rmdir()
            with contextlib.suppress(OSError):
                self.trees.rmdir()  # the last one
        super().remove(name)

    def found(self) -> list[str]:
        names = set(super().found())
        with contextlib.suppress(FileNotFoundError):
            names.update(os.listdir(self.trees))
        return sorted(names)

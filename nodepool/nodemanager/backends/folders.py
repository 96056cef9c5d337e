"""The folder of each sliver on the host, with its disk, its number and its host key."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from nodepool.base.files import replace_file
from nodepool.nodemanager.backends.base import BackendError, Services, SliverSpec
from nodepool.nodemanager.kernel import syscalls
from nodepool.nodemanager.kernel.removal import remove_tree
from nodepool.nodemanager.limits import free_space
from nodepool.nodemanager.rootfs.ssh_files import new_host_key
from nodepool.nodemanager.rootfs.templates import check_sliver_name


class Folders:
    """Folders of slivers below the state directory; their disks are mounted in them."""

    def __init__(self, state_dir: Path, services: Services) -> None:
        self.slivers = state_dir / "slivers"
        self.stage = state_dir / "stage"
        self._disks = services.disks
        self.lock = threading.Lock()

    def prepare(self) -> None:
        for directory in (self.slivers.parent, self.slivers, self.stage):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def of(self, name: str) -> Path:
        """Return the folder of a sliver, which may not exist. Raises BackendError for bad names."""
        return self.slivers / check_sliver_name(name)

    def writable(self, name: str) -> Path:
        """Return the mount point of a sliver's disk.

        The console and the ballast are on the disk, for its quota, but outside the sliver's trees:
        nothing inside can reach them.
        """
        return self.of(name) / "mnt"

    def claim(self, name: str, index: int) -> None:
        """Record the owner of the ids; a sliver left by a crash may still run with them."""
        with self.lock:
            for other in self.slivers.iterdir():
                if other.name != name and self.number(other.name) == index:
                    raise BackendError(
                        f"number {index} is still in use by sliver {other.name}", retry=True
                    )
            replace_file(str(self.of(name) / "index"), f"{index}\n", sync=False)

    def number(self, name: str) -> int | None:
        try:
            return int((self.slivers / name / "index").read_text())
        except (OSError, ValueError):
            return None

    def host_key(self, name: str) -> tuple[bytes, str]:
        """Return the host key, which is also kept on the host: a new tree keeps its identity."""
        path = self.of(name) / "host_key"
        with contextlib.suppress(FileNotFoundError):
            private, _, public = path.read_bytes().partition(b"\n\n")
            if public:
                return private + b"\n", public.decode().strip()
        private, text = new_host_key()
        replace_file(str(path), private.rstrip(b"\n") + b"\n\n" + text.encode() + b"\n", sync=False)
        return private, text

    def ensure_disk(self, spec: SliverSpec) -> None:
        """Create and mount the disk of a sliver, or give it another size."""
        mnt = self.writable(spec.name)
        mnt.mkdir(mode=0o700, exist_ok=True)
        quota = int(spec.rspec.get("nm_disk_quota", 5_000_000))
        if self._disks is not None and not os.path.ismount(mnt):
            self._disks.create(spec.name, quota)
            self._disks.mount(spec.name, str(mnt))
        elif self._disks is not None and spec.ssh_keys is not None:  # else it is to start as it is
            self._disks.resize(spec.name, quota)
        free_space.give_up(mnt / "ballast")

    def remove(self, name: str) -> None:
        """Remove the disk and the folder of a sliver; none is fine. Raises BackendError."""
        directory = self.of(name)
        if self._disks is not None:
            try:
                self._disks.discard(name)
            except FileNotFoundError:
                pass
            except OSError:  # no space even for a rename
                self._disks.destroy(name)
        if directory.is_dir():
            if os.path.ismount(directory / "mnt"):
                syscalls.umount(str(directory / "mnt"))
            try:
                remove_tree(directory)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise BackendError(f"cannot remove {directory}: {error}", retry=True) from error

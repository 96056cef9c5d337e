"""A disk per sliver: a sparse ext4 image on a loop device (NM-C.3, nm_disk_quota).

Works on any file system of the host, also limits root inside the sliver, and is deleted with one
unlink.  Images are copies of a sparse template of the same size, see :mod:`disk_templates`.

The promised size is then allocated on the host's file system (fallocate) in the background: a few
ms for some GiB. No file system of a sliver therefore runs out of blocks below its quota, whatever
else fills the host.  The blocks stay allocated when files inside are deleted.  With overcommit,
images stay sparse.

A deleted disk is renamed immediately and unmounted in the background: unmounting needs a
dozen turns of threads of the kernel, which busy slivers delay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nodepool.nodemanager.kernel import commands, loopdev, syscalls
from nodepool.nodemanager.kernel.descriptors import held
from nodepool.nodemanager.kernel.removal import remove_tree
from nodepool.nodemanager.limits.disk_templates import BLOCK, KIB, DiskError, Templates
from nodepool.nodemanager.outcomes import Problem
from nodepool.nodemanager.records.rspec import DEFAULT_RSPEC, check_name

__all__ = ["DiskError", "Disks"]

log = logging.getLogger("nodepool.nodemanager.disks")

RESIZE_TIMEOUT = 300.0
#: Directory with the remains of slivers.
REMOVED = "removed"
SETTLE_TIMEOUT = 10.0
RELEASE_TIMEOUT = 5.0
DEFAULT_KIB = DEFAULT_RSPEC["nm_disk_quota"]

#: _IOW('f', 16, __u64)
_EXT4_IOC_RESIZE_FS = 0x40086610
_MS_NOATIME = 1024


class Disks:
    """The disks below one state directory: ``<state>/slivers/<name>/disk.img``.

    :param sparse: images use disk space only as they are filled.
    :param freed: called when the space of a deleted disk is free again.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        sparse: bool = False,
        freed: Callable[[], object] = lambda: None,
    ) -> None:
        self._sparse = sparse
        self._freed = freed
        self._backing = ThreadPoolExecutor(1, thread_name_prefix="Thread-nm-disk")
        # The path as in /proc/self/mountinfo.
        self._state = Path(os.path.realpath(state_dir))
        self._templates = Templates(self._state / "disks")
        #: Remains of deleted slivers that could not be removed.
        self._left: set[Path] = set()

    # --- the host
    # ----------------------------------------------------------------------------------------------

    def problems(self) -> list[Problem]:
        found = []
        if commands.find("mke2fs") is None:
            found.append(
                Problem(
                    "disk quota",
                    False,
                    "install e2fsprogs (mke2fs); without it slivers have no separate disks",
                )
            )
        if not os.path.exists("/dev/loop-control"):
            found.append(
                Problem(
                    "disk quota",
                    False,
                    "load the kernel module loop; without it slivers get no own disks",
                )
            )
        return found

    def prepare(self, free_space: bool = True) -> None:
        """Create copies of the usual template, and finish or clean up interrupted creations.

        :param free_space: there is enough disk space for copies.
        """
        # Start its thread now: slivers can then be removed even when the host has no threads left.
        self._later(lambda: None)
        for left in self._removed():
            self._later(self._remove, left)
        for path in self._entries("slivers"):
            self._back_soon(path.name)
        for leftover in (
            *self._state.glob("slivers/*/disk.img.new"),
            *self._state.glob("disks/*.new"),
        ):
            leftover.unlink(missing_ok=True)
        if free_space and not self.problems():
            self._later(self._templates.stock, DEFAULT_KIB)

    def stop(self) -> None:
        """Stop the background thread; the next start finishes what is left."""
        self.tidy()
        self._backing.shutdown(wait=self.settle(), cancel_futures=True)

    def settle(self, timeout: float = SETTLE_TIMEOUT) -> bool:
        """Wait for background work, for at most `timeout` seconds; return whether it is
        finished.
        """
        try:
            self._backing.submit(lambda: None).result(timeout)
        except TimeoutError:
            return False
        except RuntimeError:  # stopped
            pass
        return True

    def allocated(self) -> dict[str, int]:
        """Return sliver -> bytes that its image occupies on the host, including removals."""
        found = {}
        places = [(path.name, path) for path in self._entries("slivers")] + [
            (f"{path}", path) for path in self._removed()
        ]
        for name, path in places:
            with contextlib.suppress(OSError):
                found[name] = os.stat(path / "disk.img").st_blocks * 512
        return found

    def _entries(self, directory: str) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            return [Path(entry.path) for entry in os.scandir(self._state / directory)]
        return []

    def _removed(self) -> list[Path]:
        return self._entries(REMOVED)

    def _later(self, work: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # stopping: the next start does it
            self._backing.submit(work, *arguments)

    def _back_soon(self, name: str) -> None:
        if not self._sparse:
            self._later(self._back, name)

    def settle_in(self, name: str) -> None:
        """Finish the disk of a running sliver in the background."""
        self._later(self._tame, name)
        self._back_soon(name)
        self._later(self._templates.stock)

    def _tame(self, name: str) -> None:
        if (device := _device(self.image(name))) is not None:
            with contextlib.suppress(OSError), _loop(device) as loop:  # it may no longer exist
                loop.small_requests()

    def _back(self, name: str) -> None:
        """Allocate the missing blocks of the image."""
        try:
            descriptor = os.open(self.image(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError):
            return  # deleted meanwhile
        try:
            found = os.fstat(descriptor)
            if found.st_blocks * 512 < found.st_size:
                syscalls.fallocate(descriptor, 0, found.st_size)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return  # overcommit: promised space is only counted
            log.error(
                "Disk space of sliver %s cannot be allocated (%s): it may run full below its quota",
                name,
                error.strerror,
            )
        finally:
            os.close(descriptor)

    # --- one disk
    # ----------------------------------------------------------------------------------------------

    def image(self, name: str) -> Path:
        return self._state / "slivers" / check_name(name) / "disk.img"

    def create(self, name: str, kib: int) -> None:
        """Create the image of a sliver unless it exists. Size in KiB. Raises DiskError."""
        path = self.image(name)
        if path.exists():
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name("disk.img.new")
        try:
            kib -= kib % (BLOCK // KIB)
            for attempt in range(3):
                try:
                    self._templates.copy(kib, new)
                    break
                except FileNotFoundError:
                    # A template of another size has replaced it meanwhile.
                    if attempt == 2:
                        raise
                except OSError as error:
                    if attempt == 2 or error.errno != errno.ENOSPC:
                        raise
                    self.settle()  # deleted disks free their space
            new.replace(path)
        except OSError as error:
            raise DiskError(
                f"disk of sliver {name}: {error.strerror}", retry=error.errno in syscalls.SHORTAGE
            ) from error
        finally:
            new.unlink(missing_ok=True)
        _quota_file(path).unlink(missing_ok=True)

    def mount(self, name: str, target: str) -> None:
        """Mount the disk at an existing directory unless it is mounted there. Raises DiskError."""
        target = os.path.realpath(target)
        if any(place == target for place, _device, _root in _mounts()):
            return
        path = self.image(name)
        try:
            _await_release(name, path)
            grow = _formatted_size(path) < path.stat().st_size
            if grow and not _may_grow_mounted():
                _grow_unmounted(path)
                grow = False
            device = loopdev.attach(path)
            try:
                syscalls.mount(
                    device.path,
                    target,
                    "ext4",
                    syscalls.MS_NOSUID | syscalls.MS_NODEV | _MS_NOATIME,
                    "discard,noinit_itable" if self._sparse else "noinit_itable",
                )
                if grow:
                    _grow(target, path.stat().st_size)
                _apply_quota(path, target)
            except BaseException:
                if os.path.ismount(target):
                    syscalls.umount(target)
                raise
            finally:
                # From now on the mount holds the device, which is freed with it.
                device.close()
        except OSError as error:
            raise DiskError(
                f"disk of sliver {name}: cannot mount {path}: {error.strerror or error}", retry=True
            ) from error

    def resize(self, name: str, kib: int) -> None:
        """Set a new quota in KiB immediately; data in use is never cut off.

        :raises DiskError: more is in use already, or there is no such disk.
        """
        path = self.image(name)
        if not path.exists():
            raise DiskError(f"sliver {name} has no disk")
        if kib == _quota(path):
            return
        target = _target(path)
        used = self.usage(name)
        if used > kib * KIB:
            raise DiskError(
                f"nm_disk_quota: sliver {name} uses {used // KIB} KiB of its disk, more than "
                f"{kib}; free some first"
            )
        try:
            if kib * KIB > path.stat().st_size:
                if target is not None and not _may_grow_mounted():
                    raise DiskError(
                        f"disk of sliver {name}: this host does not let us grow a mounted disk "
                        "(CAP_SYS_RESOURCE is "
                        "missing); stop the sliver first"
                    )
                self._enlarge(path, kib * KIB // BLOCK * BLOCK)
                device = _device(path)
                if device is not None and target is not None:
                    with _loop(device) as loop:
                        loop.refresh()
                    _grow(target, path.stat().st_size)
            # ext4 cannot shrink while it is mounted: the space between quota and size is reserved
            # instead.
            quota = _quota_file(path)
            new = quota.with_suffix(".new")
            new.write_text(f"{kib}\n")
            new.replace(quota)
            if target is not None:
                _apply_quota(path, target)
        except OSError as error:
            raise DiskError(
                f"disk of sliver {name}: cannot resize to {kib} KiB: {error.strerror}", retry=True
            ) from error

    def _enlarge(self, path: Path, size: int) -> None:
        with held(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as descriptor:
            before = os.fstat(descriptor).st_size
            if not self._sparse:
                try:
                    syscalls.fallocate(descriptor, before, size - before, keep_size=True)
                except OSError as error:
                    if error.errno != errno.EOPNOTSUPP:
                        os.ftruncate(descriptor, before)  # what was taken of it
                        raise
            os.ftruncate(descriptor, size)

    def usage(self, name: str) -> int:
        """Return the bytes in use inside."""
        # Not by the list of all mounts: this is read at each end of a sliver.
        folder = self.image(name).parent
        target = next((each for each in folder.glob("*/") if os.path.ismount(each)), None)
        if target is None:
            with contextlib.suppress(FileNotFoundError):
                return _used_size(self.image(name))
            return 0
        numbers = os.statvfs(target)
        return (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize

    def destroy(self, name: str) -> None:
        """Unmount and unlink the disk if it exists. Raises DiskError."""
        path = self.image(name)
        try:
            for target in _below(path.parent):
                with contextlib.suppress(FileNotFoundError):
                    syscalls.umount(target)
            quota = _quota_file(path)
            for leftover in (
                path,
                path.with_name("disk.img.new"),
                quota,
                quota.with_suffix(".new"),
            ):
                leftover.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise DiskError(
                f"disk of sliver {name}: cannot remove it: {error.strerror}", retry=True
            ) from error

    def discard(self, name: str) -> None:
        """Rename the directory of a sliver with its disk now and remove it soon. Raises OSError."""
        directory = self.image(name).parent
        removed = self._state / REMOVED / f"{name}.{time.time_ns()}"
        removed.parent.mkdir(mode=0o700, exist_ok=True)
        directory.rename(removed)
        self._later(self._remove, removed)

    def _remove(self, directory: Path) -> None:
        try:
            for target in _below(directory):
                syscalls.umount(target)
            remove_tree(directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.error("Remains of a deleted sliver cannot be removed, retrying later: %s", error)
            self._left.add(directory)
        self._freed()

    def tidy(self) -> None:
        """Try again what could not be removed."""
        # Each entry once: those that fail again are left for the next time.
        for directory in list(self._left):
            self._left.discard(directory)
            self._later(self._remove, directory)

    def found(self) -> list[str]:
        """Return names of slivers that have a disk, or a mount of one."""
        names = set()
        with contextlib.suppress(FileNotFoundError):
            names = {
                entry.name
                for entry in os.scandir(self._state / "slivers")
                if os.path.exists(os.path.join(entry.path, "disk.img"))
            }
        prefix = f"{self._state}/slivers/"
        names.update(
            target.removeprefix(prefix).split("/")[0]
            for target, device, _ in _mounts()
            if target.startswith(prefix) and device.startswith("/dev/loop")
        )
        return sorted(names)

    def devices(self, name: str) -> list[str]:
        """Return the device number (major:minor) of the mounted disk, for I/O limits."""
        device = _device(self.image(name))
        return [f"{loopdev.MAJOR}:{device.removeprefix('/dev/loop')}"] if device is not None else []


def _await_release(name: str, path: Path) -> None:
    """Wait until no namespace uses an unmounted disk. Raises DiskError.

    A sliver that is being created has all mounts of the host for a moment. The kernel reports
    no event for the release, and two file systems over one image would destroy it.
    """
    deadline = time.monotonic() + RELEASE_TIMEOUT
    while users := loopdev.over(path):
        if time.monotonic() > deadline:
            raise DiskError(
                f"disk of sliver {name}: {path} is still in use as {', '.join(users)}, by a "
                "mount namespace that ends later "
                "(see lsns -t mnt)",
                retry=True,
            )
        time.sleep(0.01)


def _grow_unmounted(path: Path) -> None:
    tool = commands.find("resize2fs")
    if tool is None:
        raise DiskError("resize2fs is missing: install e2fsprogs")
    commands.run([tool, "-f", str(path)], RESIZE_TIMEOUT, f"resize2fs of {path}", error=DiskError)


def _quota_file(image: Path) -> Path:
    return image.with_name("disk.kib")


def _quota(image: Path) -> int:
    """Return the quota in KiB."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(_quota_file(image).read_text())
    return image.stat().st_size // KIB


def _apply_quota(image: Path, target: str) -> None:
    """Reserve what the image has beyond the quota; it cannot be used inside, not even by
    root.
    """
    surplus = max(0, image.stat().st_size - _quota(image) * KIB) // BLOCK
    control = Path(f"/sys/fs/ext4/loop{os.minor(os.stat(target).st_dev)}/reserved_clusters")
    if surplus == 0 and not _quota_file(image).exists():
        return
    # The kernel's reserve for delayed writes, with its default: 2 % or 4096 clusters.
    reserve = min(4096, os.statvfs(target).f_blocks // 50)
    control.write_text(str(surplus + reserve))


def _target(image: Path) -> str | None:
    """Return the mount point of a loop device below the sliver's directory."""
    targets = _below(image.parent)
    return targets[-1] if targets else None


def _device(image: Path) -> str | None:
    target = _target(image)
    if target is None:
        return None
    return next((device for place, device, _ in _mounts() if place == target), None)


def _may_grow_mounted() -> bool:
    """Return whether we have CAP_SYS_RESOURCE (24), which containers often lack."""
    with open("/proc/self/status") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> 24 & 1)


def _formatted_size(path: Path) -> int:
    """Return the bytes that the ext4 file system in the image spans."""
    return _blocks(path, 4, 0x150) * BLOCK


def _used_size(path: Path) -> int:
    """Return the bytes in use in the ext4 file system of an unmounted image."""
    return (_blocks(path, 4, 0x150) - _blocks(path, 0xC, 0x158)) * BLOCK


def _blocks(path: Path, low: int, high: int) -> int:
    """Return a number of the superblock (at 1024) from the positions of its halves."""
    with open(path, "rb") as file:
        block = os.pread(file.fileno(), 1024, 1024)
    return int(
        (struct.unpack_from("<I", block, high)[0] << 32) + struct.unpack_from("<I", block, low)[0]
    )


def _grow(target: str, size: int) -> None:
    """Let the mounted ext4 fill its device. Raises OSError."""
    with held(os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        try:
            fcntl.ioctl(directory, _EXT4_IOC_RESIZE_FS, struct.pack("=Q", size // BLOCK))
        except OSError as error:
            # Already as large.
            if error.errno != errno.EINVAL:
                raise


def _mounts() -> Iterator[tuple[str, str, str]]:
    """Return target, source and root of each mount of this namespace, in mount order."""
    with open("/proc/self/mountinfo") as file:
        for line in file:
            head, _, tail = line.partition(" - ")
            fields = head.split()
            yield _unescape(fields[4]), tail.split()[1], fields[3]


def _loop(device: str) -> loopdev.Loop:
    return loopdev.Loop.open(int(device.removeprefix("/dev/loop")))


def _below(directory: Path) -> list[str]:
    return [
        target
        for target, device, _ in reversed(list(_mounts()))
        if target.startswith(f"{directory}/") and device.startswith("/dev/loop")
    ]


def _unescape(text: str) -> str:
    return (
        text.encode().decode("unicode_escape").encode("latin-1").decode() if "\\" in text else text
    )

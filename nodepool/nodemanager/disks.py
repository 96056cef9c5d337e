"""A disk per sliver: a sparse ext4 image of exactly its quota, on a loop device (nodemanager.md C.3, nm_disk_quota).

Works on any file system of the host, binds root inside the sliver too, and is deleted with one unlink.  Images are copies of
a sparse template of the same size, so that a new disk costs no mkfs: a template of some GiB holds only a few MiB of data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nodepool.nodemanager import commands, syscalls
from nodepool.nodemanager.backends.base import BackendError, Problem
from nodepool.nodemanager.rspec import DEFAULT_RSPEC, check_name

KIB = 1024
BLOCK = 4096
#: A disk is never smaller: an ext4 file system needs some room for itself.
MINIMUM_KIB = 2048
#: From this size on a disk has a journal.
JOURNAL_KIB = 32 * KIB
FORMAT_TIMEOUT = 60.0
RESIZE_TIMEOUT = 300.0
#: Changes with the options of the format, so that a template made by another version is not used.
TEMPLATE = "template-1"
#: So many sizes are kept ready; the one that was not used for longest goes first.
TEMPLATES = 8
DEFAULT_KIB = DEFAULT_RSPEC["nm_disk_quota"]

_LOOP_SET_CAPACITY = 0x4C07
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LO_FLAGS_AUTOCLEAR = 4
_LOOP_MAJOR = 7
#: _IOW('f', 16, __u64)
_EXT4_IOC_RESIZE_FS = 0x40086610
_LOOP_CONFIG_SIZE = 304
_MS_NOATIME = 1024
_SEEK_STEP = 1 << 20


class DiskError(BackendError):
    """A disk cannot be made, mounted or changed; the text says why."""


@dataclass(frozen=True)
class Disk:
    image: str
    """The file; mount source by way of a loop device."""
    kib: int
    device: str = ""
    """The loop device while it is mounted, such as /dev/loop3."""


class Disks:
    """The disks below one state directory: ``<state>/slivers/<name>/disk.img``."""

    def __init__(self, state_dir: str | os.PathLike[str]) -> None:
        # As /proc/self/mountinfo spells it.
        self._state = Path(os.path.realpath(state_dir))
        self._template_lock = threading.Lock()
        self._loop_lock = threading.Lock()

    # --- the host ----------------------------------------------------------------------------------------------------

    def problems(self) -> list[Problem]:
        found = []
        if commands.find("mke2fs") is None:
            found.append(Problem("disk quota", False, "install e2fsprogs (mke2fs); without it slivers get no disks of their own"))
        if not os.path.exists("/dev/loop-control"):
            found.append(Problem("disk quota", False, "load the kernel module loop; slivers get no disks of their own without"))
        return found

    def prepare(self, count: int = 1) -> None:
        """Make the template of the usual size, and remove what an interrupted creation left.

        The number is the number of disks wanted soon; a copy is so cheap that none is kept in stock.
        """
        for leftover in (*self._state.glob("slivers/*/disk.img.new"), *self._state.glob("disks/*.new")):
            leftover.unlink(missing_ok=True)
        if count > 0 and not self.problems():
            self._template(DEFAULT_KIB)

    def _template(self, kib: int) -> Path:
        """A formatted image of that size that is never mounted itself."""
        path = self._state / "disks" / f"{TEMPLATE}-{kib}.img"
        with self._template_lock:
            if not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                new = path.with_suffix(".new")
                try:
                    self._format(new, kib)
                    new.replace(path)
                finally:
                    new.unlink(missing_ok=True)
                kept = sorted(path.parent.glob("template-*.img"), key=lambda entry: entry.stat().st_mtime)
                for old in kept[:-TEMPLATES]:
                    old.unlink(missing_ok=True)
            else:
                os.utime(path)
        return path

    @staticmethod
    def _format(path: Path, kib: int) -> None:
        """A new ext4 image. Raises DiskError."""
        tool = commands.find("mke2fs")
        if tool is None:
            raise DiskError("mke2fs is missing: install e2fsprogs")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, kib * KIB)
        finally:
            os.close(descriptor)
        large = kib >= JOURNAL_KIB
        command = [tool, "-q", "-F", "-t", "ext4", "-b", str(BLOCK), "-m", "0", "-i", "16384", "-I", "256",
                   "-O", f"64bit,^resize_inode,meta_bg,{'' if large else '^'}has_journal",
                   *(["-J", f"size={16 if kib >= 1 << 20 else 4}"] if large else []),
                   "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0", str(path)]
        commands.run(command, FORMAT_TIMEOUT, f"mke2fs of {kib} KiB", error=DiskError)

    # --- one disk ----------------------------------------------------------------------------------------------------

    def image(self, name: str) -> Path:
        return self._state / "slivers" / check_name(name) / "disk.img"

    def create(self, name: str, kib: int) -> Disk:
        """The image of a sliver; one that exists is kept. Size in KiB. Raises DiskError."""
        path = self.image(name)
        if path.exists():
            return Disk(str(path), self._quota(name), self._device(name) or "")
        if kib < MINIMUM_KIB:
            raise DiskError(f"nm_disk_quota: {kib} KiB is less than {MINIMUM_KIB}, the least a disk can have")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name("disk.img.new")
        try:
            kib -= kib % (BLOCK // KIB)
            for attempt in range(3):
                try:
                    _copy_sparse(self._template(kib), new, kib * KIB)
                    break
                except FileNotFoundError:
                    # Made room for another size just now.
                    if attempt == 2:
                        raise
            new.replace(path)
        except OSError as error:
            raise DiskError(f"disk of sliver {name}: {error.strerror}", retry=error.errno == errno.ENOSPC) from error
        finally:
            new.unlink(missing_ok=True)
        self._quota_file(name).unlink(missing_ok=True)
        return Disk(str(path), kib)

    def mount(self, name: str, target: str) -> None:
        """Mount at an existing directory; nothing to do if it is there already. Raises DiskError."""
        target = os.path.realpath(target)
        if any(place == target for place, _device, _root in _mounts()):
            return
        path = self.image(name)
        try:
            grow = _formatted_size(path) < path.stat().st_size
            if grow and not _may_grow_mounted():
                self._grow_unmounted(path)
                grow = False
            device = self._attach(path)
            try:
                syscalls.mount(device.path, target, "ext4", syscalls.MS_NOSUID | syscalls.MS_NODEV | _MS_NOATIME,
                               "discard,noinit_itable")
                if grow:
                    _grow(target, path.stat().st_size)
                self._apply_quota(name, target)
            except BaseException:
                if os.path.ismount(target):
                    syscalls.umount(target)
                raise
            finally:
                # From here on the mount keeps the device; it frees itself when that ends.
                device.close()
        except OSError as error:
            raise DiskError(f"disk of sliver {name}: cannot mount {path}: {error.strerror or error}", retry=True) from error

    def _attach(self, path: Path) -> _Loop:
        """A loop device over the image, freed by its last user. Raises OSError."""
        backing = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
            try:
                deadline = time.monotonic() + 10.0
                while True:
                    # Between asking for a free number and taking it, another process may take it.
                    with self._loop_lock:
                        number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
                        device = _Loop.open(number)
                        try:
                            device.configure(backing)
                            return device
                        except OSError as error:
                            device.close()
                            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                                raise
            finally:
                os.close(control)
        finally:
            os.close(backing)

    def resize(self, name: str, kib: int) -> None:
        """A new quota, in KiB, at once. What is in use is never cut off.

        :raises DiskError: more is in use already, or there is no such disk.
        """
        path = self.image(name)
        if not path.exists():
            raise DiskError(f"sliver {name} has no disk")
        if kib < MINIMUM_KIB:
            raise DiskError(f"nm_disk_quota: {kib} KiB is less than {MINIMUM_KIB}, the least a disk can have")
        if kib == self._quota(name):
            return
        target = self._target(name)
        used = self.usage(name)
        if used > kib * KIB:
            raise DiskError(f"nm_disk_quota: sliver {name} uses {used // KIB} KiB of its disk, more than {kib}; free some first")
        try:
            if kib * KIB > path.stat().st_size:
                if target is not None and not _may_grow_mounted():
                    raise DiskError(f"disk of sliver {name}: this host lets nobody grow a mounted disk (CAP_SYS_RESOURCE is "
                                    "missing); stop the sliver first")
                os.truncate(path, kib * KIB // BLOCK * BLOCK)
                device = self._device(name)
                if device is not None and target is not None:
                    with _Loop.open(int(device.removeprefix("/dev/loop"))) as loop:
                        loop.refresh()
                    _grow(target, path.stat().st_size)
            # ext4 cannot shrink while it is mounted: the room between quota and size is reserved instead.
            quota = self._quota_file(name)
            new = quota.with_suffix(".new")
            new.write_text(f"{kib}\n")
            new.replace(quota)
            if target is not None:
                self._apply_quota(name, target)
        except OSError as error:
            raise DiskError(f"disk of sliver {name}: cannot resize to {kib} KiB: {error.strerror}", retry=True) from error

    @staticmethod
    def _grow_unmounted(path: Path) -> None:
        tool = commands.find("resize2fs")
        if tool is None:
            raise DiskError("resize2fs is missing: install e2fsprogs")
        commands.run([tool, "-f", str(path)], RESIZE_TIMEOUT, f"resize2fs of {path}", error=DiskError)

    def _quota_file(self, name: str) -> Path:
        return self.image(name).with_name("disk.kib")

    def _quota(self, name: str) -> int:
        """KiB."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self._quota_file(name).read_text())
        return self.image(name).stat().st_size // KIB

    def _apply_quota(self, name: str, target: str) -> None:
        """Reserve what the image has beyond the quota; nobody inside can use it, not even root."""
        size = self.image(name).stat().st_size
        surplus = max(0, size - self._quota(name) * KIB) // BLOCK
        control = f"/sys/fs/ext4/loop{os.minor(os.stat(target).st_dev)}/reserved_clusters"
        if surplus == 0 and not self._quota_file(name).exists():
            return
        # The kernel's own reserve for writes that it has promised already: as it sets it, 2 % or 4096 clusters.
        reserve = min(4096, os.statvfs(target).f_blocks // 50)
        with open(control, "w") as file:
            file.write(str(surplus + reserve))

    def usage(self, name: str) -> int:
        """Bytes in use inside; of a disk that is not mounted, what its image takes from the host."""
        target = self._target(name)
        if target is None:
            with contextlib.suppress(FileNotFoundError):
                return self.image(name).stat().st_blocks * 512
            return 0
        numbers = os.statvfs(target)
        return (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize

    def destroy(self, name: str) -> None:
        """Unmount and unlink; what is not there is fine. Raises DiskError."""
        path = self.image(name)
        try:
            for target in self._targets(name):
                with contextlib.suppress(FileNotFoundError):
                    syscalls.umount(target)
            quota = self._quota_file(name)
            for leftover in (path, path.with_name("disk.img.new"), quota, quota.with_suffix(".new")):
                leftover.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise DiskError(f"disk of sliver {name}: cannot remove it: {error.strerror}", retry=True) from error

    def found(self) -> list[str]:
        """Names of slivers that have a disk, or a mount of one."""
        names = set()
        with contextlib.suppress(FileNotFoundError):
            names = {entry.name for entry in os.scandir(self._state / "slivers")
                     if os.path.exists(os.path.join(entry.path, "disk.img"))}
        prefix = f"{self._state}/slivers/"
        names.update(target.removeprefix(prefix).split("/")[0] for target, device, _ in _mounts()
                     if target.startswith(prefix) and device.startswith("/dev/loop"))
        return sorted(names)

    def devices(self, name: str) -> list[str]:
        """"major:minor" of the mounted disk, for limits on I/O."""
        device = self._device(name)
        return [f"{_LOOP_MAJOR}:{device.removeprefix('/dev/loop')}"] if device is not None else []

    def _targets(self, name: str) -> list[str]:
        """Where the disk is mounted: everything from a loop device below the sliver's directory, deepest first."""
        prefix = f"{self._state}/slivers/{check_name(name)}/"
        return [target for target, device, _ in reversed(list(_mounts()))
                if target.startswith(prefix) and device.startswith("/dev/loop")]

    def _target(self, name: str) -> str | None:
        targets = self._targets(name)
        return targets[-1] if targets else None

    def _device(self, name: str) -> str | None:
        target = self._target(name)
        if target is None:
            return None
        return next((device for place, device, _ in _mounts() if place == target), None)


class _Loop:
    """An open loop device."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.path = f"/dev/loop{number}"
        self._descriptor = descriptor

    @classmethod
    def open(cls, number: int) -> _Loop:
        path = f"/dev/loop{number}"
        if not os.path.exists(path):
            # No udev on this host.
            with contextlib.suppress(FileExistsError):
                os.mknod(path, 0o600 | 0o060000, os.makedev(_LOOP_MAJOR, number))
        return cls(number, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def configure(self, backing: int) -> None:
        """Attach the open file. Raises OSError; EBUSY: somebody else took the device."""
        config = bytearray(_LOOP_CONFIG_SIZE)
        struct.pack_into("=II", config, 0, backing, BLOCK)
        # struct loop_info64 begins at 8; its lo_flags at 52.
        struct.pack_into("=I", config, 8 + 52, _LO_FLAGS_AUTOCLEAR)
        fcntl.ioctl(self._descriptor, _LOOP_CONFIGURE, bytes(config))

    def refresh(self) -> None:
        """The file has another size now."""
        fcntl.ioctl(self._descriptor, _LOOP_SET_CAPACITY)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.close()


def _may_grow_mounted() -> bool:
    """CAP_SYS_RESOURCE (24); containers often lack it."""
    with open("/proc/self/status") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> 24 & 1)


def _formatted_size(path: Path) -> int:
    """Bytes that the ext4 file system in the image spans, from its superblock at 1024."""
    with open(path, "rb") as file:
        block = os.pread(file.fileno(), 1024, 1024)
    low, high = struct.unpack_from("<I", block, 4)[0], struct.unpack_from("<I", block, 0x150)[0]
    return ((high << 32) + low) * BLOCK


def _grow(target: str, size: int) -> None:
    """Let the mounted ext4 fill its device. Raises OSError."""
    blocks = size // BLOCK
    directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(directory, _EXT4_IOC_RESIZE_FS, struct.pack("=Q", blocks))
    except OSError as error:
        # As large already.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(directory)


def _copy_sparse(source: Path, target: Path, size: int) -> None:
    """Copy only what is not a hole; the copy is `size` bytes long."""
    with open(source, "rb", buffering=0) as old:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            position = 0
            while True:
                try:
                    start = os.lseek(old.fileno(), position, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:
                        return
                    raise
                position = os.lseek(old.fileno(), start, os.SEEK_HOLE)
                while start < position:
                    piece = os.pread(old.fileno(), min(_SEEK_STEP, position - start), start)
                    start += os.pwrite(descriptor, piece, start)
        finally:
            os.close(descriptor)


def _mounts() -> Iterator[tuple[str, str, str]]:
    """Target, source and root of each mount of this namespace, in order of mounting."""
    with open("/proc/self/mountinfo") as file:
        for line in file:
            head, _, tail = line.partition(" - ")
            fields = head.split()
            yield _unescape(fields[4]), tail.split()[1], fields[3]


def _unescape(text: str) -> str:
    return text.encode().decode("unicode_escape").encode("latin-1").decode() if "\\" in text else text

"""Loop devices: a file as a block device."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from pathlib import Path

from nodepool.nodemanager.kernel.descriptors import held

BLOCK = 4096
MAJOR = 7
_LOOP_GET_STATUS64 = 0x4C05
_LOOP_SET_CAPACITY = 0x4C07
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16
_LOOP_CONFIG_SIZE = 304
_LOOP_INFO_SIZE = 232
#: Number and size (KiB) of the requests that one device may have in flight: a busy writer delays
#: others only briefly. More requests are no faster; requests of 1.25 MiB are faster by a tenth, but
#: make others wait half as long again.
REQUESTS, REQUEST_KIB = 8, 128
_lock = threading.Lock()


class Loop:
    """An open loop device."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.path = f"/dev/loop{number}"
        self._descriptor = descriptor

    @classmethod
    def open(cls, number: int, flags: int = os.O_RDWR) -> Loop:
        path = f"/dev/loop{number}"
        if not os.path.exists(path):
            # No udev on this host.
            with contextlib.suppress(FileExistsError):
                os.mknod(path, 0o600 | 0o060000, os.makedev(MAJOR, number))
        return cls(number, os.open(path, flags | os.O_CLOEXEC))

    def configure(self, backing: int) -> None:
        """Attach the open file. Raises OSError; EBUSY: another process took the device.

        Bypass the host's page cache if the file system can: otherwise one sliver's writes would
        queue there before those of others.
        """
        config = bytearray(_LOOP_CONFIG_SIZE)
        struct.pack_into("=II", config, 0, backing, BLOCK)
        # struct loop_info64 starts at offset 8; its lo_flags at 52.
        struct.pack_into("=I", config, 8 + 52, _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO)
        fcntl.ioctl(self._descriptor, _LOOP_CONFIGURE, bytes(config))
        with contextlib.suppress(OSError):
            self._setting("nr_requests").write_text(str(REQUESTS))

    def _setting(self, name: str) -> Path:
        return Path("/sys/block", os.path.basename(self.path), "queue", name)

    def small_requests(self) -> None:
        """Reduce the request size for as long as the device exists; it stops for about 15 ms."""
        setting = self._setting("max_sectors_kb")
        with contextlib.suppress(OSError):
            if int(setting.read_text()) != REQUEST_KIB:
                setting.write_text(str(REQUEST_KIB))

    def inode(self) -> int:
        """Return the inode of the backing file."""
        info = fcntl.ioctl(self._descriptor, _LOOP_GET_STATUS64, bytes(_LOOP_INFO_SIZE))
        return int(struct.unpack_from("=Q", info, 8)[0])

    def refresh(self) -> None:
        """Apply a changed size of the file."""
        fcntl.ioctl(self._descriptor, _LOOP_SET_CAPACITY)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.close()


def over(path: Path) -> list[str]:
    """Return the loop devices with this file, of any owner. Raises OSError: no such file."""
    inode, found = os.stat(path).st_ino, []
    for place in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # just freed
            if place.read_text() == f"{path}\n":
                # Another container may have a file of the same name. Read-only: after a writer,
                # udev would probe the device.
                with Loop.open(int(place.parts[3].removeprefix("loop")), os.O_RDONLY) as device:
                    if device.inode() == inode:
                        found.append(device.path)
    return found


def attach(path: Path) -> Loop:
    """Return a loop device over the image, freed by its last user. Raises OSError."""
    with (
        held(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as backing,
        held(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)) as control,
    ):
        deadline = time.monotonic() + 10.0
        while True:
            # Another process may take the free number between these two calls.
            with _lock:
                device = Loop.open(fcntl.ioctl(control, _LOOP_CTL_GET_FREE))
                try:
                    device.configure(backing)
                    return device
                except OSError as error:
                    device.close()
                    if error.errno != errno.EBUSY or time.monotonic() > deadline:
                        raise

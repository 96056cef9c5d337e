"""System calls that the standard library lacks, such as mounts, namespaces and openat2.

All raise OSError with the name of the call. Functions that fork are for processes with a single
thread only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import platform
import socket
import struct
from collections.abc import Callable, Collection
from pathlib import Path

from nodepool.nodemanager.kernel.descriptors import held

_libc = ctypes.CDLL(None, use_errno=True)
# The interpreter lock is kept: after a raw clone the child continues in the middle of this call.
_libc_locked = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc_locked.syscall.restype = ctypes.c_long

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_PIDFD = 0x00001000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MS_SLAVE = 1 << 19
MNT_DETACH = 2

OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
MOUNT_ATTR_IDMAP = 0x00100000
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = (
    1,
    2,
    4,
    8,
    16,
)

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPGET = {"x86_64": 125, "aarch64": 90}
_KEYCTL = {"x86_64": 250, "aarch64": 219}
# Numbers from 424 on are the same on all machines.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_CLOSE_RANGE, _OPENAT2, _MOUNT_SETATTR = 436, 437, 442

(
    PR_SET_PDEATHSIG,
    PR_SET_DUMPABLE,
    PR_SET_NAME,
    PR_SET_SECCOMP,
    PR_CAPBSET_DROP,
    PR_SET_SECUREBITS,
) = 1, 4, 15, 22, 24, 28
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SECBIT_NO_SETUID_FIXUP = 4

#: Errors of calls that may succeed later, when processes, memory, a device, descriptors or disk
#: space are free.
SHORTAGE = frozenset(
    (errno.EAGAIN, errno.ENOMEM, errno.EBUSY, errno.ENFILE, errno.EMFILE, errno.ENOSPC)
)


def machine() -> str:
    """Return the machine's name in the tables of numbers. OSError(ENOSYS): it has none."""
    name = platform.machine()
    if name not in _CLONE:
        raise OSError(
            errno.ENOSYS,
            f"slivers are not supported on {name} (only on {', '.join(sorted(_CLONE))})",
        )
    return name


def _call(name: str, number: int, *arguments: object) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(name, int(_libc.syscall(ctypes.c_long(number), *converted)))


def _checked(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def write(path: str | os.PathLike[str], value: object, directory: int | None = None) -> None:
    """Write a file of the kernel in one system call, as it requires. Raises OSError."""
    with held(os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)) as descriptor:
        os.write(descriptor, str(value).encode())


# --- mounts
# --------------------------------------------------------------------------------------------------


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    _checked(
        f"mount {kind or 'flags'} on {target}",
        _libc.mount(
            source.encode(),
            os.fsencode(target),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            data.encode() or None,
        ),
    )


def umount(target: str, flags: int = MNT_DETACH) -> None:
    """umount2(2)."""
    _checked(f"umount {target}", _libc.umount2(os.fsencode(target), flags))


def open_tree(path: str, directory: int = AT_FDCWD, flags: int = OPEN_TREE_CLONE) -> int:
    """Return a detached copy of the mount at `path`; empty path: the descriptor itself."""
    flags |= os.O_CLOEXEC | (0 if path else AT_EMPTY_PATH)
    return _call(f"open_tree {path}", _OPEN_TREE, directory, os.fsencode(path), flags)


def mount_setattr(
    mount_fd: int,
    attributes: int,
    userns: int | None = None,
    recursive: bool = False,
    clear: int = 0,
) -> None:
    """Set attributes of a mount; with `userns` the mount is id-mapped by that user namespace."""
    if userns is not None:
        attributes |= MOUNT_ATTR_IDMAP
    value = struct.pack("=QQQQ", attributes, clear, 0, userns or 0)
    _call(
        "mount_setattr",
        _MOUNT_SETATTR,
        mount_fd,
        b"",
        AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0),
        value,
        len(value),
    )


def move_mount(mount_fd: int, target: str | int) -> None:
    """Attach a detached mount at a path, or at what a descriptor (O_PATH) stands for.

    Closes the descriptor of the mount.
    """
    place = (
        (target, b"", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH)
        if isinstance(target, int)
        else (AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
    )
    with held(mount_fd):
        _call(f"move_mount to {target}", _MOVE_MOUNT, mount_fd, b"", *place)


def new_mount(
    kind: str, options: dict[str, str | None], attributes: int = 0, source: str = ""
) -> int:
    """Return a detached mount of a new file system; options with the value None are flags."""
    with held(_call(f"fsopen {kind}", _FSOPEN, kind.encode(), 1)) as context:
        try:
            _call(
                f"fsconfig {kind} source",
                _FSCONFIG,
                context,
                1,
                b"source",
                (source or kind).encode(),
                0,
            )
            for key, value in options.items():
                if value is None:
                    _call(f"fsconfig {kind} {key}", _FSCONFIG, context, 0, key.encode(), None, 0)
                else:
                    _call(
                        f"fsconfig {kind} {key}={value}",
                        _FSCONFIG,
                        context,
                        1,
                        key.encode(),
                        os.fsencode(value),
                        0,
                    )
            _call(f"fsconfig {kind} create", _FSCONFIG, context, 6, None, None, 0)
            return _call(f"fsmount {kind}", _FSMOUNT, context, 1, attributes)
        except OSError as error:
            if text := _context_messages(context):
                raise OSError(error.errno, f"{error.strerror} ({text})") from error
            raise


def _context_messages(context: int) -> str:
    """Return the kernel's messages about a failed fsconfig."""
    lines: list[str] = []
    os.set_blocking(context, False)
    while len(lines) < 8:
        try:
            lines.append(os.read(context, 1024).decode(errors="replace").strip())
        except OSError:
            break
    return "; ".join(lines)


def fallocate(descriptor: int, start: int, length: int, keep_size: bool = False) -> None:
    """Allocate blocks for a part of a file. Raises OSError; EOPNOTSUPP: not supported here."""
    _checked(
        "fallocate",
        _libc.fallocate(
            ctypes.c_int(descriptor),
            ctypes.c_int(1 if keep_size else 0),
            ctypes.c_int64(start),
            ctypes.c_int64(length),
        ),
    )


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    _call("pivot_root", _PIVOT_ROOT[machine()], os.fsencode(new), os.fsencode(old))


def openat2(directory: int, path: str | bytes, flags: int, resolve: int, mode: int = 0) -> int:
    """openat2(2), close-on-exec.

    OSError(EAGAIN): other programs renamed or mounted something during each of 100 attempts.
    """
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    attempt = functools.partial(
        _call, f"openat2 {os.fsdecode(path)}", _OPENAT2, directory, os.fsencode(path), how, len(how)
    )
    # The kernel does not resolve ".." while anything on the machine is renamed or mounted, and asks
    # for another attempt.
    for _ in range(99):
        with contextlib.suppress(BlockingIOError):
            return attempt()
    return attempt()


# --- processes and namespaces
# ----------------------------------------------------------------------------------------


def clone(flags: int) -> tuple[int, int]:
    """Fork with new namespaces, single-threaded: (0, -1) in the child, else (pid, pidfd)."""
    pidfd = ctypes.c_int(-1)
    arguments: list[object] = [
        ctypes.c_long(flags | CLONE_PIDFD | 17),
        ctypes.c_long(0),
        ctypes.byref(pidfd),
    ]
    arguments += [ctypes.c_long(0), ctypes.c_long(0)]
    result = _checked(
        "clone", int(_libc_locked.syscall(ctypes.c_long(_CLONE[machine()]), *arguments))
    )
    return (0, -1) if result == 0 else (result, pidfd.value)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _checked(f"a new {_namespaces(flags)} namespace (unshare)", _libc.unshare(ctypes.c_int(flags)))


def _namespaces(flags: int) -> str:
    names = (
        (CLONE_NEWUSER, "user"),
        (CLONE_NEWNS, "mount"),
        (CLONE_NEWPID, "pid"),
        (CLONE_NEWNET, "network"),
        (CLONE_NEWIPC, "ipc"),
        (CLONE_NEWUTS, "uts"),
        (CLONE_NEWCGROUP, "cgroup"),
    )
    return ", ".join(name for flag, name in names if flags & flag)


def setns(descriptor: int, flags: int) -> None:
    """setns(2); with a pidfd, several namespaces in one call."""
    _checked(f"setns {flags:#x}", _libc.setns(ctypes.c_int(descriptor), ctypes.c_int(flags)))


def prctl(option: int, argument: int = 0, pointer: object = None) -> int:
    """prctl(2); `pointer` is the third argument (of PR_SET_SECCOMP)."""
    zero = ctypes.c_ulong(0)
    return _checked(
        f"prctl {option}",
        _libc.prctl(
            ctypes.c_int(option),
            ctypes.c_ulong(argument),
            zero if pointer is None else pointer,
            zero,
            zero,
        ),
    )


def set_name(name: str) -> None:
    """Set the name of this process for ps; 15 bytes."""
    prctl(PR_SET_NAME, ctypes.addressof(ctypes.create_string_buffer(name.encode()[:15])))


def own_keyring() -> None:
    """Join a new, empty session keyring: the inherited one has keys of the daemon's user."""
    _call("keyctl", _KEYCTL[machine()], 1, None)  # KEYCTL_JOIN_SESSION_KEYRING


def close_from(first: int, keep: tuple[int, ...] = ()) -> None:
    """Close all descriptors >= first but those in `keep`."""
    for descriptor in sorted(k for k in keep if k >= first):
        if descriptor > first:
            _call("close_range", _CLOSE_RANGE, first, descriptor - 1, 0)
        first = descriptor + 1
    _call("close_range", _CLOSE_RANGE, first, 0xFFFFFFFF, 0)


def keep_capabilities(kept: Collection[int], meanwhile: Callable[[], None]) -> None:
    """Drop all other capabilities of this process, also for every later exec.

    :param meanwhile: called when later execs are restricted and this process still has the
        capabilities.
    """
    # Stop at the first one unknown to this kernel; /proc may be the sliver's and cannot be trusted.
    for capability in range(64):
        if capability not in kept:
            try:
                prctl(PR_CAPBSET_DROP, capability)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break
    meanwhile()
    effective, permitted, inheritable = _capabilities()
    mask = sum(1 << capability for capability in kept)
    _set_capabilities(effective & mask, permitted & mask, inheritable & mask)


def file_user(user: int, group: int) -> None:
    """Access files as this user and group from now on, without root's file capabilities."""
    # Both report errors only through the previous id that they return.
    _libc.setfsgid(ctypes.c_uint32(group))
    _libc.setfsuid(ctypes.c_uint32(user))
    if _libc.setfsuid(ctypes.c_uint32(2**32 - 1)) != user:
        raise OSError(errno.EPERM, f"cannot access files as user {user}")


def _capabilities() -> tuple[int, int, int]:
    """Return effective, permitted and inheritable capabilities as bits."""
    data = ctypes.create_string_buffer(24)
    _call(
        "capget",
        _CAPGET[machine()],
        ctypes.create_string_buffer(struct.pack("=II", 0x20080522, 0)),
        data,
    )
    words = struct.unpack("=6I", data.raw)
    return words[0] | words[3] << 32, words[1] | words[4] << 32, words[2] | words[5] << 32


def _set_capabilities(*sets: int) -> None:
    words = [value & 0xFFFFFFFF for value in sets] + [value >> 32 for value in sets]
    _call(
        "capset",
        _CAPSET[machine()],
        ctypes.create_string_buffer(struct.pack("=II", 0x20080522, 0)),
        ctypes.create_string_buffer(struct.pack("=6I", *words)),
    )


def loopback_up() -> None:
    """Bring `lo` of this network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(control, 0x8914, request)  # SIOCSIFFLAGS


# --- facts about processes
# -------------------------------------------------------------------------------------------


def start_time(pid: int) -> int | None:
    """Return the start time in ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rsplit(b")", 1)[1].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def children(pid: int) -> list[int]:
    """Return the children of its main thread; empty if this kernel does not list them."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def uid_range(pid: int) -> tuple[int, int] | None:
    """Return first host id and number of ids of the process's user namespace."""
    try:
        lines = Path(f"/proc/{pid}/uid_map").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if not lines:
        return None
    _inside, outside, count = (int(word) for word in lines[0].split())
    return outside, count

"""The filter on system calls of slivers: a deny-list, built here as classic BPF (nodemanager.md C.2, isolation).

What a program of a sliver has no use for and a kernel has had holes in answers ENOSYS or EPERM. Nested user namespaces are
refused: they would give back the capabilities taken from the sliver.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct

from nodepool.nodemanager import syscalls

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_SECCOMP_MODE_FILTER = 2

_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH = 0, 4
_ARGUMENT = 16
"""Offset of the first argument; 8 bytes each, low half first (both machines are little-endian)."""

_EPERM: dict[str, tuple[int | None, int | None]] = {
    # name: (x86_64, aarch64)
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "create_module": (174, None), "init_module": (175, 105),
    "delete_module": (176, 106), "query_module": (178, None), "finit_module": (313, 273), "bpf": (321, 280),
    "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170),
    "adjtimex": (159, 171), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "iopl": (172, None),
    "ioperm": (173, None), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "_sysctl": (156, None), "uselib": (134, None),
    "ustat": (136, None), "sysfs": (139, None), "syslog": (103, 116), "vhangup": (153, 58), "get_kernel_syms": (177, None),
}
# ENOSYS: programs then fall back to older calls, which obey the limits of the sliver.
_ENOSYS: dict[str, tuple[int | None, int | None]] = {
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "open_tree": (428, 428),
    "move_mount": (429, 429), "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "clone3": (435, 435),
}
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_CLONE = (56, 220)
_UNSHARE = (272, 97)
_IOCTL = (16, 29)
_FAMILIES = (1, 2, 10, 16, 17)
"""unix, inet, inet6, netlink, packet. Not vsock (reaches the hypervisor), not alg and the rare protocols (holes in kernels)."""
_TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX type into the terminal of whoever looks in from the host."""


def _statement(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, yes: int, no: int) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _refuse(code: int) -> bytes:
    return _statement(_RETURN, _ERRNO | code)


@functools.cache
def build(machine: str) -> bytes:
    """The filter's program for a machine. Raises KeyError for machines without a table of numbers."""
    column = list(_ARCHITECTURES).index(machine)
    program = [
        # Calls of another kind (32 bit on 64) have other numbers: none of them is let through.
        _statement(_LOAD, _ARCH), _jump(_JEQ, _ARCHITECTURES[machine], 1, 0), _refuse(errno.ENOSYS),
        _statement(_LOAD, _NR),
    ]
    if machine == "x86_64":
        program += [_jump(_JGE, _X32_BIT, 0, 1), _refuse(errno.ENOSYS)]
    for table, code in ((_EPERM, errno.EPERM), (_ENOSYS, errno.ENOSYS)):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                program += [_jump(_JEQ, number, 0, 1), _refuse(code)]
    for numbers in (_CLONE, _UNSHARE):
        program += [_jump(_JEQ, numbers[column], 0, 4), _statement(_LOAD, _ARGUMENT),
                    _jump(_JSET, syscalls.CLONE_NEWUSER, 0, 1), _refuse(errno.EPERM), _statement(_RETURN, _ALLOW)]
    for numbers in (_SOCKET, _SOCKETPAIR):
        program += [_jump(_JEQ, numbers[column], 0, len(_FAMILIES) + 3), _statement(_LOAD, _ARGUMENT)]
        program += [_jump(_JEQ, family, len(_FAMILIES) - place, 0) for place, family in enumerate(_FAMILIES)]
        program += [_refuse(errno.EAFNOSUPPORT), _statement(_RETURN, _ALLOW)]
    program += [_jump(_JEQ, _IOCTL[column], 0, 5), _statement(_LOAD, _ARGUMENT + 8)]
    program += [_jump(_JEQ, _TERMINAL_INJECTION[0], 1, 0), _jump(_JEQ, _TERMINAL_INJECTION[1], 0, 1), _refuse(errno.EPERM),
                _statement(_RETURN, _ALLOW)]
    program.append(_statement(_RETURN, _ALLOW))
    return b"".join(program)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install(program: bytes) -> None:
    """Put the filter on this process and all its descendants; needs CAP_SYS_ADMIN in its user namespace or no_new_privs."""
    code = ctypes.create_string_buffer(program, len(program))
    header = _Program(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    syscalls.prctl(syscalls.PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header))

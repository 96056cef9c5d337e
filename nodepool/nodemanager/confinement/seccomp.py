"""System call filter of slivers: an allow-list, compiled here to BPF (NM-C.2, isolation).

The calls and reasons are in :mod:`system_calls`; additional calls that a label may ask for, in
:mod:`privileges`.  Some calls are allowed with certain arguments only: new namespaces only with the
    privilege (user namespaces never: they would restore the
capabilities that the sliver has lost), sockets only of the families and protocols that jobs use,
since every other one is kernel code that a hostile program could attack.  Filter programs, on
sockets and of system calls, only with a privilege: the kernel compiles all of them into one area
(net.core.bpf_jit_limit) that no limit of a sliver covers and that logins need. Without the
privilege ``seccomp`` the call ``seccomp`` is refused, but ``prctl`` does nothing and succeeds: sshd
of OpenSSH 10.4 and newer, which uses it, ends each connection if it fails.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from nodepool.nodemanager.client import privileges
from nodepool.nodemanager.confinement import system_calls
from nodepool.nodemanager.kernel import syscalls

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_SECCOMP_MODE_FILTER = 2
_AREA = Path("/proc/sys/net/core/bpf_jit_limit")

_LOAD, _AND, _JEQ, _JGT, _JGE, _JSET, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
_NR, _ARCH = 0, 4

_NAMESPACES = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)
#: Only unshare knows it; the same bit belongs to the signal in the flags of clone.
_CLONE_NEWTIME = 0x80
_UNIX, _INET, _INET6, _NETLINK, _PACKET = 1, 2, 10, 16, 17
#: Of Internet sockets: any (0), ICMP, TCP, UDP, ICMPv6, MPTCP. Not SCTP, DCCP, UDP-Lite and the
#: rest.
_PROTOCOLS = (0, 1, 6, 17, 58, 262)
_RAW = 3
#: Of netlink: routes and addresses, sockets (ss), audit (which sudo and sshd try), devices (udev's
#: library).
_NETLINK_PROTOCOLS = (0, 4, 9, 15)
#: Additional families for network administration: IPsec, packet filters, generic families.
_NETLINK_ADMINISTRATION = (6, 12, 16)
#: TIOCSTI and TIOCLINUX type into a terminal of the host; TIOCSETD loads line disciplines.
_TERMINAL_TRICKS = (0x5412, 0x541C, 0x5423)
#: PER_LINUX, PER_LINUX32, both with UNAME26, and the query. Not READ_IMPLIES_EXEC or old memory
#: layouts.
_PERSONALITIES = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)
#: Options of sockets that attach programs, all at one level: SO_ATTACH_FILTER, _BPF,
#: _REUSEPORT_CBPF, _REUSEPORT_EBPF.
_SOL_SOCKET, _ATTACH = 1, (26, 50, 51, 52)
_PR_SET_SECCOMP, _SECCOMP_SET_MODE_FILTER = 22, 1
#: SECCOMP_FILTER_FLAG_NEW_LISTENER: answers system calls of other processes, which no job needs.
_NEW_LISTENER = 8


def _statement(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, yes: int, no: int) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _refuse(code: int) -> bytes:
    return _statement(_RETURN, _ERRNO | code)


def _argument(number: int) -> bytes:
    """Load the low half of an argument (little-endian); checked calls ignore the high one."""
    return _statement(_LOAD, 16 + 8 * number)


def _one_of(values: Iterable[int]) -> list[bytes]:
    """Return code that allows if the loaded value is one of these, and continues otherwise."""
    return [
        part for value in values for part in (_jump(_JEQ, value, 0, 1), _statement(_RETURN, _ALLOW))
    ]


def _refuse_these(values: Iterable[int], *refusal: bytes) -> list[bytes]:
    """Return code that refuses these loaded values and allows others; without `refusal`, all."""
    refused = (
        [part for value in values for part in (_jump(_JEQ, value, 0, len(refusal)), *refusal)]
        if refusal
        else []
    )
    return [*refused, _statement(_RETURN, _ALLOW)]


def _none_of(bits: int, refusal: bytes) -> list[bytes]:
    """Return code that refuses a loaded value with one of these bits, and allows others."""
    return [_jump(_JSET, bits, 0, 1), refusal, _statement(_RETURN, _ALLOW)]


def _sockets(given: Collection[str]) -> list[bytes]:
    raw, administer = "tcpdump" in given, "network-admin" in given

    def case(family: int, rules: list[bytes]) -> list[bytes]:
        return [_jump(_JEQ, family, 0, len(rules)), *rules]

    internet = [_argument(2), *_one_of(_PROTOCOLS)]
    if raw:
        internet += [_argument(1), _statement(_AND, 0xF), *_one_of((_RAW,))]
    internet.append(_refuse(errno.EPROTONOSUPPORT))
    netlink = [
        _argument(2),
        *_one_of((*_NETLINK_PROTOCOLS, *(_NETLINK_ADMINISTRATION if administer else ()))),
        _refuse(errno.EPROTONOSUPPORT),
    ]
    return [
        _argument(0),
        *_one_of((_UNIX, *((_PACKET,) if raw else ()))),
        *case(_INET, internet),
        *case(_INET6, internet),
        *case(_NETLINK, netlink),
        _refuse(errno.EAFNOSUPPORT),
    ]


def _checked(given: Collection[str]) -> dict[str, list[bytes]]:
    """Return the calls with checked arguments and the code for each, which ends in a verdict."""
    eperm = _refuse(errno.EPERM)
    # As a kernel without seccomp answers, which programs are prepared for.
    no_filters = [] if "seccomp" in given else [_refuse(errno.EINVAL)]
    # A program that only looks whether there are filters passes none, and gets the true answer.
    pretended = no_filters and [_argument(2), _jump(_JEQ, 0, 0, 1), *no_filters, _refuse(0)]
    allow = _statement(_RETURN, _ALLOW)
    spaces = syscalls.CLONE_NEWUSER if "mount" in given else _NAMESPACES
    return {
        "clone": [_argument(0), *_none_of(spaces, eperm)],
        "unshare": [
            _argument(0),
            *_none_of(spaces if "mount" in given else spaces | _CLONE_NEWTIME, eperm),
        ],
        "socket": _sockets(given),
        "socketpair": [_argument(0), *_one_of((_UNIX,)), _refuse(errno.EAFNOSUPPORT)],
        "setsockopt": [
            _argument(1),
            _jump(_JEQ, _SOL_SOCKET, 1, 0),
            allow,
            _argument(2),
            *(_refuse_these(() if "tcpdump" in given else _ATTACH, eperm)),
        ],
        "ioctl": [_argument(1), *_refuse_these(_TERMINAL_TRICKS, eperm)],
        "personality": [_argument(0), *_one_of(_PERSONALITIES), eperm],
        "prctl": [
            _argument(0),
            _jump(_JEQ, _PR_SET_SECCOMP, 1, 0),
            allow,
            _argument(1),
            *_refuse_these((_SECCOMP_MODE_FILTER,), *pretended),
        ],
        "seccomp": [
            _argument(0),
            *_refuse_these((_SECCOMP_SET_MODE_FILTER,), *no_filters)[:-1],
            _argument(1),
            *_none_of(_NEW_LISTENER, eperm),
        ],
    }


def _ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of consecutive numbers."""
    first = last = None
    for number in sorted(numbers):
        if last is not None and first is not None and number != last + 1:
            yield first, last
            first = None
        first, last = number if first is None else first, number
    if first is not None and last is not None:
        yield first, last


def allowed(given: Collection[str]) -> system_calls.Calls:
    """Return the calls of slivers with these privileges, whatever their arguments."""
    given = privileges.expand(given)
    found = {
        name: numbers for group in system_calls.ALLOWED.values() for name, numbers in group.items()
    }
    for privilege, calls in (
        ("mount", system_calls.NAMESPACES),
        ("docker", system_calls.CONTAINERS),
        ("debug", system_calls.DEBUG),
    ):
        if privilege in given:
            found |= calls
    return found


@functools.cache
def build(machine: str, given: frozenset[str] = frozenset()) -> bytes:
    """Return the filter program. Raises KeyError for machines without a table of numbers."""
    column = list(_ARCHITECTURES).index(machine)
    let_through = allowed(given)
    given = privileges.expand(given)
    program = [
        # Calls of another architecture (32 bit on 64) have other numbers: refuse all of them.
        _statement(_LOAD, _ARCH),
        _jump(_JEQ, _ARCHITECTURES[machine], 1, 0),
        _refuse(errno.ENOSYS),
        _statement(_LOAD, _NR),
    ]
    # Each number below is compared exactly: those of x32, from 0x40000000 on, are in no table.
    checked = _checked(given)
    for name, rules in checked.items():
        number = let_through[name][column]
        assert number is not None
        program += [_jump(_JEQ, number, 0, len(rules)), *rules]
    # Container runtimes work without keys on kernels that have none.
    unknown = {"add_key", "keyctl", "request_key"} if "docker" in given else set()
    forbidden = {
        name: numbers
        for name, numbers in system_calls.FORBIDDEN.items()
        if name not in let_through.keys() | unknown
    }
    for table, answer in (
        (let_through, _statement(_RETURN, _ALLOW)),
        (forbidden, _refuse(errno.EPERM)),
        (system_calls.WITHOUT_EFFECT, _refuse(0)),
    ):
        numbers = [numbers[column] for name, numbers in table.items() if name not in checked]
        for first, last in _ranges(number for number in numbers if number is not None):
            program += [_jump(_JGE, first, 0, 2), _jump(_JGT, last, 1, 0), answer]
    program.append(_refuse(errno.ENOSYS))
    return b"".join(program)


def shared_area() -> str:
    """Return the name and size of the area for the compiled filters of the whole host."""
    try:
        return f"{int(_AREA.read_text()) >> 20} MiB (net.core.bpf_jit_limit)"
    except (OSError, ValueError) as error:
        return f"an area of unknown size ({_AREA}: {error})"


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install(program: bytes) -> None:
    """Install the filter for this process and its descendants (CAP_SYS_ADMIN or no_new_privs)."""
    code = ctypes.create_string_buffer(program, len(program))
    header = _Program(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    syscalls.prctl(syscalls.PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header))

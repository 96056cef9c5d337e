"""Privileges beyond the minimum that jobs need; each label asks for its own (NM-C.2)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID = 0, 1, 3, 4, 5, 6, 7
SETPCAP, NET_BIND_SERVICE, NET_ADMIN, NET_RAW, SYS_CHROOT, SYS_PTRACE, SYS_ADMIN, SETFCAP = (
    8,
    10,
    12,
    13,
    18,
    19,
    21,
    31,
)
#: Capabilities of root in every sliver, for file owners, user changes (sudo, sshd) and low ports.
LEAST = frozenset(
    (CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE, SYS_CHROOT)
)


@dataclass(frozen=True)
class Privilege:
    #: For humans: what works with it, and what it exposes.
    opens: str
    capabilities: frozenset[int] = frozenset()
    #: Other privileges that it includes.
    includes: tuple[str, ...] = field(default=())


PRIVILEGES: dict[str, Privilege] = {
    "apt": Privilege(
        "packages whose files carry capabilities can be installed (CAP_SETFCAP)",
        frozenset((SETFCAP,)),
    ),
    "ping": Privilege("ping for all users, by ICMP datagram sockets; no capability"),
    "tcpdump": Privilege(
        "raw and packet sockets, and filters on sockets: the packets of the sliver's own network "
        "are seen and forged "
        "(CAP_NET_RAW)",
        frozenset((NET_RAW,)),
    ),
    "network-admin": Privilege(
        "interfaces, routes, packet filters of the sliver's own network (CAP_NET_ADMIN); much code "
        "of the "
        "kernel that has had holes",
        frozenset((NET_ADMIN,)),
    ),
    "mount": Privilege(
        "mounts and namespaces inside, but user namespaces: chroots, image builds (CAP_SYS_ADMIN "
        "in the sliver); "
        "much code of the kernel that has had holes",
        frozenset((SYS_ADMIN,)),
    ),
    "debug": Privilege(
        "debuggers reach processes of other users inside; core dumps (CAP_SYS_PTRACE)",
        frozenset((SYS_PTRACE,)),
    ),
    "docker": Privilege(
        "containers inside, which have no cgroups: a complete /proc and /sys in addition to the "
        "masked ones, sysctls of the sliver's own network (CAP_SETPCAP), and what it includes",
        frozenset((SETPCAP,)),
        includes=("apt", "mount", "network-admin", "seccomp", "tcpdump"),
    ),
    "seccomp": Privilege(
        "programs install their own system call filters, for which the kernel has one area "
        "(net.core.bpf_jit_limit) for all slivers and the host; no capability"
    ),
    "systemd": Privilege(
        "systemd as process 1, with the capabilities that systemd-nspawn gives: backend nspawn "
        "only",
        includes=("mount",),
    ),
}


def expand(names: Collection[str]) -> frozenset[str]:
    """Return these privileges and all that they include."""
    found: set[str] = set()
    for name in names:
        found |= {name, *expand(PRIVILEGES[name].includes)}
    return frozenset(found)


def capabilities(names: Collection[str]) -> frozenset[int]:
    """Return all capabilities of a sliver with these privileges."""
    return LEAST.union(*(PRIVILEGES[name].capabilities for name in expand(names)))


def check(names: object) -> list[str]:
    """Return the privileges, sorted and without duplicates.

    :raises ValueError: not a list of names of privileges.
    """
    known = ", ".join(sorted(PRIVILEGES))
    if not isinstance(names, (list, tuple)):
        raise ValueError(f"must be a list of privileges; known ones are {known}")
    unknown = [name for name in names if not isinstance(name, str) or name not in PRIVILEGES]
    if unknown:
        raise ValueError(f"{str(unknown[0])[:40]!r} is not a privilege; known ones are {known}")
    return sorted(set(names))

"""What root inside can take from the programs that the host starts in the sliver: descriptors,
above all sockets.

Runs inside, by `python3 -I -`, after the library; standard library only.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

from tests.attacks.library import Escape, attempt, call, others, refused

PIDFD_OPEN, PIDFD_GETFD = 434, 438
SIOCGIFCONF, SIOCGSKNS, SIOCGIFINDEX = 0x8912, 0x894C, 0x8933
SO_PEERPIDFD = 77
API = "/run/nodepool/nodemanager.api"


def stolen() -> list[tuple[int, str, int]]:
    """(pid, what the descriptor is, our copy of it) of all that others have open; also by /proc
    where pidfd_getfd is refused.
    """
    found = []
    for pid in others():
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for number in numbers:
            path = f"/proc/{pid}/fd/{number}"
            try:
                what = os.readlink(path)
            except OSError:
                continue
            copy = call(PIDFD_GETFD, call(PIDFD_OPEN, pid, 0), int(number), 0)
            if copy < 0 and not what.startswith("socket:"):
                try:
                    copy = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                except OSError:
                    continue
            if copy >= 0:
                found.append((pid, what, copy))
    return found


def sockets() -> list[tuple[int, socket.socket]]:
    found = []
    for pid, what, copy in stolen():
        if what.startswith("socket:"):
            found.append((pid, socket.socket(fileno=copy)))
        else:
            os.close(copy)
    return found


def is_api(end: socket.socket) -> bool:
    """Its name is where it was made on the host."""
    return str(end.getpeername()).endswith("/nodemanager.api")


def interfaces(end: socket.socket) -> list[str]:
    """As the network namespace of the socket has them."""
    import fcntl

    room = ctypes.create_string_buffer(8192)
    request = struct.pack("iP", len(room), ctypes.addressof(room))
    size, _ = struct.unpack("iP", fcntl.ioctl(end, SIOCGIFCONF, request))
    return sorted(
        {room.raw[place : place + 16].split(b"\0")[0].decode() for place in range(0, size, 40)}
    )


@attempt("1 a descriptor of a session is a socket of the host's network", {"none"})
def sockets_of_sessions() -> str:
    own = sorted(name for _, name in socket.if_nameindex())
    for pid, end in sockets():
        with end:
            if end.family not in (socket.AF_UNIX, socket.AF_NETLINK):
                raise Escape(f"process {pid} has a socket of family {end.family}: {end!r}")
            if not set(interfaces(end)) <= set(own):
                raise Escape(f"process {pid} has a socket of another network: {interfaces(end)}")
    return "none"


@attempt("2-5 such a socket connects or listens anew", {"none"})
def reuse_sockets() -> str:
    for pid, end in sockets():
        with end:
            for what, address in ((end.connect, ("127.0.0.1", 22)), (end.bind, ("127.0.0.1", 0))):
                try:
                    call(
                        42, end.fileno(), struct.pack("=H14x", 0), 16
                    )  # AF_UNSPEC: dissolve the connection
                    what(address)
                except (OSError, TypeError):
                    continue
                raise Escape(f"process {pid} has a socket that can be used anew: {end!r}")
    return "none"


@attempt("6 the namespace of such a socket", {"none", "EPERM", "ENOTTY", "EOPNOTSUPP"})
def namespaces_of_sockets() -> str:
    import fcntl

    outcome = "none"
    for pid, end in sockets():
        with end:
            try:
                space = fcntl.ioctl(end, SIOCGSKNS)
            except OSError as error:
                outcome = refused(error)
                continue
            if os.fstat(space).st_ino != os.stat("/proc/self/ns/net").st_ino:
                raise Escape(f"process {pid} leads to another network namespace")
    return outcome


@attempt("the other end of a session's socket names a process of the host", {"none"})
def peers_of_sockets() -> str:
    visible = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    for pid, end in sockets():
        with end:
            peer, uid, _ = struct.unpack(
                "3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            if uid == 65534 and not is_api(end):  # the API is the host's
                raise Escape(
                    f"the peer of a socket of process {pid} is of nobody inside: pid {peer} uid "
                    f"{uid}"
                )
            try:
                pidfd = end.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
            except OSError:
                continue
            with open(f"/proc/self/fdinfo/{pidfd}") as file:
                number = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
            os.close(pidfd)
            # -1: it has ended; 0: outside.
            if not is_api(end) and (number == 0 or (number > 0 and number not in visible)):
                raise Escape(f"the peer of a socket of process {pid} is a process outside")
    return "none"


@attempt(
    "the API's socket gives a pidfd of the daemon: signals, descriptors, namespaces by it",
    {"refused", "ENOPROTOOPT"},
)
def pidfd_of_the_daemon() -> str:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(API)
        pidfd = end.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    tries = {
        "signal 0": (424, pidfd, 0, 0, 0),
        "SIGSTOP": (424, pidfd, 19, 0, 0),
        "SIGKILL": (424, pidfd, 9, 0, 4),
        "setns net": (308, pidfd, 0x40000000),
        "setns mnt": (308, pidfd, 0x20000),
        "process_mrelease": (448, pidfd, 0),
        "process_madvise": (440, pidfd, 0, 0, 21, 0),
        **{f"descriptor {number}": (PIDFD_GETFD, pidfd, number, 0) for number in range(64)},
        # PIDFD_GET_CGROUP_NAMESPACE to PIDFD_GET_UTS_NAMESPACE
        **{f"namespace {number}": (16, pidfd, 0xFF00 | number, 0) for number in range(1, 11)},
    }
    for what, words in tries.items():
        if call(*words) >= 0:
            raise Escape(what)
    return "refused"


@attempt("a descriptor of a session leads to a mount of the host", {"none"})
def files_of_sessions() -> str:
    with open("/proc/self/mountinfo") as file:
        mounts = {int(line.split()[0]) for line in file}
    for pid in others():
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for number in numbers:
            try:
                what = os.readlink(f"/proc/{pid}/fd/{number}")
                with open(f"/proc/{pid}/fdinfo/{number}") as file:
                    mount = next(
                        int(line.split()[1]) for line in file if line.startswith("mnt_id:")
                    )
            except OSError:
                continue
            if what.startswith("/") and not what.startswith("/memfd:") and mount not in mounts:
                raise Escape(f"process {pid} has {what} of a mount that is not here")
            if what.startswith(("/dev/loop", "/proc", "/sys/fs/cgroup")):
                raise Escape(f"process {pid} has {what}")
    return "none"


@attempt("a session has another namespace than process 1", {"none"})
def namespaces_of_sessions() -> str:
    own = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in os.listdir("/proc/self/ns")}
    for pid in others():
        for kind, space in own.items():
            try:
                if os.readlink(f"/proc/{pid}/ns/{kind}") != space:
                    raise Escape(f"process {pid} is in another namespace {kind}")
            except OSError:
                continue
    return "none"


@attempt("a session inherits keys of who started the daemon", {"none", "EPERM", "ENOSYS"})
def keys_of_sessions() -> str:
    try:
        with open("/proc/keys") as file:
            text = file.read()
    except OSError as error:
        return refused(error)
    if text.strip():
        raise Escape(text)
    return "none"


@attempt("a session has a capability that this one has not", {"none"})
def capabilities_of_sessions() -> str:
    def status(pid: int | str) -> dict[str, str]:
        with open(f"/proc/{pid}/status") as file:
            return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)

    own = int(status("self")["CapBnd"], 16)
    for pid in others():
        try:
            values = status(pid)
        except OSError:
            continue
        for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"):
            if int(values[name], 16) & ~own:
                raise Escape(f"process {pid}: {name} {values[name]}")
        if values.get("Seccomp") not in (None, "2"):
            raise Escape(f"process {pid} is without a filter of system calls")
    return "none"

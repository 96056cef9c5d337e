"""Identity of the other end of a connection, as reported by the kernel (NM-A.8, NM-C.5)."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nodepool.nodemanager.api.methods import (
    CERTIFICATE,
    CONTROLLER,
    DELEGATE,
    OTHER,
    ROOT,
    SLIVER,
    Caller,
)
from nodepool.nodemanager.client.texts import clean

#: The shared account of delegates without their own (C.5).
SHARED_DELEGATE = "nodepool-nm"
#: Hint for root or a launcher on a connection of another type.
UNTRUSTED = (
    "this connection does not grant rights of root or of a launcher; use the Unix socket "
    "of the host"
)

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NLMSG_ERROR = 4, 20, 1, 2
_HEADER = struct.Struct("=IHHII")
#: family, protocol, extensions, padding, states; then the addresses.
_DIAG_REQUEST = struct.Struct("=BBBxI")
_ADDRESSES = struct.Struct(">HH4s12s4s12s")
_TCP = 6
#: TCP states of a socket that still has its process and can send no more than before: established,
#: FIN sent.
_LIVING = (1, 4, 5)
#: For our own end: established, or the other end has finished sending.
_CONNECTED = (1, 8)

SliverOfUid = Callable[[int], "str | None"]
#: Returns the methods that a delegate may call for every sliver; None: there is no such delegate.
DelegateMethods = Callable[[str], "Collection[str] | None"]


class Identity:
    """Turns user ids and certificates into callers.

    :param sliver_of_uid: returns the sliver whose id range contains a user id of the host.
    :param delegate_methods: returns the methods that a delegate may call; None for other names.
    :param controllers: user ids of the host with the rights of launchers.
    :param delegate_shell: login shell of the delegates' own accounts; None: they have none.
    """

    def __init__(
        self,
        sliver_of_uid: SliverOfUid,
        delegate_methods: DelegateMethods,
        own_uid: int | None = None,
        controllers: Collection[int] = (),
        delegate_shell: str | None = None,
    ) -> None:
        self._sliver_of_uid = sliver_of_uid
        self._delegate_methods = delegate_methods
        self._controllers = frozenset(controllers)
        self._delegate_shell = delegate_shell
        # An ordinary user's node manager has no other root than its user.
        self._own_uid = os.geteuid() if own_uid is None else own_uid

    def trusted(self, uid: int) -> Caller | None:
        """Return root, or a controller of this host; None: anybody else."""
        if uid in (0, self._own_uid):
            return Caller(ROOT, "root")
        return Caller(CONTROLLER, f"uid {uid}") if uid in self._controllers else None

    def of_uid(self, uid: int, trust: bool = True) -> Caller:
        """Return the caller of the account with this user id; may query name services.

        :param trust: it may be root, or a controller.
        """
        found = self.trusted(uid)
        if found is not None and trust:
            return found
        sliver = self._sliver_of_uid(uid) if found is None else None
        if sliver is not None:
            return Caller(SLIVER, sliver)
        advice = "" if found is None else UNTRUSTED
        try:
            account = pwd.getpwuid(uid)
        except KeyError:
            return Caller(OTHER, f"uid {uid}", advice=advice)
        # By the shell: another account may have a delegate's name, and that delegate then gets no
        # account.
        if (
            account.pw_shell == self._delegate_shell
            and (delegate := self.forwarded(account.pw_name)) is not None
        ):
            return delegate
        return Caller(OTHER, clean(account.pw_name), advice=advice)

    @staticmethod
    def tcp_uid(connection: socket.socket) -> int | None:
        """Return the owner of the socket at the other end, on this host; None: none (any more)."""
        uid = socket_owner(connection.getpeername(), connection.getsockname())
        # The other end may be closed and its port reused by another process: then ours is not
        # connected any more either.
        return (
            uid
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _CONNECTED
            else None
        )

    def may_forward(self, caller: Caller) -> bool:
        """Return whether a caller may speak for delegates: the shell of the shared account."""
        return caller.kind == ROOT or (caller.kind == OTHER and caller.name == SHARED_DELEGATE)

    def forwarded(self, name: str) -> Caller | None:
        """Return the delegate of this name."""
        methods = self._delegate_methods(name)
        return None if methods is None else Caller(DELEGATE, name, frozenset(methods))

    @staticmethod
    def of_certificate(
        certificate: Mapping[str, Any] | None, controllers: Collection[str]
    ) -> Caller | None:
        """Return the caller by the names in a certificate; only listed ones are controllers."""
        names: list[str] = []
        subject = (certificate or {}).get("subject", ())
        for part in subject if isinstance(subject, tuple) else ():
            names += [value for key, value in part if key == "commonName"]
        alternatives = (certificate or {}).get("subjectAltName", ())
        for kind, value in alternatives if isinstance(alternatives, tuple) else ():
            if kind in ("DNS", "URI"):
                names.append(value)
        if not names:
            return None
        known = next((name for name in names if name in controllers), None)
        return (
            Caller(CONTROLLER, known) if known is not None else Caller(CERTIFICATE, clean(names[0]))
        )


def socket_owner(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Return the owner of the IPv4 TCP socket ``local`` -> ``remote`` while a process has it.

    Only this network namespace is searched. Both ends are compared: a socket created later from the
    same port does not match.
    """
    try:
        found = _diagnose(local, remote)
    except OSError:
        return _from_table(local, remote)
    if found is None:
        return None
    state, uid, inode = found
    # Without an inode no process has it any more, and the uid is meaningless.
    return uid if state in _LIVING and inode else None


def _diagnose(local: tuple[str, int], remote: tuple[str, int]) -> tuple[int, int, int] | None:
    """Return state, uid and inode, by one query to the kernel.

    :raises OSError: this kernel does not support such queries.
    """
    cookie = struct.pack("=II", 0xFFFFFFFF, 0xFFFFFFFF)
    question = (
        _DIAG_REQUEST.pack(socket.AF_INET, _TCP, 0, 0xFFFFFFFF)
        + _ADDRESSES.pack(
            local[1], remote[1], socket.inet_aton(local[0]), b"", socket.inet_aton(remote[0]), b""
        )
        + struct.pack("=I", 0)
        + cookie
    )
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as kernel:
        kernel.settimeout(2)
        kernel.send(
            _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
            + question
        )
        answer = kernel.recv(8192)
    _, kind, _, _, _ = _HEADER.unpack_from(answer)
    body = answer[_HEADER.size :]
    if kind == _NLMSG_ERROR:
        (code,) = struct.unpack_from("=i", body)
        if code == -2:  # ENOENT: no such socket
            return None
        raise OSError(-code, os.strerror(-code))
    # inet_diag_msg: family, state, timer, retransmissions; ports and addresses (48); expires,
    # rqueue, wqueue, uid, inode.
    uid, inode = struct.unpack_from("=II", body, 4 + 48 + 12)
    # The kernel may answer with a listener of that address.
    if _ADDRESSES.unpack_from(body, 4)[:2] != (local[1], remote[1]):
        return None
    return body[1], uid, inode


def _hexadecimal(address: tuple[str, int]) -> str:
    return f"{int.from_bytes(socket.inet_aton(address[0]), 'little'):08X}:{address[1]:04X}"


def _from_table(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    wanted = (_hexadecimal(local), _hexadecimal(remote))
    with open("/proc/net/tcp", encoding="ascii") as table:
        next(table)
        for line in table:
            fields = line.split()
            if (
                (fields[1], fields[2]) == wanted
                and int(fields[3], 16) in _LIVING
                and fields[9] != "0"
            ):
                return int(fields[7])
    return None

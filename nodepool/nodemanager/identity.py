"""Who is at the other end of a connection, as the kernel tells it (nodemanager.md A.8, C.5)."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from nodepool.nodemanager.api import CONTROLLER, DELEGATE, OTHER, ROOT, SLIVER, Caller

_UCRED = struct.Struct("iII")
#: The account that delegates share when they have none of their own (C.5).
SHARED_DELEGATE = "nodepool-nm"

SliverOfUid = Callable[[int], "str | None"]
IsDelegate = Callable[[str], bool]


class Identity:
    """Turns user ids and certificates into callers.

    :param sliver_of_uid: which sliver's range a user id of the host is in.
    :param is_delegate: whether a name is a delegate's.
    """

    def __init__(self, sliver_of_uid: SliverOfUid, is_delegate: IsDelegate, own_uid: int | None = None) -> None:
        self._sliver_of_uid = sliver_of_uid
        self._is_delegate = is_delegate
        # An ordinary user's node manager has no other root than its user.
        self._own_uid = os.geteuid() if own_uid is None else own_uid

    def of_uid(self, uid: int) -> Caller:
        if uid in (0, self._own_uid):
            return Caller(ROOT, "root")
        sliver = self._sliver_of_uid(uid)
        if sliver is not None:
            return Caller(SLIVER, sliver)
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            return Caller(OTHER, f"uid {uid}")
        return Caller(DELEGATE, name) if self._is_delegate(name) else Caller(OTHER, name)

    def of_unix(self, connection: socket.socket) -> Caller:
        """By the credentials that the kernel noted when the connection was made: a number used again later is no help."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _pid, uid, _gid = _UCRED.unpack(credentials)
        return self.of_uid(uid)

    def of_tcp(self, connection: socket.socket) -> Caller | None:
        """By the owner of the socket at the other end, on this host; None when there is none (any more)."""
        uid = socket_owner(connection.getpeername(), connection.getsockname())
        return None if uid is None else self.of_uid(uid)

    def may_forward(self, caller: Caller) -> bool:
        """Whether a caller may speak for a delegate: the forwarding shell of the shared account."""
        return caller.kind == ROOT or (caller.kind == OTHER and caller.name == SHARED_DELEGATE)

    def forwarded(self, name: str) -> Caller | None:
        """The delegate that the shared account speaks for."""
        return Caller(DELEGATE, name) if self._is_delegate(name) else None

    @staticmethod
    def of_certificate(certificate: Mapping[str, Any] | None, controllers: tuple[str, ...]) -> Caller | None:
        """By subject or alternative names of a verified certificate; with a list, only who is on it is a controller."""
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
        if not controllers:
            return Caller(CONTROLLER, names[0])
        known = next((name for name in names if name in controllers), None)
        return Caller(CONTROLLER, known) if known is not None else Caller(OTHER, names[0])


def _hexadecimal(address: tuple[str, int]) -> str:
    host = socket.inet_aton(address[0])
    return f"{int.from_bytes(host, 'little'):08X}:{address[1]:04X}"


def socket_owner(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Owner of the IPv4 TCP socket ``local`` -> ``remote`` of this network namespace, if it is established.

    Both ends are compared, so that a socket made later from the same port is not taken for it; one whose process has
    ended is in another state.
    """
    wanted = (_hexadecimal(local), _hexadecimal(remote))
    with open("/proc/net/tcp", encoding="ascii") as table:
        next(table)
        for line in table:
            fields = line.split()
            if (fields[1], fields[2]) == wanted and fields[3] == "01" and fields[9] != "0":
                return int(fields[7])
    return None

"""Roles and callers."""

from __future__ import annotations

import enum
import fnmatch
import http
from collections.abc import Mapping
from dataclasses import dataclass, field


class Role(enum.IntEnum):
    """What a caller may do; a higher role includes the lower ones."""

    #: See pages and lists.
    READ = 1
    #: Lease nodes, within limits.
    BORROW = 2
    #: Leases of others, nodes, requests, images; no limits.
    OPERATE = 3
    #: Tokens.
    ADMIN = 4

    @classmethod
    def of(cls, name: str) -> Role:
        return cls[name.upper()]


@dataclass(frozen=True)
class Identity:
    """A caller.

    :param owner: of the leases that the caller creates.
    :param via: how the caller was identified: ``unix:<uid>``, ``token:<id>``, ``oidc:<issuer>``,
        ``lease:<id>``, ``anonymous``.
    :param tenant: the only tenant of its leases; None: any.
    :param labels: patterns of labels that it may lease; empty: all.
    :param longest: seconds from now that a lease may last; None: no limit.
    :param per_owner: leases of this owner, held and waiting; None: no limit.
    :param lease: the caller has the token of this lease, and may use no other.
    :param expires: Unix time from which its token is not accepted; None: the token has no such
        time.
    """

    owner: str
    via: str
    role: Role
    tenant: str | None = None
    labels: tuple[str, ...] = ()
    longest: float | None = None
    per_owner: int | None = None
    lease: str | None = None
    expires: float | None = None

    def offers(self, label: str) -> bool:
        """Return whether the caller may lease this label."""
        return not self.labels or any(
            fnmatch.fnmatchcase(label, pattern) for pattern in self.labels
        )


@dataclass(frozen=True)
class Sender:
    """What a request shows of its sender.

    :param address: of the other end of the connection.
    :param uid: of a Unix socket's other end.
    :param headers: by their names in lower case.
    """

    address: str = ""
    uid: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """The other end of a connection.

    :param address: of the client, as reported by a named proxy if there is one.
    :param uid: of a Unix socket's other end.
    :param secure: others cannot read what is sent: this machine, or TLS up to a named proxy.
    """

    address: str
    uid: int | None
    secure: bool


class Denied(Exception):
    """The caller cannot be identified, or may not use this connection; the text is for users.

    :ivar code: ``unauthorized``, ``insecure``, ``not-allowed``, ``ended`` or ``busy``.
    """

    def __init__(self, status: http.HTTPStatus, code: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.code = code

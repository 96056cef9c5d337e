"""Identifies the caller of an HTTP request."""

from __future__ import annotations

import dataclasses
import grp
import http
import ipaddress
import os
import pwd
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from nodepool.access.identity import Denied, Identity, Peer, Role, Sender
from nodepool.access.tokens import LEASE_PREFIX, Tokens, same
from nodepool.config.access import AccessConfig
from nodepool.lease import Leases
from nodepool.zk.zookeeper import ZooKeeper

if TYPE_CHECKING:
    from nodepool.access.oidc import Verifiers


class Access:
    """The callers of one server.

    :param zk: returns the facade; may raise.
    :param config: returns the section ``access`` in force.
    :param changed: called with :attr:`Identity.via` when the record of a token has changed; on the
        thread that reports it.
    """

    def __init__(
        self,
        zk: Callable[[], ZooKeeper],
        config: Callable[[], AccessConfig],
        changed: Callable[[str], None] = lambda _via: None,
    ) -> None:
        self._zk = zk
        self._config = config
        self._tokens = Tokens(zk, changed=lambda token_id: changed(f"token:{token_id}"))
        self._verifiers: Verifiers | None = None

    # -- connections

    def peer(self, sender: Sender) -> Peer:
        """Return the other end of a connection; only named proxies may report another client."""
        if sender.uid is not None:
            return Peer("unix", sender.uid, True)
        address, headers = _address(sender.address), sender.headers
        if address is not None and any(address in network for network in self._config().networks):
            client = (
                _address(headers.get("x-forwarded-for", "").rpartition(",")[2].strip()) or address
            )
            return Peer(str(client), None, headers.get("x-forwarded-proto") == "https")
        # A proxy on this machine that is not named might forward what arrived unprotected.
        forwarded = "x-forwarded-for" in headers or "forwarded" in headers
        return Peer(
            str(address or "unknown"),
            None,
            address is not None and address.is_loopback and not forwarded,
        )

    # -- callers

    def identify(self, sender: Sender) -> Identity:
        """Return the caller.

        :raises Denied: its token is not valid, or would travel unprotected.
        """
        peer, header = self.peer(sender), sender.headers.get("authorization")
        if header is None:
            return (
                Identity("anonymous", "anonymous", Role.READ)
                if peer.uid is None
                else self._of_user(peer.uid)
            )
        if not peer.secure:
            text = (
                "Tokens are accepted from this machine, or over TLS through a proxy that is named "
                "in access: proxies. "
                "Replace this token: it has been sent unprotected"
            )
            raise Denied(http.HTTPStatus.FORBIDDEN, "insecure", text)
        scheme, _, token = header.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token.isascii():
            raise _invalid("Use `Authorization: Bearer TOKEN`")
        if token.startswith(LEASE_PREFIX):
            return self._of_lease(token)
        return self._of_job(token) if token.count(".") == 2 else self._of_token(token)

    def _of_user(self, uid: int) -> Identity:
        """Return a user of this machine."""
        if uid in (0, os.geteuid()):
            return Identity("root" if uid == 0 else _user(uid)[0], f"unix:{uid}", Role.ADMIN)
        (name, groups), users = _user(uid), self._config().users
        if name in users:
            role = Role.of(users[name])
        else:
            role = max(
                (Role.of(users[group]) for group in groups if group in users),
                default=Role.of(users.get("*", "read")),
            )
        return self._limited(Identity(name, f"unix:{uid}", role))

    def _of_token(self, text: str) -> Identity:
        token = self._tokens.find(text)
        if token is None:
            raise _invalid("The token is unknown, has expired, or was revoked")
        return self._limited(
            Identity(
                token.name,
                f"token:{token.id}",
                token.role,
                token.tenant,
                token.labels,
                token.longest,
                token.per_owner,
                expires=token.expires,
            )
        )

    def _of_lease(self, text: str) -> Identity:
        lease_id, _, secret = text.removeprefix(LEASE_PREFIX).partition("_")
        lease = Leases(self._zk()).get(lease_id)
        if lease is None:
            raise Denied(
                http.HTTPStatus.GONE, "ended", f"Lease {lease_id[:40]} does not exist, or has ended"
            )
        if not same(secret, lease.terms.secret):
            raise _invalid(
                f"The token of lease {lease.id} is not valid, or was replaced by a newer one"
            )
        return self._limited(
            Identity(
                lease.terms.owner,
                f"lease:{lease.id}",
                Role.BORROW,
                longest=lease.terms.longest,
                lease=lease.id,
            )
        )

    def _of_job(self, token: str) -> Identity:
        config = self._config()
        if not config.oidc:
            raise _invalid("Job tokens are not accepted: access: oidc is not configured")
        if self._verifiers is None or self._verifiers.issuers != config.oidc:
            from nodepool.access.oidc import Verifiers

            self._verifiers = Verifiers(config.oidc)
        return self._limited(self._verifiers.identify(token))

    def _limited(self, identity: Identity) -> Identity:
        """Return the caller with the limits for all, unless it has its own, or is an operator."""
        if identity.role >= Role.OPERATE:
            return identity
        limits = self._config().leases
        longest = limits.max if identity.longest is None else identity.longest
        per_owner = limits.per_owner if identity.per_owner is None else identity.per_owner
        return dataclasses.replace(identity, longest=longest, per_owner=per_owner)


def _invalid(text: str) -> Denied:
    return Denied(http.HTTPStatus.UNAUTHORIZED, "unauthorized", text)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found


def _user(uid: int) -> tuple[str, Iterable[str]]:
    """Return the name of a user, and its groups as ``@name``."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return f"uid{uid}", ()
    groups = set()
    for gid in os.getgrouplist(account.pw_name, account.pw_gid):
        try:
            groups.add(f"@{grp.getgrgid(gid).gr_name}")
        except KeyError:
            continue
    return account.pw_name, groups

"""Tokens of people and programs: ZooKeeper has only their hash."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kazoo.exceptions import NoNodeError
from kazoo.protocol.states import WatchedEvent

from nodepool.access.identity import Role
from nodepool.zk.reading import children
from nodepool.zk.zookeeper import ZooKeeper

ROOT = "/nodepool/api-tokens"
PREFIX, LEASE_PREFIX = "np_", "npl_"
#: Seconds for which a record is not read again: a revoked token is accepted at most that long.
FRESH = 1.0
MOST_CACHED = 1000
_TOKEN = re.compile(r"np_([0-9a-f]{8})_([A-Za-z0-9_-]{43})\Z")
#: No colon: owners of job tokens have one.
NAME = re.compile(r"[\w.@+-]{1,64}\Z", re.ASCII)


@dataclass(frozen=True)
class Token:
    """The record of a token; times are Unix seconds, ``longest`` is seconds."""

    id: str
    name: str
    sha256: str
    role: Role
    tenant: str | None = None
    labels: tuple[str, ...] = ()
    longest: float | None = None
    per_owner: int | None = None
    expires: float | None = None
    created: float = 0.0
    created_by: str = ""

    def stored(self) -> bytes:
        return json.dumps({**vars(self), "role": self.role.name.lower()}).encode()

    @classmethod
    def read(cls, token_id: str, data: bytes) -> Token | None:
        """Return the record; None: it is not one, and grants nothing."""
        try:
            found: dict[str, Any] = json.loads(data)
            numbers = [
                found[name]
                for name in ("longest", "per_owner", "expires")
                if found[name] is not None
            ]
            labels = found["labels"]
            if not all(isinstance(number, int | float) for number in numbers) or not isinstance(
                labels, list
            ):
                return None
            tenant = None if found["tenant"] is None else str(found["tenant"])
            return cls(
                token_id,
                str(found["name"]),
                str(found["sha256"]),
                Role.of(found["role"]),
                tenant,
                tuple(map(str, labels)),
                found["longest"],
                found["per_owner"],
                found["expires"],
                float(found["created"]),
                str(found["created_by"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def same(secret: str, sha256: str | None) -> bool:
    """Return whether a secret has this hash, in a time that does not depend on the secret."""
    return sha256 is not None and hmac.compare_digest(digest(secret), sha256)


class Tokens:
    """The tokens of a cluster.

    :param changed: called with the id of a token that was found, when its record has changed; on
        the thread of the client of ZooKeeper. After a lost connection, the token must be found
        again first.
    """

    def __init__(
        self,
        zk: Callable[[], ZooKeeper],
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        changed: Callable[[str], None] = lambda _token_id: None,
    ) -> None:
        self._zk = zk
        self._now = now
        self._monotonic = monotonic
        self._changed = changed
        self._cache: dict[str, tuple[float, Token | None]] = {}

    def create(
        self,
        name: str,
        role: Role,
        created_by: str = "",
        *,
        tenant: str | None = None,
        labels: tuple[str, ...] = (),
        longest: float | None = None,
        per_owner: int | None = None,
        expires: float | None = None,
    ) -> tuple[str, str]:
        """Return id and text of a new token; nobody can read the text again.

        :raises ValueError: the name is not valid.
        """
        if not NAME.match(name):
            raise ValueError(
                f"{name!r} is not a valid name: use up to 64 letters, digits and . _ @ + -"
            )
        token_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
        record = Token(
            token_id,
            name,
            digest(secret),
            role,
            tenant,
            labels,
            longest,
            per_owner,
            expires,
            self._now(),
            created_by,
        )
        self._zk().kazoo_client.create(f"{ROOT}/{token_id}", record.stored(), makepath=True)
        return token_id, f"{PREFIX}{token_id}_{secret}"

    def all(self) -> list[Token]:
        """Return the tokens that exist, by name."""
        found = [self._read(token_id) for token_id in children(self._zk().kazoo_client, ROOT)]
        return sorted(
            (token for token in found if token is not None),
            key=lambda token: (token.name, token.id),
        )

    def revoke(self, token_id: str) -> bool:
        """Delete a token; return False if there is none of this id."""
        with contextlib.suppress(NoNodeError):
            if re.fullmatch(r"[0-9a-f]{8}", token_id):
                self._zk().kazoo_client.delete(f"{ROOT}/{token_id}")
                return True
        return False

    def find(self, text: str) -> Token | None:
        """Return the token with this text, unless it is revoked or has expired."""
        found = _TOKEN.match(text)
        if found is None:
            return None
        token_id, secret = found.groups()
        known = self._cache.get(token_id)
        if known is None or self._monotonic() - known[0] >= FRESH:
            if len(self._cache) >= MOST_CACHED:
                self._cache = {}
            known = self._cache[token_id] = (self._monotonic(), self._read(token_id, self._note))
        token = known[1]
        valid = same(secret, None if token is None else token.sha256)
        return (
            token
            if token is not None
            and valid
            and (token.expires is None or self._now() < token.expires)
            else None
        )

    def _note(self, event: WatchedEvent) -> None:
        if event.path:  # None: the connection is lost
            self._changed(event.path.rpartition("/")[2])

    def _read(
        self, token_id: str, watch: Callable[[WatchedEvent], None] | None = None
    ) -> Token | None:
        try:
            data, _stat = self._zk().kazoo_client.get(f"{ROOT}/{token_id}", watch)
        except NoNodeError:
            return None
        return Token.read(token_id, data)

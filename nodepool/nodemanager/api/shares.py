"""Limits per caller of the API: connections, concurrent requests, processor time (NM-C.5).

Root and controllers are trusted.  Everybody else, slivers above all, is hostile: the daemon's
processor time is not billed to them, and they share one interpreter with the launchers that use
this host.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any

from nodepool.nodemanager.api.methods import CONTROLLER, OTHER, ROOT
from nodepool.nodemanager.bucket import Bucket
from nodepool.nodemanager.eventloop import Waiter

#: Connections by type of caller, each with its own quota.
PLACES = {ROOT: 256, CONTROLLER: 1024, OTHER: 512}
#: Quota of one untrusted caller.
MAX_PER_CALLER = 32
#: Concurrent requests by type of caller; one for each caller that is neither root nor controller.
CONCURRENCY = {ROOT: 32, CONTROLLER: 96, OTHER: 64}
#: Processor seconds of the daemon per second, and how many may be saved up: per untrusted caller,
#: and for all of them.
CALLER_TIME, CALLER_SAVED = 0.05, 0.5
ALL_TIME, ALL_SAVED = 0.25, 1.0


class Share(Waiter):
    """The share of one caller.

    :param key: sliver by number, user id, or name in a certificate.
    :param again: called when the caller has processor time again.
    """

    def __init__(self, key: Hashable, kind: str, again: Callable[[Share], None]) -> None:
        super().__init__()
        self._again = again
        self.key = key
        self.kind = kind
        self.time = Bucket(CALLER_TIME, CALLER_SAVED) if kind == OTHER else None
        #: Oldest first.
        self.connections: dict[Any, None] = {}
        #: Connections whose request is complete.
        self.requests: deque[Any] = deque()
        #: Connections that are not read until there is processor time again.
        self.held: list[Any] = []
        #: Speakers whose requests are being answered: delegates share an account, but do not block
        #: each other.
        self.speaking: set[str] = set()
        #: It is in the queue of shares with requests.
        self.queued = False
        #: When the lack of free connections was last logged.
        self.told = float("-inf")

    def __str__(self) -> str:
        return (
            " ".join(str(part) for part in self.key)
            if isinstance(self.key, tuple)
            else str(self.key)
        )

    def late(self) -> None:
        self._again(self)

    def next(self) -> Any | None:
        """Return the next connection whose request may be answered now."""
        if self.kind != OTHER:
            return self.requests.popleft() if self.requests else None
        for place, connection in enumerate(self.requests):
            if connection.speaker not in self.speaking:
                del self.requests[place]
                self.speaking.add(connection.speaker)
                connection.speaking = True
                return connection
        return None

    def use(self, seconds: float, everybody: Bucket) -> None:
        if self.time is not None:
            self.time.use(seconds)
            everybody.use(seconds)

    def wait(self, everybody: Bucket) -> float:
        """Return the seconds until this caller has processor time."""
        return 0.0 if self.time is None else max(self.time.wait(), everybody.wait())

    @property
    def idle(self) -> bool:
        """Whether nothing is lost if it is dropped."""
        return not self.connections and self.due is None and (self.time is None or self.time.full)


class Shares:
    """The shares of all callers.

    :param again: called when a caller has processor time again.
    """

    def __init__(self, again: Callable[[Share], None]) -> None:
        self._again = again
        #: Guards data that other threads use, too: shares and their connections.
        self.lock = threading.Lock()
        self.known: dict[Hashable, Share] = {}
        self._prune_at = 256
        #: Number of connections by type of caller.
        self.open: Counter[str] = Counter()
        self.everybody = Bucket(ALL_TIME, ALL_SAVED)

    def of(self, key: Hashable, kind: str) -> Share:
        """Return the share of a caller; call it with the lock."""
        share = self.known.get(key)
        if share is None:
            if len(self.known) >= self._prune_at:
                self.known = {key: share for key, share in self.known.items() if not share.idle}
                self._prune_at = max(256, 2 * len(self.known))
            share = self.known[key] = Share(key, kind, self._again)
        return share

    def charge(self, key: Hashable, seconds: float) -> tuple[float, float]:
        """Charge a caller; return the waiting times of it and of all untrusted callers."""
        share = self.known.get(key)
        if share is None or share.time is None:
            return 0.0, 0.0
        share.use(seconds, self.everybody)
        return share.time.wait(), self.everybody.wait()

    def connections(self) -> list[Any]:
        """Return all connections."""
        with self.lock:
            return [connection for share in self.known.values() for connection in share.connections]

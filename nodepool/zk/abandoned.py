"""Locks of ours that nobody answers for any more.

When the connection breaks, the outcome of a write is unknown, but the session (and with it every lock it holds) may
live on.  Whoever wanted to take or to give back a lock at that moment leaves it here; it is removed as soon as the
server can be asked again.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Delete, GetChildren2, Sync
from kazoo.protocol.states import KazooState

if TYPE_CHECKING:
    from nodepool.zk.protocol import Client

log = logging.getLogger("nodepool.zk.locks")


class AbandonedLocks:
    """Paths of contenders, or their unique beginnings, that are to vanish; thread-safe, one per client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._paths: set[str] = set()
        client.add_listener(self._state_changed)

    def add(self, path: str) -> None:
        """Remove this contender (or all whose path begins so) now, or after the next reconnect."""
        with self._lock:
            self._paths.add(path)
        if self._client.state == KazooState.CONNECTED:
            self._look(path)

    def _state_changed(self, state: str) -> None:
        with self._lock:
            if state == KazooState.LOST:
                self._paths.clear()  # they were ephemeral
            waiting = sorted(self._paths)
        if state == KazooState.CONNECTED:
            for path in waiting:
                self._look(path)

    def _look(self, path: str) -> None:
        from nodepool.zk.protocol import Reply

        client = self._client
        directory, _, start = path.rpartition("/")

        def listed(result: Any, error: BaseException | None, _zxid: int) -> None:
            if isinstance(error, NoNodeError):
                self._done(path)
            elif error is None:
                names = [name for name in result[0] if name.startswith(start)]
                for name in names:
                    log.info("Giving back %s/%s, left over from a broken connection", directory, name)
                    client.submit(Delete(client.full_path(f"{directory}/{name}"), -1), Reply(deleted))
                if not names:
                    self._done(path)

        def deleted(_result: Any, error: BaseException | None, _zxid: int) -> None:
            if error is None or isinstance(error, NoNodeError):
                self._done(path)

        # Another server may not know yet what the one before it has done for us.
        client.submit(Sync(client.full_path(directory)), None)
        client.submit(GetChildren2(client.full_path(directory), None), Reply(listed))

    def _done(self, path: str) -> None:
        with self._lock:
            self._paths.discard(path)

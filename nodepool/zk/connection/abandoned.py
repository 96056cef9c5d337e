"""Locks of ours without an owner in this process.

When the connection breaks, the result of a write is unknown, but the session (and with it every
lock it holds) may continue. A lock that was being acquired or released at that moment is recorded
here, and deleted as soon as the server can be asked again. Entries of other clients with the same
name are kept.
"""

from __future__ import annotations

import logging
import re
import threading

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Delete, Exists, GetChildren2, Sync
from kazoo.protocol.states import KazooState, ZnodeStat

from nodepool.zk.connection.reply import Reply

log = logging.getLogger("nodepool.zk.locks")


class AbandonedLocks:
    """Paths of contenders to delete, with or without sequence number.

    Thread-safe; one per client.
    """

    def __init__(self, client: KazooClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        #: path -> whether it ends with our session.
        self._paths: dict[str, bool] = {}
        client.add_listener(self._state_changed)

    def add(self, path: str, ephemeral: bool = True) -> None:
        """Delete this contender now, or after the next reconnect.

        Without its number: all contenders with this name.

        :param ephemeral: False for one that was meant to outlive our session.
        """
        with self._lock:
            self._paths[path] = ephemeral
        if self._client.state == KazooState.CONNECTED:
            self._check(path)

    def _state_changed(self, state: str) -> None:
        with self._lock:
            if state == KazooState.LOST:
                self._paths = {
                    path: ephemeral for path, ephemeral in self._paths.items() if not ephemeral
                }
            waiting = sorted(self._paths)
        if state == KazooState.CONNECTED:
            for path in waiting:
                self._check(path)

    def _check(self, path: str) -> None:
        client = self._client
        directory, _, start = path.rpartition("/")

        def listed(
            result: tuple[list[str], ZnodeStat], error: BaseException | None, _zxid: int
        ) -> None:
            if isinstance(error, NoNodeError):
                self.forget(path)
            elif error is None:
                # The server appends ten digits to the names of sequential znodes.
                names = [
                    name
                    for name in result[0]
                    if re.fullmatch(rf"{re.escape(start)}([0-9]{{10}})?", name)
                ]
                for name in names:
                    self._remove_own(path, f"{directory}/{name}")
                if not names:
                    self.forget(path)

        # This server may not know yet what the previous one has done for us.
        client.submit(Sync(client.full_path(directory)), None)
        client.submit(GetChildren2(client.full_path(directory), None), Reply(listed))

    def _remove_own(self, path: str, found: str) -> None:
        client = self._client

        def deleted(_result: object, error: BaseException | None, _zxid: int) -> None:
            if error is None or isinstance(error, NoNodeError):
                self.forget(path)

        def looked(stat: ZnodeStat, error: BaseException | None, _zxid: int) -> None:
            if error is not None:
                return
            client_id = client.client_id
            with self._lock:
                ephemeral = self._paths.get(path)
            if ephemeral is None or client_id is None:
                return
            if stat is None or stat.ephemeralOwner != (client_id[0] if ephemeral else 0):
                self.forget(path)
            else:
                log.info("Releasing %s, left over from a broken connection", found)
                client.submit(Delete(client.full_path(found), -1), Reply(deleted))

        client.submit(Exists(client.full_path(found), None), Reply(looked))

    def forget(self, path: str) -> None:
        """Forget the path: nothing is left under this name, or it was acquired again."""
        with self._lock:
            self._paths.pop(path, None)

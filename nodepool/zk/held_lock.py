"""Locks that are held for hours, over lost sessions if need be (builder.md section 17)."""

from __future__ import annotations

import logging
import threading

from kazoo.exceptions import KazooException

from nodepool.exceptions import TimeoutException, ZKLockException
from nodepool.zk import locks
from nodepool.zk.client import ZooKeeperClient
from nodepool.zk.locks import LockHandle

#: Seconds.
REGAIN_TIMEOUT = 5.0

log = logging.getLogger("nodepool.zk.locks")


class HeldLock:
    """A lock of ours, taken without waiting.

    :param record: the znode that must exist for the lock to be taken; None: parents are made.
    :raises ZKLockException: somebody else holds it, or the record is gone.
    """

    def __init__(self, client: ZooKeeperClient, directory: str, record: str | None = None) -> None:
        self._client = client
        self.directory = directory
        self._record = record
        self._guard = threading.Lock()
        self._handle: LockHandle | None = None
        self._released = False
        #: Whether it was without us for a time: what others did meanwhile must be looked at.
        self.regained = False
        self._take(None)

    def _take(self, timeout: float | None) -> None:
        kazoo = self._client.client
        if kazoo is None:
            raise ZKLockException(f"Did not get lock on {self.directory}: not connected")
        self._handle = locks.acquire(kazoo, self.directory, self._record, blocking=timeout is not None, timeout=timeout)

    @property
    def held(self) -> bool:
        """Whether our contender lives in the present session; False while there is none."""
        return self._handle is not None and self._handle.session_id == self._client.session_id

    def regain(self) -> bool:
        """Take the lock again after its session was lost; False when somebody else was faster."""
        with self._guard:
            if self.held:
                return True
            if self._released:
                return False
            try:
                # A moment's patience: somebody may only be looking whether we still hold it.
                self._take(REGAIN_TIMEOUT)
            except (ZKLockException, TimeoutException, KazooException) as error:
                log.info("Cannot take %s again: %s", self.directory, error)
                return False
            self.regained = True
            log.info("Took %s again after the ZooKeeper session was lost", self.directory)
            return True

    def release(self) -> None:
        """Give it back; in a lost session it is gone already."""
        with self._guard:
            self._released = True
            handle, self._handle = self._handle, None
        kazoo = self._client.client
        if handle is None or kazoo is None:
            return
        if not self._client.connected:
            # A call would wait for the server.
            kazoo.abandoned.add(handle.path)
            return
        try:
            locks.release(kazoo, handle)
        except KazooException as error:
            kazoo.abandoned.add(handle.path)
            log.warning("Cannot give back %s now: %r", self.directory, error)

"""Locks that are held for hours, over lost sessions if need be (BLD-17)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import KazooException

from nodepool.exceptions import TimeoutException, ZKException, ZKLockException
from nodepool.zk import locks
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.locks import LockHandle

#: Seconds.
REGAIN_TIMEOUT = 5.0

#: Seconds between two looks whether to wait any longer for a session, and attempts to store a result.
SESSION_WAIT, STORE_ATTEMPTS = 3.0, 10

log = logging.getLogger("nodepool.zk.locks")


class Lost(Exception):
    """The result cannot be stored: another client has the lock, or ZooKeeper does not come back."""


class HeldLock:
    """A lock of ours, taken without waiting.

    :param record: the znode that must exist for the lock to be taken; None: parents are made.
    :raises ZKLockException: another client holds it, or the record is gone.
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
        handle = self._handle  # read once: another thread may release the lock
        return handle is not None and handle.session_id == self._client.session_id

    def regain(self) -> bool:
        """Take the lock again after its session was lost; False when another client was faster."""
        with self._guard:
            if self.held:
                return True
            if self._released:
                return False
            try:
                # A moment's patience: another client may only be looking whether we still hold it.
                self._take(REGAIN_TIMEOUT)
            except (ZKLockException, TimeoutException, KazooException) as error:
                log.info("Cannot take %s again: %s", self.directory, error)
                return False
            self.regained = True
            log.info("Re-acquired lock %s after the ZooKeeper session was lost", self.directory)
            return True

    def store(self, write: Callable[[], Any], usable: threading.Event, going_on: Callable[[], bool]) -> None:
        """Write a result with the lock held, as soon as the session allows.

        :param write: looks itself at what others did, when :attr:`regained`.
        :param usable: set while the session is good.
        :param going_on: False: no longer than a moment is left to wait for it.
        :raises Lost: it cannot be written.
        """
        said = False
        for attempt in range(STORE_ATTEMPTS):
            while not usable.is_set():
                if not said:
                    log.info("Waiting for the ZooKeeper session to store the result under %s", self.directory)
                said = True
                usable.wait(SESSION_WAIT)
                if not usable.is_set() and not going_on():
                    raise Lost("ZooKeeper did not come back before the builder stopped")
            if self._client.client is None:
                raise Lost("the builder has stopped")
            try:
                if self.held or self.regain():
                    write()
                    return
                if usable.is_set():
                    raise Lost("the ZooKeeper session was lost and the lock cannot be taken again")
            except ZKException as error:
                raise Lost(str(error)) from error
            except KazooException as error:
                if attempt + 1 == STORE_ATTEMPTS:
                    raise Lost(f"ZooKeeper: {error!r}") from error
                log.warning("Cannot store the result under %s now: %r", self.directory, error)
                if going_on():
                    # The connection knows of its trouble a moment later than we do.
                    threading.Event().wait(0.5)
        raise Lost("the ZooKeeper session was lost again and again")

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
            log.warning("Lock %s is not released yet: %r; it is when the connection is back", self.directory, error)

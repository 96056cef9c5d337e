"""Locks that are held for hours, even over lost sessions (BLD-17)."""

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

#: Seconds between two checks whether to wait any longer for a session, and between attempts to
#: store a result.
SESSION_WAIT, STORE_ATTEMPTS = 3.0, 10

log = logging.getLogger("nodepool.zk.locks")


class Lost(Exception):
    """The result cannot be stored: the lock is lost, or ZooKeeper is not available."""


class HeldLock:
    """A lock of ours, acquired without waiting.

    :param record: the znode that must exist for the lock to be acquired; None: parents are created.
    :raises ZKLockException: another client holds it, or the record no longer exists.
    """

    def __init__(self, client: ZooKeeperClient, directory: str, record: str | None = None) -> None:
        self._client = client
        self.directory = directory
        self._record = record
        self._guard = threading.Lock()
        self._handle: LockHandle | None = None
        self._released = False
        #: Whether the lock was lost for a while: actions of others in that time must be checked.
        self.regained = False
        self._take(None)

    def _take(self, timeout: float | None) -> None:
        kazoo = self._client.client
        if kazoo is None:
            raise ZKLockException(f"Did not get lock on {self.directory}: not connected")
        self._handle = locks.acquire(
            kazoo, self.directory, self._record, blocking=timeout is not None, timeout=timeout
        )

    @property
    def held(self) -> bool:
        """Return whether our contender exists in the present session; False without a session."""
        handle = self._handle  # read once: another thread may release the lock
        return handle is not None and handle.session_id == self._client.session_id

    def regain(self) -> bool:
        """Acquire the lock after its session was lost; return False if another client was
        faster.
        """
        with self._guard:
            if self.held:
                return True
            if self._released:
                return False
            try:
                # Wait a moment: another client may only be checking whether we still hold it.
                self._take(REGAIN_TIMEOUT)
            except (ZKLockException, TimeoutException, KazooException) as error:
                log.info("Cannot acquire %s again: %s", self.directory, error)
                return False
            self.regained = True
            log.info("Re-acquired lock %s after the ZooKeeper session was lost", self.directory)
            return True

    def store(
        self, write: Callable[[str], Any], usable: threading.Event, going_on: Callable[[], bool]
    ) -> None:
        """Write a result with the lock held, as soon as the session allows.

        :param write: gets the path of our contender, without which it must raise
            :class:`.ContenderGone`; checks itself what others did if :attr:`regained`.
        :param usable: set while the session is usable.
        :param going_on: returns False if there is only a moment left to wait.
        :raises Lost: it cannot be written.
        """
        said = False
        for attempt in range(STORE_ATTEMPTS):
            while not usable.is_set():
                if not said:
                    log.info(
                        "Waiting for the ZooKeeper session to store the result under %s",
                        self.directory,
                    )
                said = True
                usable.wait(SESSION_WAIT)
                if not usable.is_set() and not going_on():
                    raise Lost("ZooKeeper did not become available before the builder stopped")
            if self._client.client is None:
                raise Lost("the builder has stopped")
            try:
                handle = self._handle
                if handle is not None and self.held:
                    write(handle.path)
                    return
                if self.regain():
                    continue
                if usable.is_set():
                    raise Lost(
                        "the ZooKeeper session was lost and the lock cannot be acquired again"
                    )
            except locks.ContenderGone as error:
                log.warning("Lock %s is lost: %s", self.directory, error)
                with self._guard:
                    self._handle = None
            except ZKException as error:
                raise Lost(str(error)) from error
            except (KazooException, TimeoutError) as error:
                if attempt + 1 == STORE_ATTEMPTS:
                    raise Lost(f"ZooKeeper: {error!r}") from error
                log.warning("Cannot store the result under %s now: %r", self.directory, error)
                if going_on():
                    # The connection notices its loss a moment later than we do.
                    threading.Event().wait(0.5)
        raise Lost("the ZooKeeper session was lost repeatedly")

    def release(self) -> None:
        """Release the lock; in a lost session it does not exist any more."""
        with self._guard:
            self._released = True
            handle, self._handle = self._handle, None
        kazoo = self._client.client
        if handle is not None and kazoo is not None:
            locks.release(kazoo, handle)

"""Ends the session of a killed process, so that its locks end before the time-out.

Id and password of the session are stored in a file that only its owner can read. A lock on the open
file, which the kernel releases when the process dies, distinguishes a dead owner from a running
one. For processes on another machine or before a reboot this is unknown, since a volume may be
mounted elsewhere: such a session ends by its time-out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import KazooException
from kazoo.handlers.threading import KazooTimeoutError

from nodepool.base.boot import boot_id
from nodepool.base.files import lock_file

log = logging.getLogger("nodepool.zk.ZooKeeperClient")

#: Identifies the running kernel; containers see the same as their machine.
#: Seconds to reach ZooKeeper for ending the old session.
TIMEOUT = 5.0


class SessionFile:
    """Stores the present session for the next process.

    :param path: file; its directory must be writable (the last part of it is created), otherwise
        nothing is stored.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self) -> dict[str, Any] | None:
        """Become the owner; return the stored session if its owner was killed."""
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(self.path), 0o700)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.info(
                "Cannot store the ZooKeeper session in %s (%s): if this process is killed, its "
                "locks remain until "
                "the session times out",
                self.path,
                error.strerror,
            )
            return None
        try:
            lock_file(fd)
        except OSError:
            os.close(fd)  # in use
            return None
        os.fchmod(fd, 0o600)
        self._fd = fd
        try:
            value = json.loads(os.pread(fd, 4096, 0) or b"null")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            return None
        if not value.get("boot") or value["boot"] != boot_id():
            log.info(
                "The previous process ran on another machine or before a reboot; its session ends "
                "by its time-out"
            )
            return None
        return value

    def remember(self, hosts: str, client_id: tuple[int, bytes]) -> None:
        self._write(
            json.dumps(
                {
                    "hosts": hosts,
                    "id": client_id[0],
                    "password": client_id[1].hex(),
                    "boot": boot_id(),
                }
            ).encode()
        )

    def release(self, ended: bool) -> None:
        """Let the next process become the owner.

        :param ended: the session was; otherwise the next process ends it.
        """
        if ended:
            self._write(b"")
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            return
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)
        except OSError as error:
            log.warning("Cannot store the session in %s: %s", self.path, error.strerror)


def end_session(
    old: dict[str, Any], hosts: str, make_client: Callable[[tuple[int, bytes]], Any]
) -> None:
    """Close the session of a dead process; if that is impossible, it ends by its time-out."""
    try:
        if old["hosts"] != hosts:
            return
        client_id = (int(old["id"]), bytes.fromhex(old["password"]))
    except (KeyError, TypeError, ValueError):
        return
    client = make_client(client_id)
    try:
        client.start(timeout=TIMEOUT)
        resumed = client.client_id is not None and client.client_id[0] == client_id[0]
        client.stop()
        client.close()
    except (KazooException, KazooTimeoutError, OSError) as error:
        log.warning(
            "Cannot end the session of the previous process: %r; it ends by its time-out", error
        )
        return
    if resumed:
        log.info("Ended the session of the previous process, which was killed")

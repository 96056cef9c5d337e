"""Ends the session that a killed process has left behind, so that its locks do not outlive it until the time-out.

The session's id and password are kept in a file that only its owner can read.  A lock on the open file, which the
kernel gives back when the process dies, tells a dead owner from a living one.  Of what ran on another machine, or before
this one was started anew, that cannot be known (a volume may be mounted elsewhere): such a session is left to its time-out.
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

#: Names the running kernel; containers see the same as their machine.
#: Seconds to reach ZooKeeper for ending the old session.
TIMEOUT = 5.0


class SessionFile:
    """Remembers the present session for the next process.

    :param path: where; its directory must be writable (the last part of it is made), else nothing is remembered.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self) -> dict[str, Any] | None:
        """Become the owner; returns what the last owner remembered, if it is dead and has not ended in order."""
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(self.path), 0o700)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.info(
                "The ZooKeeper session cannot be remembered in %s (%s): when this process is killed, its locks stay until "
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
                "The last process ran on another machine, or before this one was started anew: its session ends by its time-out"
            )
            return None
        return value

    def remember(self, hosts: str, client_id: tuple[int, bytes]) -> None:
        """The session in use now."""
        self._write(json.dumps({"hosts": hosts, "id": client_id[0], "password": client_id[1].hex(), "boot": boot_id()}).encode())

    def release(self) -> None:
        """The session was ended in order."""
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
            log.warning("Cannot remember the session in %s: %s", self.path, error.strerror)


def end_session(old: dict[str, Any], hosts: str, make_client: Callable[[tuple[int, bytes]], Any]) -> bool:
    """Close a dead process's session; False when that was not possible (it then ends by its time-out)."""
    try:
        if old["hosts"] != hosts:
            return False
        client_id = (int(old["id"]), bytes.fromhex(old["password"]))
    except (KeyError, TypeError, ValueError):
        return False
    client = make_client(client_id)
    try:
        client.start(timeout=TIMEOUT)
        resumed = client.client_id is not None and client.client_id[0] == client_id[0]
        client.stop()
        client.close()
    except (KazooException, KazooTimeoutError, OSError) as error:
        log.warning("Cannot end the session of the last process: %r; it ends by its time-out", error)
        return False
    if resumed:
        log.info("Ended the session of the last process, which was killed")
    return bool(resumed)

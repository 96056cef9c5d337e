"""Locks on ZooKeeper records: compatible with kazoo's recipe (ZK-6)."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import uuid
from dataclasses import dataclass

from kazoo.exceptions import (
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
)
from kazoo.protocol.states import KazooState

from nodepool.base import hostnames
from nodepool.exceptions import NOT_PERMITTED, TimeoutException, ZKException, ZKLockException
from nodepool.zk import paths
from nodepool.zk.connection.protocol import SessionClient
from nodepool.zk.reading import children
from nodepool.zk.writer import Txn

log = logging.getLogger("nodepool.zk.locks")


@dataclass(frozen=True, slots=True)
class LockHandle:
    """A lock that we hold: the path of our contender and its session."""

    directory: str
    path: str
    session_id: int | None
    ephemeral: bool = True


class ContenderGone(ZKException):
    """Nothing was written, because our contender for the lock does not exist any more."""


def contender_prefix(directory: str) -> str:
    return f"{directory}/{uuid.uuid4().hex}__lock__"


def _our_name() -> str:
    """Return the identifier of this process, which ``nodepool explain`` shows."""
    return f"{sys.argv[0].rpartition('/')[2]} on {hostnames.short()} (process {os.getpid()})"


def add_lock(txn: Txn, directory: str, exists: bool, owner: str = "") -> int:
    """Acquire the lock in a transaction; return the index of the result with our contender.

    The lock ends with our session, unless an owner is given.
    The directory is created, which ZooKeeper refuses if anybody contends: the transaction succeeds
    only as the sole holder.
    """
    if exists:
        txn.delete(directory)
    txn.create(directory)
    return txn.create(
        contender_prefix(directory),
        (owner or _our_name()).encode(),
        ephemeral=not owner,
        sequence=True,
    )


def add_unlocked_check(txn: Txn, directory: str, exists: bool) -> None:
    """Let the transaction succeed only if the lock is free then; no directory remains."""
    if not exists:
        txn.create(directory)
    txn.delete(directory)


def acquire(
    client: SessionClient,
    directory: str,
    record: str | None,
    blocking: bool = True,
    timeout: float | None = None,
    ephemeral: bool = True,
    identifier: str | None = None,
) -> LockHandle:
    """Acquire a lock.

    :param record: the znode that must exist; without it the lock is not acquired (and nothing
        created).
    :param timeout: seconds to wait when blocking; None waits as long as the session lives.
    :param identifier: of the holder, for others; default: program, host and process.
    :raises ZKLockException: another client holds it (not blocking), or the record no longer exists.
    :raises TimeoutException: not obtained in time.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    if not blocking and names_in_order(client, directory):
        # A contender would make the holder's recursive delete of the directory fail.
        raise ZKLockException(f"Did not get lock on {directory}")
    path = _enter(client, directory, record, ephemeral, (identifier or _our_name()).encode("utf8"))
    name = path.rsplit("/", 1)[1]
    try:
        while True:
            ahead = names_in_order(client, directory)
            if name not in ahead:
                raise ZKLockException(
                    f"Did not get lock on {directory}: our place in the queue was deleted "
                    "concurrently"
                )
            place = ahead.index(name)
            if place == 0:
                client_id = client.client_id
                return LockHandle(directory, path, client_id[0] if client_id else None, ephemeral)
            if not blocking:
                raise ZKLockException(f"Did not get lock on {directory}")
            gone = threading.Event()
            if (
                client.exists(
                    f"{directory}/{ahead[place - 1]}", watch=lambda _event, gone=gone: gone.set()
                )
                is None
            ):
                continue
            left = 3600.0 if deadline is None else deadline - time.monotonic()
            if (left <= 0 or not gone.wait(left)) and deadline is not None:
                raise TimeoutException(f"Timeout trying to acquire lock {directory}")
    except BaseException:
        withdraw(client, path, ephemeral)
        raise


def _enter(
    client: SessionClient, directory: str, record: str | None, ephemeral: bool, data: bytes
) -> str:
    prefix = contender_prefix(directory)
    make_directory = False
    for _attempt in range(20):
        txn = client.transaction()
        if record is not None:
            txn.check(record, -1)
        if make_directory:
            txn.create(directory)
        txn.create(prefix, data, ephemeral=ephemeral, sequence=True)
        try:
            results = txn.commit()
        except ConnectionLoss:
            client.abandoned.add(prefix, ephemeral)  # the contender may exist
            raise
        problem = next((r for r in results if isinstance(r, (NoNodeError, NodeExistsError))), None)
        if isinstance(results[-1], str):
            return str(results[-1])
        if record is not None and isinstance(results[0], NoNodeError):
            raise ZKLockException(f"Did not get lock on {directory}: {record} does not exist")
        if isinstance(problem, NodeExistsError):
            make_directory = False
        elif isinstance(problem, NoNodeError):
            if make_directory or record is None:  # the parents of the directory are missing
                client.ensure_path(directory)
                make_directory = False
            else:
                make_directory = True
        else:
            refused = any(isinstance(each, NoAuthError) for each in results)
            why = NOT_PERMITTED if refused else results
            raise ZKLockException(f"Did not get lock on {directory}: {why}")
    raise ZKLockException(f"Did not get lock on {directory}: it keeps changing")


def withdraw(client: SessionClient, path: str, ephemeral: bool = True) -> None:
    """Delete a contender or another mark of ours; at the latest after the next reconnect."""
    if client.state != KazooState.CONNECTED:
        client.abandoned.add(path, ephemeral)  # a call would wait for the server
        return
    try:
        client.delete(path)
    except NoNodeError:
        pass
    except KazooException as error:
        log.warning("Cannot delete %s now: %r; it is deleted after the reconnect", path, error)
        client.abandoned.add(path, ephemeral)


def release(client: SessionClient, handle: LockHandle) -> None:
    """Release a lock, if it exists; at the latest after the next reconnect."""
    withdraw(client, handle.path, handle.ephemeral)


def names_in_order(client: SessionClient, directory: str) -> list[str]:
    """Return the contenders, holder first."""
    names = children(client, directory)
    numbered = sorted(
        (n, name) for name in names if (n := paths.contender_number(name)) is not None
    )
    return [name for _, name in numbered]

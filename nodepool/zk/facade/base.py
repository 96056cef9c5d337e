"""Shared parts of the ZooKeeper facade."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from kazoo.exceptions import (
    ConnectionLoss,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
)
from kazoo.protocol.states import ZnodeStat

from nodepool.exceptions import ZKLockException
from nodepool.zk import locks, paths
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.connection.protocol import SessionClient
from nodepool.zk.mirror.feed import Mirror
from nodepool.zk.mirror.nodes import NodeTree
from nodepool.zk.mirror.requests import RequestTree
from nodepool.zk.mirror.reservations import Reservations
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.reading import TIMEOUT, answers, children
from nodepool.zk.records import BaseModel, Node, NodeRequest, parse_object
from nodepool.zk.writer import TransactionFailed, Txn, Writer

#: Attempts to delete a record that other clients contend for.
DELETE_ATTEMPTS = 10

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T", bound=Tree[Any])
C = TypeVar("C", Node, NodeRequest)


class FacadeBase(Mirror):
    log = logging.getLogger("nodepool.zk.ZooKeeper")
    client: ZooKeeperClient
    enable_cache: bool
    _writer: Writer | None
    reservations: Reservations

    @property
    def kazoo_client(self) -> SessionClient:
        """Return kazoo's client object.

        :raises RuntimeError: not connected yet.
        """
        return self.client.kazoo

    @property
    def writer(self) -> Writer:
        """Return the writer of asynchronous transactions on the present client."""
        client = self.kazoo_client
        if self._writer is None or self._writer._client is not client:
            self._writer = Writer(client)
        return self._writer

    def _children(self, path: str) -> list[str]:
        return children(self.kazoo_client, path)

    def _get_many(self, wanted: Iterable[str]) -> Iterator[tuple[str, tuple[bytes, ZnodeStat]]]:
        """Read many znodes, pipelined; deleted ones are omitted."""
        return answers(self.kazoo_client.get_async, wanted)

    def _complete(self, tree: T | None, kind: Callable[[ZooKeeperClient], T]) -> T:
        """Return the mirror if it is complete, else a copy of the tree that is read now.

        :raises KazooException: no connection, or no answer in time.
        """
        if tree is not None and tree.synced.is_set():
            return tree
        if not self.client.connected:
            raise ConnectionLoss("not connected to ZooKeeper")
        found = kind(self.client)
        found.start()
        try:
            if not found.synced.wait(TIMEOUT):
                raise OperationTimeoutError(f"{found.root} was not read within {TIMEOUT:g} s")
        finally:
            found.stop()
        return found

    def _delete(self, path: str, allowed: Callable[[], bool] = lambda: True) -> bool:
        """Delete a record with everything below it; return False if it may not be deleted.

        If other clients start to contend for its lock at the same time, the deletion is repeated.
        """
        attempts = 0
        while allowed():
            try:
                self.kazoo_client.delete(path, recursive=True)
            except NoNodeError:
                pass
            except NotEmptyError:
                attempts += 1
                if attempts == DELETE_ATTEMPTS:
                    raise
                continue
            return True
        return False

    # -- records

    def _parse(
        self, kind: type[R], path: str, read: tuple[bytes, ZnodeStat], *names: str
    ) -> R | None:
        """Return the record of a znode; None if there is none.

        Data that cannot be used are logged, and count as none.

        :param names: arguments of the record's class.
        """
        try:
            return kind.read(*read, *names)
        except Exception as error:
            self.log.error("Ignoring %s: %s", path, error)
            return None

    def _record(self, kind: type[R], path: str, *names: str) -> R | None:
        """Read a record; return None if it is missing, empty or invalid."""
        if not paths.are_names(*names):  # one that is empty would be the parent
            return None
        read = dict(self._get_many([path])).get(path)
        return None if read is None else self._parse(kind, path, read, *names)

    def _records(
        self,
        kind: type[R],
        root: str,
        tree: NodeTree | RequestTree | None,
        cached: bool,
        cached_ids: bool,
    ) -> Iterator[R]:
        """Yield all records below *root*; from a complete mirror, else read (pipelined)."""
        ids: Iterable[str]
        if (cached or cached_ids) and tree is not None and tree.synced.is_set():
            snapshot = cast("list[R]", tree.snapshot())
            if cached:
                yield from snapshot
                return
            ids = [record.id or "" for record in snapshot]
        else:
            ids = self._children(root)
        for path, read in self._get_many(f"{root}/{each}" for each in ids):
            record = self._parse(kind, path, read, path.rsplit("/", 1)[1])
            if record is not None:
                yield record

    def _refresh(self, record: BaseModel, path: str) -> None:
        """Read a record again.

        :raises NoNodeError: it no longer exists (or is empty).
        """
        data, stat = self.kazoo_client.get(path)
        values = parse_object(data)
        if values is None:
            raise NoNodeError(path)
        record.updateFromDict(values)
        record.stat = stat

    def change_unlocked(
        self,
        seen: C,
        changed: C,
        written: Callable[[BaseException | None], object],
        exists: bool | None = None,
    ) -> None:
        """Write a record, unless it is locked or has changed since it was read; do not wait.

        :param written: called with None, or why it was not written, here or on the thread of the
            connection.
        :param exists: whether its lock has a directory; None: as the mirror shows, for requests
            none.
        """
        txn, record_id = Txn(self.kazoo_client), seen.id or ""
        tree: Tree[Any] = self.node_tree if isinstance(seen, Node) else self.request_tree
        if isinstance(seen, Node):
            path, directory, known = (
                paths.node(record_id),
                paths.node_lock(record_id),
                record_id in self.node_tree.lock_dirs,
            )
        else:
            path, directory, known = paths.request(record_id), paths.request_lock(record_id), False
        locks.add_unlocked_check(txn, directory, known if exists is None else exists)
        txn.set(path, changed.serialize(), seen.version, tree=tree, record=changed.copy())

        def done(_results: list[Any] | None, error: BaseException | None) -> None:
            refused = (
                error.cause
                if isinstance(error, TransactionFailed) and error.path == directory
                else None
            )
            if refused is None or exists is not None or isinstance(refused, NotEmptyError):
                written(error)
            else:  # our mirror did not show the directory yet
                self.change_unlocked(seen, changed, written, isinstance(refused, NodeExistsError))

        self.writer.submit(txn, done)

    # -- locks of records

    def _lock(
        self,
        record: Node | NodeRequest,
        what: str,
        path: str,
        directory: str,
        blocking: bool,
        timeout: float | None,
        ephemeral: bool = True,
        identifier: str | None = None,
    ) -> None:
        if record.lock is not None:
            raise ZKLockException(f"Did not get thread lock on {record.id}")
        handle = locks.acquire(
            self.kazoo_client, directory, path, blocking, timeout, ephemeral, identifier
        )
        try:
            self._refresh(record, path)
        except BaseException as error:
            locks.release(self.kazoo_client, handle)
            if isinstance(error, NoNodeError):
                raise ZKLockException(
                    f"Did not get lock on {record.id}: the {what} no longer exists"
                ) from error
            raise
        if ephemeral:
            record.lock = handle

    def _unlock(self, record: Node | NodeRequest, what: str) -> None:
        if record.lock is None:
            raise ZKLockException(f"Request to unlock unlocked {what} {record.id}")
        handle, record.lock = record.lock, None
        locks.release(self.kazoo_client, handle)

"""Transactions: atomic, asynchronous, and merged into few messages under load."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import NodeExistsError, NoNodeError, RolledBackError, RuntimeInconsistency
from kazoo.protocol.serialization import CheckVersion, Create, Delete, SetData, Transaction
from kazoo.security import OPEN_ACL_UNSAFE

from nodepool.zk import paths
from nodepool.zk.connection.protocol import SessionClient
from nodepool.zk.connection.reply import Reply

if TYPE_CHECKING:
    from nodepool.zk.mirror.tree import Tree

log = logging.getLogger("nodepool.zk.Writer")

#: By how many names the sequence of a directory is advanced at a time.
ADVANCE = 50
#: Errors of operations that only follow from the one that failed.
_RESULTING = (RolledBackError, RuntimeInconsistency)
#: callback(results, error): on the connection thread, must not block.
Callback = Callable[[list[Any] | None, "BaseException | None"], None]


class TransactionFailed(Exception):
    """A transaction was refused as a whole.

    :ivar index: the failed operation.
    :ivar cause: why (a kazoo exception such as BadVersionError).
    :ivar path: the path of the failed operation.
    """

    def __init__(self, index: int, cause: BaseException, path: str) -> None:
        super().__init__(f"{type(cause).__name__} for {path}")
        self.index = index
        self.cause = cause
        self.path = path


class Txn:
    """Operations that succeed or fail together."""

    __slots__ = ("callback", "client", "operations", "records", "sent_again")

    def __init__(self, client: SessionClient) -> None:
        self.client = client
        self.operations: list[Any] = []
        #: operation index -> (tree, path or parent, record): what the mirror shows after the
        #: commit.
        self.records: dict[int, tuple[Tree[Any], str, Any]] = {}
        self.callback: Callback | None = None
        self.sent_again = False

    def create(
        self,
        path: str,
        data: bytes = b"",
        ephemeral: bool = False,
        sequence: bool = False,
        tree: Tree[Any] | None = None,
        record: object = None,
    ) -> int:
        """Add a creation; return the index of its result (the path)."""
        if record is not None and tree is not None:
            self.records[len(self.operations)] = (tree, path, record)
        self.operations.append(
            Create(
                self.client.full_path(path),
                data,
                OPEN_ACL_UNSAFE,
                (1 if ephemeral else 0) | (2 if sequence else 0),
            )
        )
        return len(self.operations) - 1

    def set(
        self,
        path: str,
        data: bytes,
        version: int = -1,
        tree: Tree[Any] | None = None,
        record: object = None,
    ) -> int:
        """Add a write; return the index of its result (the new stat)."""
        if record is not None and tree is not None:
            self.records[len(self.operations)] = (tree, path, record)
        self.operations.append(SetData(self.client.full_path(path), data, version))
        return len(self.operations) - 1

    def delete(self, path: str, version: int = -1) -> None:
        self.operations.append(Delete(self.client.full_path(path), version))

    @property
    def written(self) -> list[str]:
        """Return the paths of existing znodes that are changed or deleted."""
        return [op.path for op in self.operations if isinstance(op, SetData | Delete)]

    @property
    def size(self) -> int:
        """Return the bytes of data and paths, about the number of bytes sent."""
        return sum(
            len(op.path) + (len(op.data) if isinstance(op, Create | SetData) else 0)
            for op in self.operations
        )

    def check(self, path: str, version: int = -1) -> None:
        """Let the transaction fail unless the znode exists (with that version)."""
        self.operations.append(CheckVersion(self.client.full_path(path), version))


def advancing(directory: str) -> list[Create | Delete]:
    """Return the operations that advance the sequence of a directory.

    It counts created children. A tree that a program has copied has fewer creations than the names
    of its children say, so that the next names are taken.
    """
    path = f"{directory}/sequence"
    return [Create(path, b"", OPEN_ACL_UNSAFE, 0), Delete(path, -1)] * ADVANCE


def _is_sequential(operation: Any) -> bool:
    return isinstance(operation, Create) and bool(operation.flags & 2)


class Writer:
    """Sends transactions.

    While :data:`MAX_IN_FLIGHT` are pending, further ones are collected and sent together. If a
    merged one is refused, its parts are sent one by one, so that only the invalid part fails.

    If a directory that every store has is missing, because the store was emptied, all are created,
    and the transaction is sent again, once. The same applies if the sequence of a directory is
    behind its znodes, because a program has copied them: it is advanced.
    """

    MAX_IN_FLIGHT = 2
    MAX_OPERATIONS = 160
    #: Of merged ones; servers close a connection that sends more than 1 MiB (jute.maxbuffer) in one
    #: message.
    MAX_BYTES = 256 * 1024

    def __init__(self, client: SessionClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._waiting: deque[Txn] = deque()
        self._in_flight = 0
        #: Paths that collected transactions write, until they are sent; those of merged ones, which
        #: may have to be sent again, until they are answered. Later writes of these paths must not
        #: overtake them.
        self._unsettled: Counter[str] = Counter()
        #: Why directories of an emptied store could not be created.
        self._not_created: BaseException | None = None
        self.sent = 0

    def submit(self, txn: Txn, callback: Callback | None = None) -> None:
        """Send when possible; the callback gets (results, None) or (None, error)."""
        txn.callback = callback
        with self._lock:
            if self._in_flight >= self.MAX_IN_FLIGHT or self._waiting or self._must_wait(txn):
                self._waiting.append(txn)
                return
            self._in_flight += 1
        self._send([txn])

    def run(self, txn: Txn, timeout: float = 30.0) -> list[Any]:
        """Send and wait.

        :raises TransactionFailed: refused as a whole.
        :raises kazoo.exceptions.KazooException: connection trouble; the result is unknown.
        :raises TimeoutError: no answer in ``timeout`` seconds.
        """
        answer: queue.SimpleQueue[tuple[list[Any] | None, BaseException | None]] = (
            queue.SimpleQueue()
        )
        self.submit(txn, lambda results, error: answer.put((results, error)))
        try:
            results, error = answer.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"No answer from ZooKeeper within {timeout:g} s") from None
        if error is not None:
            raise error
        return list(results or ())

    def _send(self, txns: list[Txn]) -> None:
        self.sent += 1
        operations = [op for txn in txns for op in txn.operations]
        for txn in txns:
            for index, (tree, path, _record) in txn.records.items():
                tree.expect(path, isinstance(txn.operations[index], Create))
        self._client.submit(
            Transaction(operations),
            Reply(lambda results, error, zxid: self._answer(txns, results, error, zxid)),
        )

    def _answer(
        self, txns: list[Txn], results: list[Any] | None, error: BaseException | None, zxid: int
    ) -> None:
        answers = results or []
        if error is not None:
            self._abandon(txns)
        # The others are reported as rolled back, or as not tried.
        errors = (
            (i, answer) for i, answer in enumerate(answers) if isinstance(answer, BaseException)
        )
        failed = next((i for i, answer in errors if not isinstance(answer, _RESULTING)), -1)
        trees: set[Tree[Any]] = set()
        again: list[Txn] = []
        finished: list[tuple[Txn, list[Any] | None, BaseException | None]] = []
        start = 0
        emptied = False
        behind = ""
        for txn in txns:
            end = start + len(txn.operations)
            part: list[Any] | None = None
            problem = error
            if error is None and failed < 0:
                part = answers[start:end]
            elif error is None and start <= failed < end:
                operation = txn.operations[failed - start]
                path = self._client.unchroot(operation.path)
                lacks_parent = isinstance(operation, Create) and isinstance(
                    answers[failed], NoNodeError
                )
                lacks_parent = lacks_parent and path.rpartition("/")[0] in paths.DIRECTORIES
                taken = _is_sequential(operation) and isinstance(answers[failed], NodeExistsError)
                if (lacks_parent or taken) and not txn.sent_again:
                    txn.sent_again = True
                    emptied = emptied or lacks_parent
                    behind = operation.path.rpartition("/")[0] if taken else ""
                    again.append(txn)
                else:
                    cause = (lacks_parent and self._not_created) or answers[failed]
                    problem = TransactionFailed(failed - start, cause, path)
            elif error is None:
                again.append(txn)
            for index, (tree, path, record) in txn.records.items():
                trees.add(tree)
                self._guard(
                    tree.settle,
                    path,
                    record if part is not None else None,
                    part[index] if part is not None else None,
                    zxid,
                )
            if problem is not None or part is not None:
                finished.append((txn, part, problem))
            start = end
        for tree in trees:
            self._guard(tree.settled)
        for txn, part, problem in finished:
            if txn.callback is not None:
                self._guard(txn.callback, part, problem)
        with self._lock:
            self._in_flight += len(again) - 1
        if emptied:
            self._create_directories()
        if behind:
            log.warning("The sequence of %s is behind its znodes; advancing it", behind)
            self._client.submit(
                Transaction(advancing(behind)), Reply(lambda _results, _error, _zxid: None)
            )
        for txn in again:  # in their order
            self._send([txn])
        if len(txns) > 1:
            self._settle(txns)
        self._flush()

    def _create_directories(self) -> None:
        """Create what an emptied store lacks, before ZooKeeper processes what is sent later."""
        self._not_created = None
        log.warning("The directories below %s were deleted; creating them again", paths.ROOT)
        top = self._client.full_path(paths.ROOT)
        above = [top[:end] for end, character in enumerate(top) if character == "/" and end]
        for path in (*above, top, *map(self._client.full_path, paths.DIRECTORIES)):
            self._client.submit(
                Create(path, b"", OPEN_ACL_UNSAFE, 0),
                Reply(lambda _path, error, _zxid: self._created(error)),
            )

    def _created(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, NodeExistsError):
            self._not_created = error

    @staticmethod
    def _guard(function: Callable[..., Any], *args: object) -> None:
        try:
            function(*args)
        except Exception:  # transactions that wait behind it must be sent all the same
            log.exception("Error in the callback of a transaction")

    def _abandon(self, txns: list[Txn]) -> None:
        """Release locks of a transaction with unknown result.

        This includes locks that it was to acquire or release, except persistent ones of backing
        nodes.
        """
        for txn in txns:
            for operation in txn.operations:
                ephemeral = isinstance(operation, Delete) or (
                    isinstance(operation, Create) and operation.flags & 1
                )
                if ephemeral and "__lock__" in operation.path:
                    self._client.abandoned.add(self._client.unchroot(operation.path))

    def _must_wait(self, txn: Txn) -> bool:
        return bool(self._unsettled) and any(path in self._unsettled for path in txn.written)

    def _settle(self, txns: list[Txn]) -> None:
        with self._lock:
            self._unsettled -= Counter(path for txn in txns for path in txn.written)

    def _flush(self) -> None:
        while batch := self._collect():
            self._send(batch)
            if len(batch) == 1:
                self._settle(batch)

    def _collect(self) -> list[Txn]:
        batch: list[Txn] = []
        operations = size = 0
        with self._lock:
            if self._in_flight >= self.MAX_IN_FLIGHT:
                return []
            while self._waiting and not self._must_wait(self._waiting[0]):
                operations += len(self._waiting[0].operations)
                size += self._waiting[0].size
                if batch and (operations > self.MAX_OPERATIONS or size > self.MAX_BYTES):
                    break
                batch.append(self._waiting.popleft())
            if batch:
                self._in_flight += 1
                self._unsettled.update(path for txn in batch for path in txn.written)
        return batch

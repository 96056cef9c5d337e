"""Another ZooKeeper client that acts between the moment a transaction is computed and the moment
it is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.protocol.serialization import Create, Delete, SetData

from nodepool.zk.writer import Callback, TransactionFailed, Txn, Writer
from tests.conftest import wait_for

REQUESTS, LOCKS, NODES = "/nodepool/requests/", "/nodepool/requests-lock/", "/nodepool/nodes/"

#: Returns the path in question when a transaction is the one to interfere with.
Match = Callable[[Txn], "str | None"]


def _path(txn: Txn, part: str, fits: Callable[[Any], bool]) -> str | None:
    return next(
        (txn.client.unchroot(op.path) for op in txn.operations if part in op.path and fits(op)),
        None,
    )


def sets(part: str, **values: object) -> Match:
    """Match a transaction that writes these values to a record whose path contains ``part``."""

    def fits(operation: Any) -> bool:
        if not isinstance(operation, SetData):
            return False
        record = json.loads(operation.data)
        return all(record.get(name) == value for name, value in values.items())

    return lambda txn: _path(txn, part, fits)


def creates(folder: str) -> Match:
    """Match a transaction that creates a sequential record in this folder."""
    return lambda txn: _path(
        txn,
        folder,
        lambda operation: isinstance(operation, Create) and operation.path.endswith(folder),
    )


def deletes(part: str) -> Match:
    return lambda txn: _path(txn, part, lambda operation: isinstance(operation, Delete))


class Interference:
    """The first transaction that matches: ``act`` runs before it is sent, and its outcome is
    recorded.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, match: Match, act: Callable[[str], Any]
    ) -> None:
        self._match, self._act = match, act
        self._began = False
        self.outcome: list[BaseException | None] = []
        self._send = Writer.submit
        monkeypatch.setattr(
            Writer, "submit", lambda writer, txn, callback=None: self._submit(writer, txn, callback)
        )

    def _submit(self, writer: Writer, txn: Txn, callback: Callback | None) -> None:
        path = None if self._began else self._match(txn)
        if path is None:
            self._send(writer, txn, callback)
            return
        self._began = True
        self._act(path)

        def answered(results: list[Any] | None, error: BaseException | None) -> None:
            self.outcome.append(error)
            if callback is not None:
                callback(results, error)

        self._send(writer, txn, answered)

    def refused(self) -> str:
        """Wait for the answer; the path for which ZooKeeper refused the transaction."""
        wait_for(lambda: self.outcome, what="the answer to the transaction")
        (error,) = self.outcome
        assert isinstance(error, TransactionFailed), (
            f"the stale transaction was not refused: {error!r}"
        )
        return error.path


class OtherClient:
    """What another client does to records and locks, immediately."""

    def __init__(self, kazoo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kazoo, self._monkeypatch = kazoo, monkeypatch

    def before(self, match: Match, act: Callable[[str], Any]) -> Interference:
        """Run ``act(path)`` just before the first matching transaction is sent.

        It may run on the connection thread of the program, where only this client may be used.
        """
        return Interference(self._monkeypatch, match, act)

    def read(self, path: str) -> dict[str, Any]:
        data = self._kazoo.get(path)[0]
        return dict(json.loads(data)) if data else {}

    def write(self, path: str, **values: object) -> None:
        self._kazoo.set(path, json.dumps({**self.read(path), **values}).encode())

    def delete(self, path: str) -> None:
        self._kazoo.delete(path, recursive=True)

    def lock(self, directory: str) -> str:
        """Return the path of the contender."""
        self._kazoo.ensure_path(directory)
        return str(
            self._kazoo.create(f"{directory}/{'b' * 32}__lock__", ephemeral=True, sequence=True)
        )

    def break_lock(self, directory: str) -> None:
        for name in self._kazoo.get_children(directory):
            self._kazoo.delete(f"{directory}/{name}")

    def unlock(self, contender: str) -> None:
        self._kazoo.delete(contender)


__all__ = [
    "LOCKS",
    "NODES",
    "REQUESTS",
    "Interference",
    "OtherClient",
    "creates",
    "deletes",
    "sets",
]

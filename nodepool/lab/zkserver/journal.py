"""Transactions and snapshots on disk: a killed server restarts with its tree and sessions.

A directory has a ``snapshot``, and a ``log`` of the transactions since; both begin with the number
of the snapshot. Each line is a checksum and JSON. A transaction is kept once it was given to the
kernel: it survives the process, but not a power failure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nodepool.base.files import lock_file, new_file
from nodepool.lab.zkserver.codec import Acl
from nodepool.lab.zkserver.core import Server, Session
from nodepool.lab.zkserver.tree import Znode

log = logging.getLogger("nodepool.zkserver.journal")

#: Bytes of a log after which a new generation begins.
LARGEST_LOG = 64 * 1024 * 1024
_EPOCH = 32


class JournalError(Exception):
    """The directory cannot be used."""


class Journal:
    """
    :raises JournalError: another server uses the directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            lock_file(self._lock)
        except BlockingIOError:
            os.close(self._lock)
            raise JournalError(
                f"{directory}: another server uses this directory; stop it or choose another one"
            ) from None
        self._number = 0
        self.file: BinaryIO | None = None
        self._size = 0
        #: Whether the log may end with an incomplete line.
        self._broken = False
        self._server: Server | None = None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        os.close(self._lock)

    def load(self, server: Server) -> None:
        """Fill the server with what is kept, and keep what it commits from now on.

        :raises JournalError: a file is damaged.
        """
        self._number = _load_snapshot(server, self._directory / "snapshot")
        entries = _entries(self._directory / "log", torn_end=True)
        # The log of another number is older than the snapshot, which was taken just before the end.
        for zxid, time, changes in entries if next(entries, None) == self._number else ():
            _replay(server, zxid, time, changes)
        # Clients that saw the zxid of a transaction that was not kept, such as a failed one, must
        # not be refused.
        server.zxid = ((server.zxid >> _EPOCH) + 1) << _EPOCH
        self._server, server.keep = server, self._append
        self._compact()

    def _append(self, zxid: int, time: int, changes: list[list[Any]]) -> None:
        line = _line([zxid, time, changes])
        if self._broken:
            raise OSError(f"{self._directory}: an earlier transaction could not be written")
        assert self.file is not None
        # An incomplete line must stay the last one: the next start ignores it there, and nowhere
        # else.
        self._broken = True
        if self.file.write(line) != len(line):
            raise OSError(f"{self._directory}: the disk is full")
        self._broken = False
        self._size += len(line)
        if self._size > LARGEST_LOG:
            self._compact()

    def _compact(self) -> None:
        """Take a snapshot and start a new log. A crash at any time loses nothing."""
        assert self._server is not None
        self._number += 1
        with new_file(str(self._directory / "snapshot")) as file:
            file.writelines(_snapshot(self._server, self._number))
        if self.file is not None:
            self.file.close()
        self.file = open(self._directory / "log", "wb", buffering=0, opener=_private)  # noqa: SIM115 - as long as the journal
        self._size = self.file.write(_line(self._number))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _line(value: object) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _entries(path: Path, torn_end: bool = False) -> Iterator[Any]:
    """Yield the entries of a file.

    :param torn_end: the last line may be incomplete: its client has had no answer.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if line.endswith(b"\n") and checksum == b"%08x" % zlib.crc32(text):
                yield json.loads(text)
            elif torn_end and not file.read(1):
                log.warning("%s: the last line is incomplete and is ignored", path)
                return
            else:
                raise JournalError(
                    f"{path}:{number}: the line is damaged; restore the directory from a backup, "
                    "or delete it"
                )


def _snapshot(server: Server, number: int) -> Iterator[bytes]:
    nodes = list(server.tree.dump())
    yield _line([number, server.zxid, len(server.sessions), len(nodes)])
    for session in server.sessions.values():
        yield _line([session.id, session.timeout, session.password.hex()])
    for path, node in nodes:
        yield _line(
            [
                path,
                None if node.data is None else node.data.decode("latin-1"),
                node.acl,
                node.owner,
                node.czxid,
                node.mzxid,
                node.pzxid,
                node.ctime,
                node.mtime,
                node.version,
                node.aversion,
                node.created,
            ]
        )


def _load_snapshot(server: Server, path: Path) -> int:
    """Return the number of the snapshot; 0 if there is none."""
    entries = list(_entries(path))
    if not path.exists():
        return 0
    if not entries or len(entries) != 1 + entries[0][2] + entries[0][3]:
        raise JournalError(
            f"{path}: the file is incomplete; restore the directory from a backup, or delete it"
        )
    number, server.zxid, sessions, _nodes = entries[0]
    for entry in entries[1 : 1 + sessions]:
        _add_session(server, *entry)
    server.tree.load(
        (entry[0], Znode(_data(entry[1]), _acl(entry[2]), *entry[3:]))
        for entry in entries[1 + sessions :]
    )
    return int(number)


def _data(text: str | None) -> bytes | None:
    return None if text is None else text.encode("latin-1")


def _acl(entries: list[list[Any]]) -> tuple[Acl, ...]:
    return tuple(Acl(entry) for entry in entries)


def _add_session(server: Server, session_id: int, timeout: int, password: str) -> None:
    server.sessions[session_id] = Session(
        session_id, bytes.fromhex(password), timeout, server.clock()
    )


def _replay(server: Server, zxid: int, time: int, changes: list[list[Any]]) -> None:
    tree = server.tree
    server.zxid = zxid
    with tree.transaction():
        for kind, *values in filter(None, changes):
            if kind == "create":
                path, data, acl, owner = values
                tree.put(path, Znode(_data(data), _acl(acl), owner, zxid, zxid, zxid, time, time))
            elif kind == "delete":
                tree.remove(values[0], zxid)
            elif kind == "set":
                tree.change(tree.nodes[values[0]], values[0], _data(values[1]), zxid, time)
            elif kind == "acl":
                tree.change_acl(tree.nodes[values[0]], _acl(values[1]))
            elif kind == "session":
                _add_session(server, *values)
            elif kind == "close":
                tree.end_session(values[0], zxid)
                server.sessions.pop(values[0], None)

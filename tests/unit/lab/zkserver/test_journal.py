"""What a killed server finds again."""

from __future__ import annotations

import io
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kazoo.protocol.serialization import (
    CheckVersion,
    Create,
    Delete,
    Exists,
    SetACL,
    SetData,
    Transaction,
)
from kazoo.security import ACL, Id

from nodepool.lab.zkserver import journal as journals
from nodepool.lab.zkserver.core import Server
from nodepool.lab.zkserver.journal import Journal, JournalError
from nodepool.lab.zkserver.requests import StandaloneServer
from tests.support.zkclient import MemoryPipe, RawClient

OPEN = [ACL(31, Id("world", "anyone"))]
OPEN_ENTRY = [[31, "world", "anyone"]]
READ = [ACL(17, Id("world", "anyone"))]


@contextmanager
def running(directory: pathlib.Path) -> Iterator[Server]:
    server, journal = StandaloneServer(), Journal(directory)
    journal.load(server)
    try:
        yield server
    finally:
        journal.close()


def content(server: Server) -> object:
    nodes = {
        path: (node.data, node.acl, node.owner, node.stat()) for path, node in server.tree.dump()
    }
    return nodes, {
        number: (session.password, session.timeout) for number, session in server.sessions.items()
    }


def work(server: Server) -> RawClient:
    """Let a client do one of everything; it stays connected."""
    client, gone = (RawClient(lambda: MemoryPipe(server)) for _ in range(2))
    gone.call(Create("/gone", b"", OPEN, 1))
    for name in ("a", "b", "c"):
        client.call(Create(f"/{name}", name.encode() + b"\xff\x00\n", OPEN, 0))
    client.call(Create("/a/ephemeral", b"", OPEN, 1))
    client.call(Create("/a/sequence-", b"", OPEN, 2))
    client.call(SetData("/b", b"changed", -1))
    client.call(SetACL("/b", READ, -1))
    client.call(Delete("/c", -1))
    client.call(Create("/a", b"refused", OPEN, 0))
    client.call(
        Transaction(
            [
                CheckVersion("/a", 0),
                Create("/d", None, OPEN, 0),
                SetData("/d", b"1", 0),
                Delete("/d", 1),
            ]
        )
    )
    client.call(Transaction([Create("/e", b"", OPEN, 0), Delete("/missing", -1)]))
    server.end_session(server.sessions[gone.session])
    return client


def test_restarted_server_has_the_same_tree_and_sessions(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as server:
        client = work(server)
        before = content(server)
    for _ in range(2):  # from the log, then from the snapshot
        with running(tmp_path) as server:
            assert content(server) == before
            client.open_pipe = lambda new=server: MemoryPipe(new)  # type: ignore[misc]
            assert client.connect(), "the session goes on"
            assert client.call(Exists("/a/ephemeral", None))[0] == 0
            code, body = client.call(Create("/a/sequence-", b"", OPEN, 2))
            assert code == 0
            client.call(Delete(body[4:].decode(), -1))
            before = content(server)


def test_log_that_ends_anywhere_gives_a_state_that_was_there(tmp_path: pathlib.Path) -> None:
    """The server is killed within a write."""
    states = []
    with running(tmp_path / "full") as server:
        keep = server.keep

        def noting(*arguments: object) -> None:
            keep(*arguments)  # type: ignore[arg-type]
            states.append(content(server))

        states.append(content(server))
        server.keep = noting
        work(server)
    log = (tmp_path / "full" / "log").read_bytes()
    header = log.index(b"\n") + 1
    seen = []
    for end in [*range(header, len(log), 7), len(log)]:
        shutil.copytree(tmp_path / "full", tmp_path / "cut", dirs_exist_ok=True)
        (tmp_path / "cut" / "log").write_bytes(log[:end])
        (tmp_path / "cut" / "snapshot").write_bytes((tmp_path / "full" / "snapshot").read_bytes())
        with running(tmp_path / "cut") as server:
            seen.append(states.index(content(server)))
    assert seen == sorted(seen) and seen[-1] == len(states) - 1


def test_damage_inside_is_an_error_that_names_file_and_line(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as server:
        work(server)
    log = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    (tmp_path / "log").write_bytes(b"".join([*log[:3], b"x" + log[3][1:], *log[4:]]))
    with pytest.raises(JournalError, match="log:4: the line is damaged"), running(tmp_path):
        pass


def test_snapshot_replaces_a_large_log_and_nothing_is_lost(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "LARGEST_LOG", 300)
    with running(tmp_path) as server:
        work(server)
        before = content(server)
        assert (tmp_path / "log").stat().st_size < 1000
    with running(tmp_path) as server:
        assert content(server) == before


def test_server_killed_between_snapshot_and_log_ignores_the_older_log(
    tmp_path: pathlib.Path,
) -> None:
    with running(tmp_path) as server:
        work(server)
        before = content(server)
    old = (tmp_path / "log").read_bytes()
    with running(tmp_path):
        pass
    (tmp_path / "log").write_bytes(old)
    with running(tmp_path) as server:
        assert content(server) == before


def test_zxid_increases_over_restarts_also_after_failed_requests(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as server:
        client = RawClient(lambda: MemoryPipe(server))
        client.call(Delete("/missing", -1))
        seen = client.zxid
    with running(tmp_path) as server:
        assert server.zxid > seen


def test_directory_serves_one_server_only_and_is_private(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "data"
    with running(directory):
        with pytest.raises(JournalError, match="another server uses this directory"):
            Journal(directory)
        assert directory.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def test_nothing_is_written_after_a_write_that_failed(tmp_path: pathlib.Path) -> None:
    """The disk is full for a moment: an incomplete line in the middle of the log would make it
    unreadable.
    """

    class FullDisk(io.BytesIO):
        most = 9

        def write(self, data: Any) -> int:
            with open(tmp_path / "log", "ab") as log:
                written = log.write(bytes(data)[: self.most])
            self.most = 9999
            return written

    server, journal = StandaloneServer(), Journal(tmp_path)
    journal.load(server)
    server.keep(*server.begin(), [["create", "/kept", "", OPEN_ENTRY, 0]])
    journal.file, real = FullDisk(), journal.file
    for _ in range(3):
        with pytest.raises(OSError, match=r"the disk is full|could not be written"):
            server.keep(*server.begin(), [["create", "/lost", "", OPEN_ENTRY, 0]])
    assert real is not None
    real.close()
    journal.close()
    with running(tmp_path) as server:
        assert list(server.tree.nodes) == ["/", "/kept"]

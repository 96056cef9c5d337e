"""What survives: crashes, damage, a full disk."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from nodepool.nodemanager.config import parse
from nodepool.nodemanager.records.database import Database, DatabaseError, Record
from nodepool.nodemanager.slivers.slivers import Slivers


def opened(path: pathlib.Path) -> Database:
    database = Database(str(path))
    database.open()
    return database


def put(database: Database, name: str) -> None:
    database.put(
        Record(f"sliver_{name}", "s", 1, 1, None, {"account_type": "sliver", "name": name})
    )


@pytest.mark.spec("NM-C.6: atomic, fsynced, human-dumpable")
def test_content_survives_a_restart(tmp_path: pathlib.Path) -> None:
    database = opened(tmp_path / "db")
    put(database, "a")
    database.update_local("sliver_a", loans=[["b", "nm_cpu_share", 1]], x=None)
    database.set_counters("a", {"sent": 5})
    database.close()
    database = opened(tmp_path / "db")
    dump = json.loads(database.dump())
    assert dump["records"]["sliver_a"]["record"]["name"] == "a"
    assert dump["local"] == {"sliver_a": {"loans": [["b", "nm_cpu_share", 1]]}}
    assert dump["counters"] == {"a": {"sent": 5}}
    assert (tmp_path / "db").stat().st_mode & 0o777 == 0o600
    modes = [database._rows(f"PRAGMA {name}")[0][0] for name in ("journal_mode", "synchronous")]
    assert modes == ["wal", 2]
    database.close()


WRITER = """
import sys
from nodepool.nodemanager.records.database import Database, Record
database = Database(sys.argv[1])
database.open()
number = 0
while True:
    number += 1
    with database.transaction():
        for side in "ab":
            content = {"name": side, "filler": "x" * 5000, "n": number}
            database.put(Record(f"sliver_{side}", "s", number, number, None, content))
    print(number, flush=True)
"""


@pytest.mark.spec(
    "NM-A.11, NM-C.6: SIGKILL of the writer loses nothing that was confirmed, and tears nothing"
)
def test_kill_the_writer(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "db"
    last = 0
    for confirmed in (3, 8, 21):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(confirmed):
                last = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split()
        last = int(rest[-1]) if rest else last
        database = opened(path)
        assert database.moved_aside is None
        a, b = database.records()
        assert a.content["n"] == b.content["n"] >= last
        database.close()


@pytest.mark.spec("NM issue: corrupt database moved aside with a clear message")
@pytest.mark.parametrize("damage", ["text", "middle", "json", "table"])
def test_damaged_database_is_renamed_and_reported(
    tmp_path: pathlib.Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "db"
    database = opened(path)
    for number in range(200):
        put(database, f"s{number}")
    database.close()
    if damage == "text":
        path.write_bytes(b"this is no database\n" * 100)
    elif damage == "middle":
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(8192))
    else:
        with sqlite3.connect(path) as connection:
            connection.execute(
                "UPDATE records SET json = '[1'" if damage == "json" else "DROP TABLE local"
            )
        connection.close()
    database = opened(path)
    assert database.records() == []
    assert database.moved_aside is not None
    assert pathlib.Path(database.moved_aside).exists()
    assert "moved to" in caplog.text
    put(database, "a")
    database.close()


def test_damaged_twice_keeps_both(tmp_path: pathlib.Path) -> None:
    for _ in range(2):
        (tmp_path / "db").write_bytes(b"x" * 2000)
        database = Database(str(tmp_path / "db"), lambda: 5.0)
        database.open()
        database.close()
    assert len(list(tmp_path.glob("db.corrupt-5*"))) == 2


@pytest.mark.spec("NM-A.11: a missing database is an empty one")
def test_missing_database_is_created_empty(tmp_path: pathlib.Path) -> None:
    database = opened(tmp_path / "db")
    put(database, "a")
    database.close()
    (tmp_path / "db").unlink()
    database = opened(tmp_path / "db")
    assert database.records() == []
    database.close()


def test_sound_files_are_unchanged(tmp_path: pathlib.Path) -> None:
    """Another release's, another program's: not damaged, so not ours to move."""
    newer, foreign = tmp_path / "newer", tmp_path / "foreign"
    opened(newer).close()
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    for path, text in ((newer, "another release"), (foreign, "another program")):
        before = path.read_bytes()
        with pytest.raises(DatabaseError, match=text):
            opened(path)
        assert path.exists()
        assert path.stat().st_size == len(before)
    assert not list(tmp_path.glob("*.corrupt*"))


def test_database_that_cannot_be_created_is_reported(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DatabaseError, match="check directory"):
        opened(tmp_path / "missing" / "db")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DatabaseError):
        opened(tmp_path / "folder")


def test_database_in_use_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.nodemanager.records.database.BUSY_TIMEOUT", 0.1)
    connection = sqlite3.connect(tmp_path / "db", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    with pytest.raises(DatabaseError, match="in use"):
        opened(tmp_path / "db")
    connection.close()
    assert not list(tmp_path.glob("*.corrupt*"))


@pytest.mark.spec("NM-C.7: numbers are kept until freed, the lowest free one is next")
def test_lowest_free_number_is_allocated_and_kept_until_freed(tmp_path: pathlib.Path) -> None:
    database = opened(tmp_path / "db")
    assert [database.allocate_index(n, 3) for n in "abab"] == [1, 2, 1, 2]
    database.free_index("a")
    database.close()
    database = opened(tmp_path / "db")
    assert [database.allocate_index(n, 3) for n in "cd"] == [1, 3]
    with pytest.raises(DatabaseError, match="all 3 slots"):
        database.allocate_index("e", 3)
    assert database.take_index("b", 2)
    assert not database.take_index("z", 2)
    database.close()


def test_transaction_is_all_or_nothing(tmp_path: pathlib.Path) -> None:
    database = opened(tmp_path / "db")
    with pytest.raises(RuntimeError), database.transaction():
        put(database, "a")
        raise RuntimeError
    assert database.records() == []
    database.close()


def test_threads_share_a_database(tmp_path: pathlib.Path) -> None:
    database = opened(tmp_path / "db")

    def work(name: str) -> None:
        for number in range(20):
            put(database, f"{name}{number}")
            database.allocate_index(f"{name}{number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(database.records()) == 80
    assert len({database.allocate_index(f"{n}{i}") for n in "abcd" for i in range(20)}) == 80
    database.close()


@pytest.mark.spec("NM-C.6: replay table on jti")
def test_ticket_is_accepted_once(tmp_path: pathlib.Path) -> None:
    now = [100.0]
    database = Database(str(tmp_path / "db"), lambda: now[0])
    database.open()
    assert database.use_ticket("x", 200)
    assert not database.use_ticket("x", 200)
    database.close()
    database.open()
    assert not database.use_ticket("x", 200)
    now[0] = 300
    assert database.use_ticket("y", 400)
    assert database._rows("SELECT jti FROM used_tickets") == [("y",)]
    database.close()


@pytest.mark.spec(
    "issue 10, F5: GetCapacity is cheap: what has not changed is not calculated again"
)
def test_effective_is_remembered(tmp_path: pathlib.Path) -> None:
    config = parse({"state-dir": str(tmp_path), "run-dir": str(tmp_path)}, "test")
    database = Database(str(tmp_path / "db"))
    database.open()
    try:
        found = Slivers(config, database, Mock())
        assert found.effective() == {}
        for name in ("a", "b"):
            database.put(
                Record(
                    f"sliver_{name}",
                    "test",
                    1,
                    1,
                    None,
                    {
                        "account_type": "sliver",
                        "name": name,
                        "rspec": {"nm_cpu_guaranteed_share": 100},
                    },
                )
            )
        before = found.effective()
        assert found.effective() is before
        assert before["b"]["nm_cpu_guaranteed_share"] == 100
        with pytest.raises(ZeroDivisionError), database.transaction():
            database.update_local("sliver_a", loans=[["b", "nm_cpu_guaranteed_share", 30]])
            assert found.effective()["b"]["nm_cpu_guaranteed_share"] == 130, "its own transaction's"
            raise ZeroDivisionError
        assert found.effective() == before
        database.update_local("sliver_a", loans=[["b", "nm_cpu_guaranteed_share", 20]])
        assert found.effective()["b"]["nm_cpu_guaranteed_share"] == 120
        database.delete("sliver_b")
        assert set(found.effective()) == {"a"}
    finally:
        database.close()

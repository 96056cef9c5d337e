"""Persistent state: records of all sources, and the host's own values (NM-A.11, NM-C.6).

SQLite with a write-ahead log and full synchronisation: what a method has returned from is on disk.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("nodepool.nodemanager.database")

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE records (
    record_key TEXT PRIMARY KEY, source TEXT NOT NULL, serial REAL NOT NULL,
    timestamp REAL NOT NULL, expiry REAL,
    json TEXT NOT NULL);
CREATE INDEX records_by_expiry ON records (expiry) WHERE expiry IS NOT NULL;
CREATE TABLE local (record_key TEXT PRIMARY KEY, json TEXT NOT NULL);
CREATE TABLE indexes (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE serials (source TEXT PRIMARY KEY, serial REAL NOT NULL);
CREATE TABLE counters (name TEXT PRIMARY KEY, json TEXT NOT NULL);
CREATE TABLE used_tickets (jti TEXT PRIMARY KEY, expiry REAL NOT NULL);
"""
#: Seconds that a statement waits for another process that uses the file.
BUSY_TIMEOUT = 5.0
#: Source of records whose own source is no longer configured: the next source that delivers them
#: adopts them.
ABANDONED = "abandoned"
#: The host's values that end with the record: loans, and whether the sliver is created and running.
_OF_ONE_LIFE = ("loans", "created", "running")
#: What SQLite says of a file that is damaged; in all other cases (no space, no permission, a
#: failing disk) the file is kept.
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}


class DatabaseError(Exception):
    """The file cannot be used; the text has its name and the remedy."""


@dataclass(slots=True, eq=False)
class Record:
    """A stored record and the state of its delivery."""

    key: str
    source: str
    #: Serial of the last update of its source that contained it.
    serial: float
    #: Its version from the authority (seconds).
    timestamp: float
    #: Unix seconds, or None.
    expiry: float | None
    content: dict[str, Any]


class DatabaseFile:
    """The file: opened, checked, and written in transactions. One connection, one lock.

    :param now: returns Unix seconds.
    :param free_ballast: called before each write: on a full file system it releases the ballast.
    """

    def __init__(
        self,
        path: str,
        now: Callable[[], float] = time.time,
        free_ballast: Callable[[], object] = lambda: None,
    ) -> None:
        self._free_ballast = free_ballast
        self.path = path
        self._now = now
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._version = 0
        #: New path of an unusable file that this start has renamed.
        self.moved_aside: str | None = None

    # -- opening

    def open(self) -> None:
        """Open or create the file. A damaged one is renamed.

        The sources and the living slivers provide its content again.

        :raises DatabaseError: the file cannot be created, or is intact but unusable for us.
        """
        self._free_ballast()
        try:
            self._open()
        except (sqlite3.Error, OSError, ValueError, DatabaseError) as error:
            self.close()
            if isinstance(error, DatabaseError):
                raise
            code = getattr(error, "sqlite_errorcode", None)
            if code is not None and code & 0xFF == sqlite3.SQLITE_BUSY:
                raise DatabaseError(f"database {self.path} is in use by another process") from error
            if isinstance(error, OSError) or (code is not None and code & 0xFF not in _DAMAGED):
                raise DatabaseError(
                    f"cannot use the database {self.path}: {error}; check directory, rights and "
                    "space"
                ) from error
            self._move_aside(error)
            try:
                self._open()
            except (sqlite3.Error, OSError) as again:
                self.close()
                raise DatabaseError(
                    f"cannot create database {self.path}: {again}; check directory and permissions"
                ) from again

    def _open(self) -> None:
        if not os.path.exists(self.path) or os.path.getsize(self.path) == 0:
            os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        self._connection = connection
        connection.execute("PRAGMA journal_mode=WAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise DatabaseError(
                    f"{self.path} is a database of another program; give another state-dir, or "
                    "move it away"
                )
            with self._transaction() as cursor:
                for statement in _SCHEMA.split(";"):
                    if statement.strip():
                        cursor.execute(statement)
                cursor.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise DatabaseError(
                f"{self.path} has schema version {version}, this program knows {SCHEMA_VERSION}: "
                "another release "
                "wrote it; run that one, or move the file away"
            )
        # Releases before 12.0 have no such table, and ignore it.
        connection.execute(
            "CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, json TEXT NOT NULL)"
        )
        result = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if result != "ok":
            raise sqlite3.DatabaseError(result)
        for key, text in connection.execute(
            "SELECT record_key, json FROM records UNION ALL SELECT record_key, json FROM local"
        ):
            if not isinstance(json.loads(text), dict):
                raise ValueError(f"entry {key} is not a dictionary")

    def _move_aside(self, error: Exception) -> None:
        aside = f"{self.path}.corrupt-{int(self._now())}"
        while os.path.exists(aside):
            aside += "+"
        log.error(
            "The database %s cannot be used (%s): moved to %s. It is rebuilt from the sources; "
            "running slivers are adopted",
            self.path,
            error,
            aside,
        )
        os.replace(self.path, aside)
        self.moved_aside = aside
        for suffix in ("-wal", "-shm"):
            if os.path.exists(self.path + suffix):
                os.replace(self.path + suffix, aside + suffix)

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    @contextmanager
    def _transaction(self, lasting: bool = True) -> Iterator[sqlite3.Cursor]:
        """Run the block in a transaction, which may be a part of a larger one.

        :param lasting: survives a loss of power; the end of the process loses nothing in any case.
            A part of a larger transaction is as lasting as the larger one. Writes are never
            reordered.
        """
        with self._lock:
            if self._connection is None:
                raise DatabaseError(f"database {self.path} is closed")
            cursor = self._connection.cursor()
            if self._connection.in_transaction:  # part of a larger one
                yield cursor
                return
            self._free_ballast()
            cursor.execute(f"PRAGMA synchronous={'FULL' if lasting else 'NORMAL'}")
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
                cursor.execute("COMMIT")
            except BaseException:
                # Also after a failed commit: otherwise later statements would be part of it and
                # never be written.
                if self._connection.in_transaction:
                    cursor.execute("ROLLBACK")
                raise
            finally:
                self._version += 1

    @contextmanager
    def transaction(self, lasting: bool = True) -> Iterator[None]:
        """Write everything in the block or nothing.

        :param lasting: survives a loss of power; all transactions before a lasting one do so, too.
        """
        with self._transaction(lasting):
            yield

    @property
    def version(self) -> int | None:
        """Number that differs after each change; None: a change is in progress."""
        connection = self._connection
        return None if connection is None or connection.in_transaction else self._version

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            if self._connection is None:
                raise DatabaseError(f"database {self.path} is closed")
            return self._connection.execute(query, values).fetchall()

    def _write(self, statement: str, *values: object, lasting: bool = True) -> bool:
        """Run one statement; return whether it changed one row."""
        with self._transaction(lasting) as cursor:
            return cursor.execute(statement, values).rowcount == 1


class StoredEvents(DatabaseFile):
    """Events with increasing numbers."""

    _until_tidy = 0

    def add_event(self, content: dict[str, Any], number: int, kept: int) -> None:
        """Store an event under this number, or the next one after the last, and delete old ones.

        :param number: milliseconds, so that numbers also increase if the file is lost.
        :param kept: the number of events that remain; at most 1 % more do.
        """
        with self._transaction(lasting=False) as cursor:
            last = self._rows("SELECT max(number) FROM events")[0][0] or 0
            cursor.execute(
                "INSERT INTO events VALUES (?, ?)", (max(number, last + 1), json.dumps(content))
            )
            self._until_tidy -= 1
            if self._until_tidy < 0:  # counting takes longer than all else here
                self._until_tidy = kept // 100
                cursor.execute(
                    "DELETE FROM events WHERE number <= "
                    "(SELECT number FROM events ORDER BY number DESC LIMIT 1 OFFSET ?)",
                    (kept,),
                )

    def events_after(self, number: int, most: int) -> list[dict[str, Any]]:
        """Return the next events, oldest first, each with its number."""
        rows = self._rows(
            "SELECT number, json FROM events WHERE number > ? ORDER BY number LIMIT ?", number, most
        )
        return [{**json.loads(text), "number": number} for number, text in rows]


class Database(StoredEvents):
    """Records, and what this host adds to them. Thread-safe."""

    # -- records

    def get(self, key: str) -> Record | None:
        rows = self._rows("SELECT * FROM records WHERE record_key = ?", key)
        return self._record(rows[0]) if rows else None

    def records(self, source: str | None = None) -> list[Record]:
        """Return all records, or those of one source, by key."""
        if source is None:
            rows = self._rows("SELECT * FROM records ORDER BY record_key")
        else:
            rows = self._rows("SELECT * FROM records WHERE source = ? ORDER BY record_key", source)
        return [self._record(row) for row in rows]

    @staticmethod
    def _record(row: tuple[Any, ...]) -> Record:
        return Record(row[0], row[1], row[2], row[3], row[4], json.loads(row[5]))

    def put(self, record: Record) -> None:
        self._write(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?)",
            record.key,
            record.source,
            record.serial,
            record.timestamp,
            record.expiry,
            json.dumps(record.content),
        )

    def set_expiry(self, key: str, expiry: float) -> bool:
        """Let a record live until then (Unix seconds); False when there is none (any more)."""
        return self._write(
            "UPDATE records SET expiry = ?, json = json_set(json, '$.expiry', ?) WHERE "
            "record_key = ?",
            expiry,
            expiry,
            key,
        )

    def delete(self, key: str) -> None:
        """Delete a record and its loans, but not what its removal needs (:meth:`delete_local`)."""
        with self._transaction() as cursor:
            cursor.execute("DELETE FROM records WHERE record_key = ?", (key,))
            if self.local(key):
                self.update_local(key, **dict.fromkeys(_OF_ONE_LIFE))

    def abandon(self, active: Collection[str]) -> list[str]:
        """Mark the records of sources that are not ``active``; their keys."""
        with self._transaction() as cursor:
            keys = [
                r.key
                for r in self.records()
                if r.source not in active and r.source not in ("", ABANDONED)
            ]
            cursor.executemany(
                "UPDATE records SET source = ? WHERE record_key = ?",
                [(ABANDONED, key) for key in keys],
            )
            return keys

    def texts(self, prefix: str) -> list[tuple[str, str | None]]:
        """Return the JSON texts of records with that key prefix, each with the host's own
        values.
        """
        return self._rows(
            "SELECT records.json, local.json FROM records LEFT JOIN local USING (record_key) "
            "WHERE substr(record_key, 1, ?) = ? ORDER BY record_key",
            len(prefix),
            prefix,
        )

    def next_expiry(self) -> float | None:
        """Return the earliest expiry in Unix seconds, or None."""
        expiry: float | None = self._rows("SELECT min(expiry) FROM records")[0][0]
        return expiry

    def expired(self, now: float) -> list[Record]:
        return [
            self._record(row)
            for row in self._rows("SELECT * FROM records WHERE expiry < ? ORDER BY record_key", now)
        ]

    def serial(self, source: str) -> float:
        """Return the serial of the last complete update; 0 before the first."""
        rows = self._rows("SELECT serial FROM serials WHERE source = ?", source)
        return float(rows[0][0]) if rows else 0.0

    def set_serial(self, source: str, serial: float) -> None:
        self._write("INSERT OR REPLACE INTO serials VALUES (?, ?)", source, serial)

    # -- values of this host

    def local(self, key: str) -> dict[str, Any]:
        """Return the host's own values of a record; empty if there are none."""
        rows = self._rows("SELECT json FROM local WHERE record_key = ?", key)
        return dict(json.loads(rows[0][0])) if rows else {}

    def locals(self) -> dict[str, dict[str, Any]]:
        return {
            key: json.loads(text)
            for key, text in self._rows("SELECT record_key, json FROM local ORDER BY record_key")
        }

    def keys_with(self, name: str) -> list[str]:
        """Return the records for which this host keeps a value of that name."""
        return [
            key
            for (key,) in self._rows(
                "SELECT record_key FROM local WHERE json_extract(json, ?) IS NOT NULL", f"$.{name}"
            )
        ]

    def update_local(self, key: str, **values: object) -> dict[str, Any]:
        """Set these values (None removes one); return all.

        A write that is not part of another transaction may be lost with the power: what it
        describes does not run after that.
        """
        with self._transaction(lasting=False) as cursor:
            before = self.local(key)
            content = {
                name: value for name, value in {**before, **values}.items() if value is not None
            }
            if content == before:
                return content  # unchanged: no write
            cursor.execute("INSERT OR REPLACE INTO local VALUES (?, ?)", (key, json.dumps(content)))
            return content

    def delete_local(self, key: str) -> None:
        self._write("DELETE FROM local WHERE record_key = ?", key)

    def allocate_index(
        self, name: str, limit: int = 1000, usable: Callable[[int], bool] = lambda number: True
    ) -> int:
        """Return the lowest free number for a sliver, kept until :meth:`free_index`.

        :param usable: whether a free number can be taken now.
        :raises DatabaseError: all are taken.
        """
        with self._transaction() as cursor:
            taken = dict(self._rows("SELECT number, name FROM indexes"))
            for number, owner in taken.items():
                if owner == name:
                    return int(number)
            number = next((n for n in range(1, limit + 1) if n not in taken and usable(n)), None)
            if number is None:
                raise DatabaseError(f"all {limit} slots for slivers are in use")
            cursor.execute("INSERT INTO indexes VALUES (?, ?)", (number, name))
            return int(number)

    def take_index(self, name: str, number: int) -> bool:
        """Claim a certain number, of a sliver found living; False when it is another's."""
        with self._transaction() as cursor:
            if rows := self._rows("SELECT name FROM indexes WHERE number = ?", number):
                return bool(rows[0][0] == name)
            cursor.execute("INSERT OR REPLACE INTO indexes VALUES (?, ?)", (number, name))
            return True

    def owner_of_index(self, number: int) -> str | None:
        rows = self._rows("SELECT name FROM indexes WHERE number = ?", number)
        return str(rows[0][0]) if rows else None

    def free_index(self, name: str) -> None:
        self._write("DELETE FROM indexes WHERE name = ?", name, lasting=False)

    def counters(self, name: str) -> dict[str, Any]:
        """Return the counters of the accounting period; they outlive the sliver."""
        rows = self._rows("SELECT json FROM counters WHERE name = ?", name)
        return dict(json.loads(rows[0][0])) if rows else {}

    def set_counters(self, name: str, content: dict[str, Any]) -> None:
        self._write(
            "INSERT OR REPLACE INTO counters VALUES (?, ?)",
            name,
            json.dumps(content),
            lasting=False,
        )

    def use_ticket(self, jti: str, expiry: float) -> bool:
        """Store the id of a ticket until it expires; return False when it was used before."""
        with self._transaction() as cursor:
            cursor.execute("DELETE FROM used_tickets WHERE expiry < ?", (self._now(),))
            cursor.execute("INSERT OR IGNORE INTO used_tickets VALUES (?, ?)", (jti, expiry))
            return cursor.rowcount == 1

    def dump(self) -> str:
        """Return everything as JSON text for humans."""
        return json.dumps(
            {
                "records": {
                    r.key: {
                        "source": r.source,
                        "serial": r.serial,
                        "timestamp": r.timestamp,
                        "expiry": r.expiry,
                        "record": r.content,
                    }
                    for r in self.records()
                },
                "local": self.locals(),
                "indexes": {
                    name: number for number, name in self._rows("SELECT number, name FROM indexes")
                },
                "serials": dict(self._rows("SELECT source, serial FROM serials")),
                "counters": {
                    name: json.loads(text)
                    for name, text in self._rows("SELECT name, json FROM counters")
                },
            },
            indent=1,
            sort_keys=True,
        )

"""The file ``usage-log``: a row for each node that has ended (SQLite).

Sums of many rows are stored with them, so that a table of a million nodes takes no longer than
one of thousands. They are only a cache: a row that changes invalidates those from its time on.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from nodepool.status.results import Results
from nodepool.status.usage import GROUPS, LISTS, MEASURED, NUMBERS, Sums, Use, table_of
from nodepool.texts import one_line

TEXTS = ("label", "provider", "pool")
USERS = ("tenant", "project", "pipeline", "job", "owner")
TIMES = ("created", "ready", "began", "freed", "removed", "waited")
COLUMNS = ("node", *TEXTS, *USERS, *TIMES, "price", *MEASURED)
#: Permissions that others may not exceed.
MODE = 0o640
#: Of the format, in the file; the first says that it is ours.
APPLICATION, VERSION = 0x4E706C75, 1
#: Rows whose sums are stored together; as many of the newest have none.
TOGETHER = 10_000
#: Seconds to wait for another program that writes the file.
BUSY = 5.0
#: An id that is created again this many seconds after its end is of another node: ZooKeeper was
#: emptied.
AGAIN = 3600.0

_SCHEMA = f"""
CREATE TABLE uses (node TEXT PRIMARY KEY, {", ".join(f"{name} TEXT" for name in TEXTS + USERS)},
    {", ".join(f"{name} REAL" for name in (*TIMES, "price", *MEASURED))});
CREATE INDEX removed ON uses (removed);
CREATE TABLE sums (grouped TEXT, after REAL, until REAL, name TEXT,
    {", ".join((*NUMBERS, *LISTS))});
CREATE INDEX grouped ON sums (grouped, until, after);
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
"""
#: What is known remains; the first price, end and use count.
_KEPT = {
    "price": "coalesce(price, excluded.price)",
    "removed": "coalesce(removed, excluded.removed)",
    "began": "coalesce(min(began, excluded.began), began, excluded.began)",
}
_UPSERT = (
    f"INSERT INTO uses ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    "ON CONFLICT (node) DO UPDATE SET "
    + ", ".join(
        f"{name} = {_KEPT.get(name, f'''coalesce(nullif(excluded.{name}, ''), {name})''')}"
        for name in COLUMNS[1:]
    )
)


class UsageFile:
    """The file, open for reading; for one thread.

    :raises sqlite3.Error, OSError: (also all methods) it cannot be used.
    """

    def __init__(self, path: str, mode: str = "ro") -> None:
        # "?" and "#" have a meaning in URLs.
        name = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        self.connection = sqlite3.connect(f"file:{name}?mode={mode}", timeout=BUSY, uri=True)
        try:
            [(known,)] = self.connection.execute("PRAGMA application_id")
            [(version,)] = self.connection.execute("PRAGMA user_version")
            tables = self.connection.execute("SELECT 1 FROM sqlite_master").fetchall()
            if mode == "rw" and not known and not tables:
                self.connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            elif (known, version) != (APPLICATION, VERSION):
                raise sqlite3.DatabaseError("it is not a usage log of this version of Nodepool")
        except BaseException:
            self.connection.close()
            raise

    def oldest(self) -> float | None:
        """Return when (UNIX seconds) the first node in it was removed."""
        row = self.connection.execute("SELECT min(removed) FROM uses").fetchone()
        return None if row[0] is None else float(row[0])

    def uses(self, since: float) -> Iterator[Use]:
        """Yield the nodes that were removed since then, by that time."""
        return (use for use, _price in self._uses("removed >= ?", since))

    def table(self, by: str, since: float = 0.0) -> Results:
        """Return the table as :func:`.usage.table`, of the nodes that were removed since then.

        :param by: one of :data:`.usage.GROUPS`.
        """
        groups: dict[str, Sums] = defaultdict(Sums)
        where = "FROM sums WHERE grouped = ? AND until >= ? AND after >= ?"
        wanted = (by, since, since)
        self.connection.execute("BEGIN")  # all that follows is of one moment
        [(begin, end)] = self.connection.execute(f"SELECT min(after), max(until) {where}", wanted)
        added = (f"{'max' if key == 'memory_limit' else 'sum'}({key})" for key in NUMBERS)
        numbers = f"SELECT name, {', '.join(added)} {where} GROUP BY name"
        for name, *values in self.connection.execute(numbers, wanted):
            groups[name].count(values)
        lists = f"SELECT name, {', '.join(LISTS)} {where}"
        for name, *found in self.connection.execute(lists, wanted):
            for each, data in zip(groups[name].lists.values(), found, strict=True):
                each.frombytes(data)
        others = "removed >= ? AND (? IS NULL OR removed <= ? OR removed > ?)"
        for use, price in self._uses(others, since, begin, begin, end):
            groups[use.group(by)].add(use, use.removed or 0.0, price)
        self.connection.rollback()
        return table_of(groups, by)

    def _uses(self, where: str, *values: float) -> Iterator[tuple[Use, float | None]]:
        query = f"SELECT {', '.join(COLUMNS)} FROM uses WHERE {where} ORDER BY removed"
        texts, users = 1 + len(TEXTS), 1 + len(TEXTS) + len(USERS)
        times = users + len(TIMES)
        for row in self.connection.execute(query, values):
            user = dict(zip(USERS, row[texts:users], strict=True))
            measured = zip(MEASURED, row[times + 1 :], strict=True)
            known = {key: value for key, value in measured if value is not None}
            yield Use(*(*row[:texts], *row[users:times], user, known)), row[times]

    # -- writing

    def write(self, ended: Sequence[Use], price: Callable[[Use], float | None]) -> None:
        """Add nodes that have ended; what the file has of a node already is completed."""
        again = (
            "UPDATE OR REPLACE uses SET node = node || '@' || CAST(removed AS INTEGER) "
            "WHERE node = ? AND removed < ?"
        )
        with self.connection as transaction:
            for use in ended:
                key = one_line(use.node)
                transaction.execute(again, (key, (use.created or 0.0) - AGAIN))
                texts = [getattr(use, name) for name in TEXTS] + [
                    use.user.get(n, "") for n in USERS
                ]
                numbers = [getattr(use, name) for name in TIMES]
                numbers += [price(use), *map(use.measured.get, MEASURED)]
                transaction.execute(_UPSERT, [key, *map(one_line, texts), *numbers])
            self._changed(min((use.removed or 0.0 for use in ended), default=None))

    def complete(self, use: Use) -> bool:
        """Add what was measured of a node, and return whether the file has it."""
        name = one_line(use.node)
        query = "SELECT removed FROM uses WHERE node = ? AND provider IN ('', ?)"
        for (removed,) in self.connection.execute(query, (name, use.source)).fetchall():
            with self.connection as transaction:
                assigned = ", ".join(f"{key} = coalesce(?, {key})" for key in MEASURED)
                values = (*map(use.measured.get, MEASURED), name)
                transaction.execute(f"UPDATE uses SET {assigned} WHERE node = ?", values)
                self._changed(removed)
            return True
        return False

    def _changed(self, removed: float | None) -> None:
        """Delete the sums of rows that were removed then or later."""
        self.connection.executemany(
            "DELETE FROM sums WHERE grouped = ? AND until >= ?", [(by, removed) for by in GROUPS]
        )

    def sum_up(self) -> bool:
        """Store the sums of the next rows; return False if there are too few of them."""
        with self.connection as transaction:
            last = "SELECT coalesce(max(until), -1.0) FROM sums WHERE grouped = ?"
            [(after,)] = transaction.execute(last, (GROUPS[0],))
            newer = "SELECT removed FROM uses WHERE removed > ? ORDER BY removed LIMIT 1 OFFSET ?"
            if not transaction.execute(newer, (after, 2 * TOGETHER)).fetchone():
                return False
            [(until,)] = transaction.execute(newer, (after, TOGETHER - 1))
            groups: dict[tuple[str, str], Sums] = defaultdict(Sums)
            for use, price in self._uses("removed > ? AND removed <= ?", after, until):
                for by in GROUPS:
                    groups[by, use.group(by)].add(use, use.removed or 0.0, price)
            transaction.executemany(
                f"INSERT INTO sums VALUES (?, ?, ?, ?{', ?' * len((*NUMBERS, *LISTS))})",
                (
                    (by, after, until, name, *sums.numbers.values())
                    + tuple(array("d", sorted(each)).tobytes() for each in sums.lists.values())
                    for (by, name), sums in groups.items()
                ),
            )
        return True

    def __enter__(self) -> UsageFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.connection.close()


def create(path: str) -> UsageFile:
    """Return the file, open for writing; create it if it does not exist, for few to read.

    :raises sqlite3.Error, OSError: it cannot be used.
    """
    # A pipe would block us.
    with open(
        path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, MODE)
    ) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError("it is not a file")
        if stat.S_IMODE(mode) & ~MODE:
            os.fchmod(file.fileno(), stat.S_IMODE(mode) & MODE)
    return UsageFile(path, "rw")

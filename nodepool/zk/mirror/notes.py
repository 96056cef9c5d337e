"""Small records that launchers and operators share; outside the tree of 11.0.0.

``/nodepool/notes/<kind>:<name>``, the name percent-quoted: one JSON object per znode. Each kind has
a class of records, see :data:`KINDS`. Launchers of 11.0.0 and Zuul ignore them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import quote, unquote

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.protocol.states import ZnodeStat

from nodepool.zk import paths
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.drains import Drain
from nodepool.zk.failures import Failures
from nodepool.zk.mirror.tree import Tree
from nodepool.zk.records import RecordError, parse_object
from nodepool.zk.rotations import Rotation
from nodepool.zk.sold_out import SoldOutOffers


class Note(Protocol):
    """A record of one kind; immutable."""

    @property
    def name(self) -> str:
        """Return its name, unique within the kind."""

    def values(self) -> dict[str, Any]:
        """Return what is stored."""

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> Self:
        """Return the record.

        :raises RecordError: it is not valid.
        """


#: The class of the records of each kind; others are ignored, as those of newer launchers.
KINDS: dict[str, type[Note]] = {
    "drain": Drain,
    "failures": Failures,
    "rotation": Rotation,
    "sold-out": SoldOutOffers,
}

N = TypeVar("N", bound=Note)


def path(note: Note) -> str:
    kind = next(kind for kind, each in KINDS.items() if type(note) is each)
    return f"{paths.NOTES}/{_name(kind, note)}"


def _name(kind: str, note: Note) -> str:
    return f"{kind}:{quote(note.name, safe='')}"


class NoteTree(Tree[Any]):
    """The live copy. Records are never modified; a change replaces the whole :attr:`notes`."""

    def __init__(self, client: ZooKeeperClient) -> None:
        super().__init__(client, paths.NOTES)
        #: The records by the name of their znode, with the versions.
        self.notes: dict[str, tuple[Note, int]] = {}
        #: Called without arguments after each change, on the connection thread.
        self.listeners: list[Callable[[], Any]] = []

    def of(self, kind: type[N]) -> list[N]:
        """Return the records of a class, sorted by name."""
        found = [note for note, _ in self.notes.values() if isinstance(note, kind)]
        return sorted(found, key=lambda note: note.name)

    def get(self, kind: type[N], name: str) -> N | None:
        return next((note for note in self.of(kind) if note.name == name), None)

    def version(self, note: Note) -> int:
        """Return the version of its record, for a conditional write; -1 (any) if it is unknown."""
        return next((version for each, version in self.notes.values() if each == note), -1)

    def known_paths(self) -> set[str]:
        return {f"{paths.NOTES}/{name}" for name in self.notes}

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        kind, _, name = parts[0].partition(":")
        if kind not in KINDS:
            return
        values = parse_object(data)
        if values is None:
            raise RecordError("the znode is empty")
        note = KINDS[kind].parse(unquote(name), values)
        if _name(kind, note) != parts[0]:  # nobody would find it to change it
            raise RecordError(f"the znode of this note must be called {_name(kind, note)}")
        self._show(parts[0], note, stat)

    def store_own(self, parts: list[str], path: str, record: Note, stat: ZnodeStat) -> None:
        self._show(parts[0], record, stat)

    def _show(self, name: str, note: Note, stat: ZnodeStat) -> None:
        if isinstance(note, Rotation):
            note = replace(note, zxid=stat.mzxid)
        self._replace(name, (note, stat.version))

    def vanished(self, parts: list[str], path: str) -> None:
        self._replace(parts[0], None)

    def _replace(self, name: str, found: tuple[Note, int] | None) -> None:
        if self.notes.get(name) == found:
            return
        notes = {key: note for key, note in self.notes.items() if key != name}
        self.notes = notes if found is None else {**notes, name: found}
        self.announce(self.listeners)


def write(kazoo: KazooClient, note: Note) -> None:
    """Create the record, or replace it.

    :raises KazooException: no connection, or no answer in time.
    """
    data = json.dumps(note.values()).encode()
    try:
        kazoo.create(path(note), data, makepath=True)
    except NodeExistsError:
        try:
            kazoo.set(path(note), data)
        except NoNodeError:  # it has just been deleted
            kazoo.create(path(note), data)


def remove(kazoo: KazooClient, note: Note, version: int = -1) -> bool:
    """Delete the record; return False if it does not exist.

    :raises BadVersionError: it has changed since that version.
    """
    try:
        kazoo.delete(path(note), version)
    except NoNodeError:
        return False
    return True

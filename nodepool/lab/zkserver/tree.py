"""The znodes: versions, sequences, access control, and atomic transactions."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nodepool.lab.zkserver.codec import Acl, Code, Refused

READ, WRITE, CREATE, DELETE, ADMIN = 1, 2, 4, 8, 16
CREATED, DELETED, CHANGED, CHILD = 1, 2, 3, 4
EPHEMERAL, SEQUENCE = 1, 2
#: What a client is known as: pairs of scheme and id.
Identities = Collection[tuple[str, str]]
#: Type, path and access control list of the znode, in the order in which watches are triggered.
Event = tuple[int, str, tuple[Acl, ...]]

#: Characters and parts that no path may contain.
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff]|/\\.{0,2}(?:/|\\Z)")
_STAT = struct.Struct("!qqqqiiiqiiq")
_OPEN = (Acl((31, "world", "anyone")),)


@dataclass(slots=True)
class Znode:
    data: bytes | None = b""
    acl: tuple[Acl, ...] = _OPEN
    #: The session that it ends with; 0: none.
    owner: int = 0
    czxid: int = 0
    mzxid: int = 0
    pzxid: int = 0
    ctime: int = 0
    mtime: int = 0
    version: int = 0
    aversion: int = 0
    #: Children created so far: the next sequence number.
    created: int = 0
    children: set[str] = field(default_factory=set)

    def stat(self) -> bytes:
        count = len(self.children)
        # Clients see the number of all changes of the children, deletions included; it is signed,
        # and wraps around.
        changes = (self.created * 2 - count + (1 << 31)) % (1 << 32) - (1 << 31)
        return _STAT.pack(
            self.czxid,
            self.mzxid,
            self.ctime,
            self.mtime,
            self.version,
            changes,
            self.aversion,
            self.owner,
            len(self.data or b""),
            count,
            self.pzxid,
        )


def check_path(path: str) -> None:
    """
    :raises Refused: BAD_ARGUMENTS.
    """
    if path == "/":
        return
    if not path.startswith("/") or _FORBIDDEN.search(path):
        raise Refused(Code.BAD_ARGUMENTS)


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def fix_acl(acl: Sequence[Acl], identities: Identities) -> tuple[Acl, ...]:
    """Return the list with ``auth`` replaced by the identities of the client.

    :raises Refused: INVALID_ACL.
    """
    found: list[Acl] = []
    for perms, scheme, name in dict.fromkeys(acl):
        if scheme == "auth":
            mine = [Acl((perms, *known)) for known in identities if known[0] != "ip"]
            if not mine:
                raise Refused(Code.INVALID_ACL)
            found += mine
        elif (scheme, name) == ("world", "anyone") or _valid(scheme, name):
            found.append(Acl((perms, scheme, name)))
        else:
            raise Refused(Code.INVALID_ACL)
    if not found:
        raise Refused(Code.INVALID_ACL)
    return tuple(found)


def _valid(scheme: str, name: str) -> bool:
    return (
        name.count(":") == 1
        if scheme == "digest"
        else scheme == "ip" and name.partition("/")[0].count(".") == 3
    )


class Tree:
    """All znodes. Reads and writes raise `Refused`; the caller serializes them."""

    def __init__(self) -> None:
        self.nodes: dict[str, Znode] = {"/": Znode()}
        #: Paths of ephemeral znodes by session.
        self.ephemerals: dict[int, set[str]] = {}
        self._undo: list[Callable[[], Any]] = []
        self._events: list[Event] = []

    # -- reading

    def get(self, path: str) -> Znode:
        node = self.nodes.get(path)
        if node is None:
            raise Refused(Code.NO_NODE)
        return node

    @staticmethod
    def may(acl: Sequence[Acl], permission: int, identities: Identities) -> bool:
        for perms, scheme, name in acl:
            if perms & permission and (
                (scheme, name) == ("world", "anyone") or (scheme, name) in identities
            ):
                return True
        return False

    def get_for(self, path: str, permission: int, identities: Identities) -> Znode:
        """Return the znode for a client that must have one of these permissions."""
        node = self.get(path)
        if not self.may(node.acl, permission, identities):
            raise Refused(Code.NO_AUTH)
        return node

    # -- writing

    @contextmanager
    def transaction(self) -> Iterator[list[Event]]:
        """Collect the events of the writes inside; a `Refused` that leaves the block undoes
        them.
        """
        self._undo, self._events = [], []
        try:
            yield self._events
        except Refused:
            for undo in reversed(self._undo):
                undo()
            self._events.clear()
            raise
        finally:
            self._undo = []

    def create(
        self,
        path: str,
        data: bytes | None,
        acl: Sequence[Acl],
        flags: int,
        owner: int,
        identities: Identities,
        zxid: int,
        time: int,
    ) -> str:
        """Create a znode; return its path, with the sequence number if it has one."""
        check_path(path.rstrip("/") or "/" if flags & SEQUENCE else path)
        fixed = fix_acl(acl, identities)
        parent = self.get_for(parent_of(path), CREATE, identities)
        if flags & SEQUENCE:
            path = f"{path}{parent.created:010d}"
        if path in self.nodes:
            raise Refused(Code.NODE_EXISTS)
        if parent.owner:
            raise Refused(Code.NO_CHILDREN_FOR_EPHEMERALS)
        self.put(
            path,
            Znode(data, fixed, owner if flags & EPHEMERAL else 0, zxid, zxid, zxid, time, time),
        )
        return path

    def put(self, path: str, node: Znode) -> None:
        """Add a znode whose parent exists; without checks."""
        parent, name = self.nodes[parent_of(path)], path.rpartition("/")[2]
        self._change(parent, created=parent.created + 1, pzxid=node.czxid)
        self._link(path, name, node, parent)
        self._undo.append(lambda: self._unlink(path, name, node, parent))
        self._events += [(CREATED, path, node.acl), (CHILD, parent_of(path), parent.acl)]

    def delete(self, path: str, version: int, identities: Identities, zxid: int) -> None:
        if path == "/":
            raise Refused(Code.BAD_ARGUMENTS)
        check_path(path)
        self.get_for(parent_of(path), DELETE, identities)
        node = self.get(path)
        _check_version(version, node.version)
        if node.children:
            raise Refused(Code.NOT_EMPTY)
        self.remove(path, zxid)

    def remove(self, path: str, zxid: int) -> None:
        """Remove a znode without children; without checks."""
        node, parent, name = self.nodes[path], self.nodes[parent_of(path)], path.rpartition("/")[2]
        self._change(parent, pzxid=zxid)
        self._unlink(path, name, node, parent)
        self._undo.append(lambda: self._link(path, name, node, parent))
        self._events += [(DELETED, path, node.acl), (CHILD, parent_of(path), parent.acl)]

    def set(
        self,
        path: str,
        data: bytes | None,
        version: int,
        identities: Identities,
        zxid: int,
        time: int,
    ) -> Znode:
        check_path(path)
        node = self.get_for(path, WRITE, identities)
        _check_version(version, node.version)
        self.change(node, path, data, zxid, time)
        return node

    def change(self, node: Znode, path: str, data: bytes | None, zxid: int, time: int) -> None:
        """Replace the data of a znode; without checks."""
        self._change(node, data=data, version=node.version + 1, mzxid=zxid, mtime=time)
        self._events.append((CHANGED, path, node.acl))

    def set_acl(self, path: str, acl: Sequence[Acl], version: int, identities: Identities) -> Znode:
        check_path(path)
        fixed = fix_acl(acl, identities)
        node = self.get_for(path, ADMIN, identities)
        _check_version(version, node.aversion)
        self.change_acl(node, fixed)
        return node

    def change_acl(self, node: Znode, acl: tuple[Acl, ...]) -> None:
        """Replace the access control list of a znode; without checks."""
        self._change(node, acl=acl, aversion=node.aversion + 1)

    def check(self, path: str, version: int, identities: Identities) -> None:
        check_path(path)
        node = self.get_for(path, READ, identities)
        _check_version(version, node.version)

    def end_session(self, session: int, zxid: int) -> None:
        """Remove the ephemeral znodes of the session."""
        for path in sorted(self.ephemerals.get(session, ())):
            self.remove(path, zxid)

    # -- changes that can be undone

    def _change(self, node: Znode, **values: object) -> None:
        for name, value in values.items():
            self._undo.append(partial(setattr, node, name, getattr(node, name)))
            setattr(node, name, value)

    def _link(self, path: str, name: str, node: Znode, parent: Znode) -> None:
        self.nodes[path] = node
        parent.children.add(name)
        if node.owner:
            self.ephemerals.setdefault(node.owner, set()).add(path)

    def _unlink(self, path: str, name: str, node: Znode, parent: Znode) -> None:
        del self.nodes[path]
        parent.children.discard(name)
        if node.owner:
            mine = self.ephemerals[node.owner]
            mine.discard(path)
            if not mine:
                del self.ephemerals[node.owner]

    # -- snapshots

    def dump(self) -> Iterable[tuple[str, Znode]]:
        """Return all znodes, parents before children."""
        return sorted(self.nodes.items())

    def load(self, entries: Iterable[tuple[str, Znode]]) -> None:
        """Replace everything by what `dump` returned."""
        self.nodes, self.ephemerals = {}, {}
        for path, node in entries:
            if path == "/":
                self.nodes["/"] = node
            else:
                self._link(path, path.rpartition("/")[2], node, self.nodes[parent_of(path)])


def _check_version(expected: int, actual: int) -> None:
    if expected not in (-1, actual):
        raise Refused(Code.BAD_VERSION)

"""Watches of the clients: one-shot, persistent and persistent recursive."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from nodepool.lab.zkserver.tree import CHILD, DELETED, parent_of

C = TypeVar("C", bound=Hashable)

#: What a one-shot watch is on, as in requests to remove one; `ANY` also removes persistent ones.
CHILDREN, DATA, ANY = 1, 2, 3
PERSISTENT, RECURSIVE = 0, 1
_KINDS = ("data", "children", "persistent", "recursive")


class Watches(Generic[C]):
    """Which client watches which paths."""

    def __init__(self) -> None:
        self._by_path: dict[str, dict[str, dict[C, None]]] = {kind: {} for kind in _KINDS}
        self._of: dict[C, dict[tuple[str, str], None]] = {}

    def add(self, kind: str, path: str, client: C) -> None:
        """Add a watch.

        :param kind: ``data`` (also for existence), ``children``, ``persistent`` or ``recursive``.
        """
        # Dictionaries keep an order that does not depend on memory addresses.
        self._by_path[kind].setdefault(path, {})[client] = None
        self._of.setdefault(client, {})[kind, path] = None

    def remove(self, path: str, client: C, what: int) -> bool:
        """Remove the client's watches of this path; return whether there was one."""
        kinds = {CHILDREN: ("children",), DATA: ("data",)}.get(what, _KINDS)
        return sum(self._remove(kind, path, client) for kind in kinds) > 0

    def forget(self, client: C) -> None:
        """Remove all watches of a client that is no longer connected."""
        for kind, path in list(self._of.get(client, ())):
            self._remove(kind, path, client)

    def triggered(self, what: int, path: str) -> Iterable[C]:
        """Return which clients watch for an event; one-shot watches end by it."""
        told: dict[C, None] = {}
        for kind in (
            ("children",)
            if what == CHILD
            else ("data", "children")
            if what == DELETED
            else ("data",)
        ):
            for client in list(self._by_path[kind].get(path, ())):
                told[client] = None
                self._remove(kind, path, client)
        told.update(self._by_path["persistent"].get(path, {}))
        if what != CHILD and self._by_path["recursive"]:
            above = path
            while True:
                told.update(self._by_path["recursive"].get(above, {}))
                if above == "/":
                    break
                above = parent_of(above)
        return told

    def _remove(self, kind: str, path: str, client: C) -> bool:
        clients = self._by_path[kind].get(path, {})
        if client not in clients:
            return False
        del clients[client]
        if not clients:
            del self._by_path[kind][path]
        mine = self._of[client]
        del mine[kind, path]
        if not mine:
            del self._of[client]
        return True

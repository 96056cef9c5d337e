"""A live copy of a part of the tree, fed by a persistent recursive watch.

Everything here runs on the connection thread, in the order of the server; a watch event always
precedes the answer to any later request. Our own writes are adopted from the answer instead of
being read.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from kazoo.exceptions import NoAuthError, NoNodeError
from kazoo.protocol.serialization import Exists, GetChildren2, GetData
from kazoo.protocol.states import KazooState, ZnodeStat

from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.connection.protocol import BROKEN, CHANGED, CREATED, DELETED
from nodepool.zk.connection.reply import Reply

R = TypeVar("R")
K = TypeVar("K")

#: Seconds until a tree that could not be read is read again; not used for broken connections.
READ_AGAIN = 5.0


def put(groups: dict[K, set[str]], key: K, name: str, present: bool) -> None:
    """Add a name to a group, or remove it, and the group with its last name."""
    if present:
        groups.setdefault(key, set()).add(name)
    elif key in groups:
        groups[key].discard(name)
        if not groups[key]:
            del groups[key]


class Tree(Generic[R]):
    """Base of the mirrored subtrees. ``lock`` guards everything that readers see."""

    log = logging.getLogger("nodepool.zk.cache.event")

    def __init__(self, client: ZooKeeperClient, root: str) -> None:
        self.client = client
        self.root = root
        self.lock = threading.RLock()
        self.synced = threading.Event()
        #: Called (without arguments) each time the copy is complete, on the connection thread.
        self.sync_listeners: list[Callable[[], Any]] = []
        #: path -> why its data cannot be used.
        self.bad: dict[str, str] = {}
        self._bad_versions: dict[str, int] = {}
        self._prefix = len(root) + 1
        self._generation = 0
        self._outstanding = 0
        self._stale: set[str] = set()
        #: Paths shown since before the last reconnect: a restored server may have older records.
        self._unconfirmed: set[str] = set()
        #: The newest change (zxid) seen in this session, the same at the last reconnect, and the
        #: newest one that was read since then.
        self._zxid = self._zxid_before = self._zxid_found = 0
        self._stopped = False
        self._again: threading.Timer | None = None
        # Our pending writes: path -> [their number, change events seen meanwhile].
        self._own: dict[str, list[int]] = {}
        self._own_creates = 0
        self._deferred: set[str] = set()
        #: Paths that are being read: their records are about to change.
        self.reading: dict[str, int] = {}
        self.reads = 0

    # -- to be implemented; by default, the children of the root have data, and no children of
    # interest

    def wants_data(self, parts: list[str]) -> bool:
        """Return whether the znode at these path parts (below the root) has data that we show."""
        return len(parts) == 1

    def wants_children(self, parts: list[str], stat: ZnodeStat | None) -> bool:
        """Return whether to read its children while synchronizing."""
        return False

    def known_paths(self) -> set[str]:
        """Return all paths shown at present; those in :attr:`bad` need not be included."""
        raise NotImplementedError

    def store(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        raise NotImplementedError

    def store_own(self, parts: list[str], path: str, record: R, stat: ZnodeStat) -> None:
        """Process a record that we wrote, if records are written through this mirror."""
        raise NotImplementedError

    def appeared(self, parts: list[str], path: str) -> None:
        """Process a znode without data of interest."""

    def unchanged(self, parts: list[str]) -> None:
        """Process a refused write of ours: postponed work can be done now."""

    def vanished(self, parts: list[str], path: str) -> None:
        raise NotImplementedError

    # -- life

    def start(self) -> None:
        """Follow the tree from now on, over reconnects and new sessions."""
        self.client.kazoo.add_persistent_watch(self.root, self._event)
        self.client.state_listeners.append(self._state_changed)
        if self.client.connected:
            self._synchronise()

    def stop(self) -> None:
        self._stopped = True
        if self._state_changed in self.client.state_listeners:
            self.client.state_listeners.remove(self._state_changed)
        timer, self._again = self._again, None
        if timer is not None:
            timer.cancel()
            timer.join(1.0)
        if self.client.client is not None:
            self.client.client.remove_persistent_watch(self.root, self._event)

    def _state_changed(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self._synchronise()
        else:
            if state == KazooState.LOST:
                self._zxid = 0
            self.synced.clear()
            with self.lock:
                self._generation += 1
                self._own.clear()
                self.reading.clear()
                self._own_creates = 0
                self._deferred.clear()

    def changing(self) -> list[str]:
        """Return paths of records that have changed and are not read yet.

        Changes that are older than the answer to a read of this client are here, or are shown.
        """
        with self.lock:
            return list({*list(self.reading), *list(self._own), *list(self._deferred)})

    # -- synchronizing

    def _synchronise(self) -> None:
        self._generation += 1
        generation = self._generation
        self.synced.clear()
        with self.lock:
            self._stale = self.known_paths() | set(self.bad)
            self._unconfirmed = set(self._stale)
        self._outstanding = 1
        self._zxid_before, self._zxid_found = self._zxid, 0
        kazoo = self.client.kazoo

        def armed(_result: object, error: BaseException | None, _zxid: int) -> None:
            if generation != self._generation:
                return
            if error is not None:
                self._failed(
                    generation, f"watch {self.root} (ZooKeeper 3.6 or newer is needed)", error
                )
                return
            self._read_below(self.root, [], generation)
            self._done_one(generation)

        kazoo.arm_persistent_watch(self.root, Reply(armed))

    def _failed(self, generation: int, what: str, error: BaseException) -> None:
        """Keep what is shown after a failed read, and read the tree again."""
        if generation != self._generation:
            return
        self._generation += 1
        self.synced.clear()
        if isinstance(error, BROKEN):
            return  # it is read again with the next connection
        self.log.error("Cannot %s: %r; retrying in %g s", what, error, READ_AGAIN)
        generation = self._generation

        def on_connection(_result: object, _error: BaseException | None, _zxid: int) -> None:
            if generation == self._generation and self.client.connected:
                self._synchronise()

        def again() -> None:
            client = self.client.client
            if client is not None and generation == self._generation and not self._stopped:
                client.submit(Exists(client.full_path(self.root), None), Reply(on_connection))

        if not self._stopped:
            self._again = threading.Timer(READ_AGAIN, again)
            self._again.name, self._again.daemon = f"ThreadPoolExecutor mirror of {self.root}", True
            self._again.start()

    def _done_one(self, generation: int) -> None:
        if generation != self._generation:
            return
        self._outstanding -= 1
        if self._outstanding:
            return
        for path in sorted(self._stale, key=len, reverse=True):
            self._deleted(path[self._prefix :].split("/"), path)
        self._stale = set()
        if self._zxid_found < self._zxid_before:
            # The session was restored with the data, and so were locks that were released since.
            self._zxid = 0
            self.client.end_session(f"the data of {self.root} are older than before")
            return
        self.synced.set()
        self.announce(self.sync_listeners)

    def _note(self, stat: ZnodeStat, synchronizing: bool) -> None:
        """Remember the newest change of a znode and its children."""
        newest = int(max(stat.mzxid, stat.pzxid))
        self._zxid = max(self._zxid, newest)
        if synchronizing:
            self._zxid_found = max(self._zxid_found, newest)

    def _note_error(self, error: BaseException | None) -> None:
        """Assume that what cannot be read is the newest change."""
        if error is not None:
            self._zxid_found = max(self._zxid_found, self._zxid_before)

    def _read_below(self, path: str, parts: list[str], generation: int) -> None:
        self._outstanding += 1

        def answer(
            result: tuple[list[str], ZnodeStat], error: BaseException | None, _zxid: int
        ) -> None:
            if generation != self._generation:
                return
            self._note_error(error)
            if error is None:
                self._note(result[1], True)
                for name in result[0]:
                    self._discovered(f"{path}/{name}", [*parts, name], generation)
            elif isinstance(error, NoAuthError) and parts:
                self._set_aside(parts, path, f"we may not list it: {error!r}", 0)
            elif not isinstance(error, NoNodeError):
                self._failed(generation, f"list {path}", error)
            self._done_one(generation)

        self.reads += 1
        client = self.client.kazoo
        client.submit(GetChildren2(client.full_path(path), None), Reply(answer))

    def _discovered(self, path: str, parts: list[str], generation: int) -> None:
        self._stale.discard(path)
        if self.wants_data(parts):
            self._outstanding += 1
            self._read(path, parts, generation)
            return
        self.appeared(parts, path)
        if self.wants_children(parts, None):
            self._read_below(path, parts, generation)

    def _read(self, path: str, parts: list[str], sync_generation: int | None) -> None:
        client = self.client.client
        if client is not None:
            self.reads += 1
            self.reading[path] = self.reading.get(path, 0) + 1
            # A closure would create an object for each variable, for tens of thousands of reads.
            answered = functools.partial(
                self._answered, path, parts, self._generation, sync_generation
            )
            client.submit(GetData(client.full_path(path), None), Reply(answered))

    def _answered(
        self,
        path: str,
        parts: list[str],
        generation: int,
        sync_generation: int | None,
        result: Any,
        error: BaseException | None,
        _zxid: int,
    ) -> None:
        left = self.reading.get(path, 1) - 1
        if left > 0:
            self.reading[path] = left
        else:
            self.reading.pop(path, None)
        if sync_generation is not None and sync_generation != self._generation:
            return
        self._note_error(error)
        if error is None:
            data, stat = result
            self._note(stat, sync_generation is not None)
            self.take(parts, path, data, stat)
            if sync_generation is not None and self.wants_children(parts, stat):
                self._read_below(path, parts, sync_generation)
        elif isinstance(error, NoNodeError):
            self._deleted(parts, path)
        elif isinstance(error, NoAuthError):  # it affects this record only
            self._set_aside(parts, path, f"we may not read it: {error!r}", 0)
        else:
            self._failed(generation, f"read {path}", error)
        if sync_generation is not None:
            self._done_one(sync_generation)

    def take(self, parts: list[str], path: str, data: bytes | None, stat: ZnodeStat) -> None:
        """Show these data; an invalid record is ignored and logged once per change."""
        self._stale.discard(path)
        try:
            self.store(parts, path, data, stat)
        except Exception as error:
            self._set_aside(parts, path, str(error), stat.mzxid)
        else:
            self._not_bad(path)
        self._unconfirmed.discard(path)

    def is_older(self, path: str, now: ZnodeStat | None, before: ZnodeStat | None) -> bool:
        """Return whether the read data are older than the shown ones.

        Both must be from the same connection.
        """
        return bool(now and before and now.mzxid < before.mzxid and path not in self._unconfirmed)

    def _set_aside(self, parts: list[str], path: str, reason: str, version: int) -> None:
        if self._bad_versions.get(path) != version:
            self.log.error("Ignoring %s: %s", path, reason)
        self._deleted(parts, path)
        self._bad_versions[path] = version
        with self.lock:
            self.bad[path] = reason

    def _not_bad(self, path: str) -> None:
        if path in self.bad:
            with self.lock:
                del self.bad[path]
            self._bad_versions.pop(path, None)

    def _deleted(self, parts: list[str], path: str) -> None:
        self._stale.discard(path)
        self._not_bad(path)
        try:
            self.vanished(parts, path)
        except Exception:
            self.log.exception("Cannot forget %s:", path)

    def announce(self, listeners: Iterable[Callable[..., Any]], *args: object) -> None:
        """Call all listeners, even if one raises an exception or removes itself."""
        for listener in tuple(listeners):
            try:
                listener(*args)
            except Exception:
                self.log.exception("Error in a listener of %s", self.root)

    # -- events

    def _event(self, kind: int, path: str) -> None:
        if len(path) < self._prefix:
            return
        parts = path[self._prefix :].split("/")
        if kind == DELETED:
            self._deferred.discard(path)
            self._deleted(parts, path)
            return
        if not self.wants_data(parts):
            if kind == CREATED:
                self._stale.discard(path)
                self.appeared(parts, path)
            return
        if kind == CHANGED:
            own = self._own.get(path)
            if own is not None:
                own[1] += 1
                return
        elif self._own_creates:
            self._deferred.add(path)
            return
        self._read(path, parts, None)

    # -- writes of our own (called by the Writer)

    def expect(self, path: str, create: bool) -> None:
        """Announce a write of ours, whose events require no reading."""
        with self.lock:
            if create:
                self._own_creates += 1
            else:
                self._own.setdefault(path, [0, 0])[0] += 1

    def settle(self, path: str, record: R | None, result: object, zxid: int) -> None:
        """Process the answer to a write; ``record`` is None if it was refused."""
        with self.lock:
            stat = result if isinstance(result, ZnodeStat) else None
            if isinstance(result, str):
                now = int(time.time() * 1000)
                stat = ZnodeStat(zxid, zxid, now, now, 0, 0, 0, 0, 0, 0, zxid)
            # A refused or lost write does not contain its type; our state does.
            own = self._own.get(path)
            if own is not None:
                own[0] -= 1
                if stat is not None:
                    own[1] -= 1
                if own[0] <= 0:
                    del self._own[path]
            elif self._own_creates:
                self._own_creates -= 1
        if stat is None or record is None:
            if own is not None and own[0] <= 0:
                parts = path[self._prefix :].split("/")
                if own[1] > 0:
                    self._read(path, parts, None)
                else:
                    self.unchanged(parts)
            return
        if isinstance(result, str):
            path = result
            self._deferred.discard(path)
        self._note(stat, False)
        parts = path[self._prefix :].split("/")
        self._stale.discard(path)
        try:
            self.store_own(parts, path, record, stat)
        except Exception:
            self.log.exception("Cannot show what was written to %s:", path)
        else:
            self._not_bad(path)  # we have replaced it
        self._unconfirmed.discard(path)
        if own is not None and own[1] > 0 and own[0] <= 0:
            self._read(path, parts, None)  # another client wrote it, too

    def settled(self) -> None:
        """Read creations that were not ours: all parts of an answer have been processed."""
        if self._deferred:
            paths, self._deferred = self._deferred, set()
            for path in paths:
                self._read(path, path[self._prefix :].split("/"), None)

"""What happened, kept for a day beside the tree of release 11.0.0: ``nodepool explain`` and the pages show it.

``/nodepool/history/<sequence>``: compressed lines of JSON, an event (:mod:`nodepool.zk.mirror.feed`) each, in the order of time.
The launcher that is elected for statistics writes what the mirror shows, each launcher what only it knows: many events
in one write, a few seconds late at most, and never on the way of a request. Now and then many writes are made one,
``/nodepool/history/<first>-<last>``, so that a day is read at once. What was not written when a launcher is killed is
lost: nothing depends on it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError, NoNodeError, NotEmptyError

from nodepool.zk.mirror.feed import Event, Feed

ROOT = "/nodepool/history"
TIMEOUT = 30.0
"""Seconds for one answer of the server."""
FLUSH_AFTER, FLUSH_AT = 5.0, 1000
"""Seconds that an event waits, and how many events do: then they are written together."""
MOST_WAITING = 20000
"""Events that wait for ZooKeeper; older ones are left out."""
LONGEST, MOST_BYTES = 24 * 3600.0, 8 << 20
"""What is kept: seconds, and bytes in ZooKeeper."""
LARGEST = 16 << 20
"""Bytes that one write unpacks to, at most."""
LARGEST_WRITE = 512 << 10
"""Bytes of one write before compression: ZooKeeper ends the connection of a client that sends more than 1 MiB."""
MERGE_AT, MERGED, MERGED_BYTES = 200, 100, 512 << 10
"""There are so many writes until so many of them become one, which has so many bytes at most."""
TIDY_INTERVAL = 300.0

log = logging.getLogger("nodepool.zk.history")


class HistoryWriter:
    """Collects events of a feed and writes them now and then."""

    def __init__(self, feed: Feed, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._waiting: list[Event] = []
        self._oldest = 0.0
        self._tidy_at = 0.0
        self._feed = feed
        feed.subscribe(self._heard)

    def _heard(self, event: Event) -> None:
        if event["type"] in ("image-changed", "component-changed"):
            return  # builds have records of their own, and launchers and builders their logs
        with self._lock:
            if not self._waiting:
                self._oldest = self._monotonic()
            self._waiting.append(event)
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[: MOST_WAITING // 2]

    def flush(self, kazoo: KazooClient, elected: bool, at_once: bool = False) -> None:
        """Write what is due, and tidy up what is there.

        :param elected: whether this launcher also writes what all see.
        :raises KazooException: no connection, or no answer in time; what was due is lost.
        """
        now = self._monotonic()
        with self._lock:
            if not self._waiting:
                return
            if not at_once and len(self._waiting) < FLUSH_AT and now - self._oldest < FLUSH_AFTER:
                return
            events, self._waiting = self._waiting, []
        if not elected:
            events = [event for event in events if event.get("noted")]
        for data in _packed(events):
            kazoo.create_async(f"{ROOT}/", data, sequence=True, makepath=True).get(timeout=TIMEOUT)
        if elected and now >= self._tidy_at:
            self._tidy_at = now + TIDY_INTERVAL
            tidy(kazoo)


def _packed(events: Iterable[Event]) -> Iterator[bytes]:
    """Yield the data of each write; an event that does not fit into one write is left out."""
    lines: list[bytes] = []
    size = 0
    for event in events:
        line = json.dumps(stored(event)).encode()
        if len(line) > LARGEST_WRITE:
            log.warning("Event %s is not kept in the history: %d bytes, at most %d are allowed",
                        event["type"], len(line), LARGEST_WRITE)  # fmt: skip
            continue
        if lines and size + len(line) > LARGEST_WRITE:
            yield zlib.compress(b"\n".join(lines))
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        yield zlib.compress(b"\n".join(lines))


def wait_for_write(kazoo: KazooClient, written: Callable[[], object]) -> None:
    """Call ``written`` at the next write, from another thread.

    :raises KazooException: no connection, or no answer in time.
    """
    try:
        kazoo.get_children_async(ROOT, watch=lambda _event: written()).get(timeout=TIMEOUT)
    except NoNodeError:
        kazoo.exists_async(ROOT, watch=lambda _event: written()).get(timeout=TIMEOUT)


def stored(event: Event) -> Event:
    return {name: value for name, value in event.items() if name not in ("number", "noted")}


def tidy(kazoo: KazooClient) -> None:
    """Delete old and excess writes, and merge many writes into one.

    Ages are relative to the newest write, on the clock of the server. A znode that cannot be
    deleted or read keeps no other from being deleted.

    :raises KazooException: no connection, or no answer in time.
    """
    stats = [(name, kazoo.exists_async(f"{ROOT}/{name}")) for name in _names(kazoo)]
    there = [(name, stat) for name, answer in stats if (stat := answer.get(timeout=TIMEOUT)) is not None]
    size = sum(stat.dataLength for _name, stat in there)
    newest = max((stat.ctime for _name, stat in there), default=0)
    kept = []
    for name, stat in there:
        if size <= MOST_BYTES and (newest - stat.ctime) / 1000 <= LONGEST:
            kept.append(name)
            continue
        size -= stat.dataLength
        try:
            kazoo.delete_async(f"{ROOT}/{name}").get(timeout=TIMEOUT)
        except NoNodeError:
            continue
        except NotEmptyError as error:
            log.warning("Cannot delete %s/%s: %r", ROOT, name, error)
    single = [name for name in kept if name.isdigit()]
    if len(single) > MERGE_AT:
        _merge(kazoo, single[:MERGED])


def _merge(kazoo: KazooClient, names: list[str]) -> None:
    """As many of these, oldest first, as fit into one; at once, so that none is there twice or not at all."""
    taken: list[str] = []
    texts: list[bytes] = []
    size = length = 0
    for name, answer in [(name, kazoo.get_async(f"{ROOT}/{name}")) for name in names]:
        try:
            data = answer.get(timeout=TIMEOUT)[0]
        except NoNodeError:
            return  # another launcher tidies up
        except NoAuthError:
            continue
        text = _unpacked(name, data)
        if taken and (size + len(data) > MERGED_BYTES or length + len(text) > LARGEST):
            break
        taken.append(name)
        texts += [text] if text else []
        size, length = size + len(data), length + len(text)
    if not taken:
        return
    transaction = kazoo.transaction()
    transaction.create(f"{ROOT}/{taken[0]}-{taken[-1]}", zlib.compress(b"\n".join(texts)))
    for name in taken:
        transaction.delete(f"{ROOT}/{name}")
    refused = [result for result in transaction.commit_async().get(timeout=TIMEOUT) if isinstance(result, Exception)]
    if refused:
        log.debug("%d writes of the history stay as they are: %r", len(taken), refused[0])


def _names(kazoo: KazooClient) -> list[str]:
    try:
        return sorted(kazoo.get_children_async(ROOT).get(timeout=TIMEOUT))
    except NoNodeError:
        return []


class HistoryReader:
    """Reads events of one object; what was read is kept, as it never changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Name -> UNIX seconds when it was written, and what.
        self._segments: dict[str, tuple[float, bytes]] = {}

    def read(self, kazoo: KazooClient, key: str, name: str) -> list[Event]:
        """Events whose field ``key`` is (or has) ``name``, by time.

        :raises KazooException: no connection, or no answer in time.
        """
        wanted = name.encode()
        found = [event for event in self._all(kazoo, wanted) if _has(event, key, name)]
        return sorted(found, key=lambda event: event["time"])

    def read_all(self, kazoo: KazooClient, since: float = 0.0) -> list[Event]:
        """All that are kept, by time.

        :param since: UNIX seconds; what was written before is left out.
        :raises KazooException: no connection, or no answer in time.
        """
        return sorted(self._all(kazoo, b"", since), key=lambda event: event["time"])

    def _all(self, kazoo: KazooClient, wanted: bytes, since: float = 0.0) -> Iterator[Event]:
        """Those whose text has ``wanted``."""
        kept: dict[str, tuple[float, bytes]] = {}
        # Again, when some have become one or have gone meanwhile.
        for _ in range(3):
            names = _names(kazoo)
            with self._lock:
                kept = {each: self._segments[each] for each in names if each in self._segments}
            missing = [each for each in names if each not in kept]
            for each, answer in [(each, kazoo.get_async(f"{ROOT}/{each}")) for each in missing]:
                try:
                    data, stat = answer.get(timeout=TIMEOUT)
                except (NoNodeError, NoAuthError):
                    continue
                kept[each] = (stat.ctime / 1000, data)
            with self._lock:
                self._segments = kept
            if len(kept) == len(names):
                break
        for each, (written, data) in sorted(kept.items()):
            if written >= since:
                yield from _events(each, data, wanted)


def _unpacked(name: str, data: bytes) -> bytes:
    """Nothing, when it is damaged."""
    try:
        return zlib.decompressobj().decompress(data, LARGEST)
    except zlib.error as error:
        log.warning("Ignoring %s/%s: %s", ROOT, name, error)
        return b""


def _events(name: str, data: bytes, wanted: bytes) -> Iterable[Event]:
    text = _unpacked(name, data)
    if wanted not in text:
        return
    lines = [line for line in text.split(b"\n") if wanted in line]
    try:
        events = json.loads(b"[%b]" % b",".join(lines))
    except (ValueError, RecursionError):
        events = [event for line in lines for event in _parsed(line)]
    for event in events:
        if isinstance(event, dict) and isinstance(event.get("type"), str) and isinstance(event.get("time"), (int, float)):
            for field in [field for field, value in event.items() if not _usable(field, value)]:
                del event[field]
            yield event


def _parsed(line: bytes) -> list[Any]:
    """Return nothing for a damaged line."""
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        return []


def _usable(field: str, value: object) -> bool:
    """Return whether an event may have this value: a list of texts for the plural fields, else no list or object."""
    if not isinstance(value, (list, dict)):
        return field not in ("labels", "nodes")
    return field in ("labels", "nodes") and isinstance(value, list) and all(isinstance(each, str) for each in value)


def _has(event: Event, key: str, name: str) -> bool:
    value = event.get(key)
    return name in value if isinstance(value, list) else value == name

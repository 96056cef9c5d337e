"""Events of the last day, for ``nodepool explain`` and the pages.

Outside the tree of release 11.0.0: ``/nodepool/history/<sequence>`` contains compressed lines of
JSON, one event
(:mod:`nodepool.zk.mirror.feed`) each, in order of time. The launcher that is elected for statistics
writes what the mirror shows, and each launcher its own events: many events in one write, at most a
few seconds late, and never while processing a request. Now and then many writes are merged into
``/nodepool/history/<first>-<last>``, so that a day can be read quickly. Events not written when a
launcher is killed are lost: nothing depends on them.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError, NoNodeError, NotEmptyError

from nodepool.zk.mirror.feed import KILLED, Event, Feed
from nodepool.zk.reading import TIMEOUT, UNREADABLE, answers, children, create_next

ROOT = "/nodepool/history"
#: Events are written together after this many seconds, or when this many wait.
FLUSH_AFTER, FLUSH_AT = 5.0, 1000
#: Maximum number of events that wait for ZooKeeper; older ones are dropped.
MOST_WAITING = 20000
#: Retention: seconds, and bytes in ZooKeeper.
LONGEST, MOST_BYTES = 24 * 3600.0, 8 << 20
#: Bytes that one write unpacks to, at most.
LARGEST = 16 << 20
#: Bytes of one write before compression: ZooKeeper closes the connection of a client that sends
#: more than 1 MiB.
LARGEST_WRITE = 512 << 10
#: Number of writes that starts a merge, number of merged writes, and maximum bytes of the result.
MERGE_AT, MERGED, MERGED_BYTES = 200, 100, 512 << 10
TIDY_INTERVAL = 300.0
#: UNIX seconds that no time of an event reaches, unless it is wrong.
LATEST = 1e11
#: No number of an event reaches this, unless it is wrong: not even the id of a transaction.
MOST_NUMBER = 1 << 64

log = logging.getLogger("nodepool.zk.history")


class HistoryWriter:
    """Collects events of a feed and writes them in intervals."""

    def __init__(self, feed: Feed, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._waiting: list[Event] = []
        self._oldest = 0.0
        self._tidy_at = 0.0
        self._feed = feed
        feed.subscribe(self._note_event)

    def _note_event(self, event: Event) -> None:
        if event["type"] in ("image-changed", "component-changed", "drain-changed"):
            return  # builds and drains have separate records, and launchers and builders have logs
        with self._lock:
            if event["type"] == KILLED:
                self._oldest = -FLUSH_AFTER  # immediately
            elif not self._waiting:
                self._oldest = self._monotonic()
            self._waiting.append(event)
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[: MOST_WAITING // 2]
            # Events of several threads come in any order.
            self._feed.stored = min(self._feed.stored, event["number"] - 1)

    def _note_stored(self) -> None:
        """Note up to which number events are stored, or need not be; under the lock."""
        waiting = (event["number"] for event in self._waiting)
        self._feed.stored = min(waiting, default=self._feed.number + 1) - 1

    def flush(self, kazoo: KazooClient, elected: bool, at_once: bool = False) -> None:
        """Write due events, and tidy up.

        :param elected: whether this launcher also writes what all launchers see.
        :raises KazooException: no connection, or no answer in time; the next call tries again.
        """
        now = self._monotonic()
        with self._lock:
            if not self._waiting:
                self._note_stored()
                return
            if not at_once and len(self._waiting) < FLUSH_AT and now - self._oldest < FLUSH_AFTER:
                return
            events, self._waiting = self._waiting, []
        written, done = [each for each in events if elected or each.get("noted")], 0
        try:
            for data, number in _packed(written):
                create_next(kazoo, ROOT, data)
                done = number
        except BaseException:
            with self._lock:  # the next may have been written: readers drop duplicates
                self._waiting[:0] = written[done:]
                self._oldest = now
            raise
        with self._lock:
            self._note_stored()
        if elected and now >= self._tidy_at:
            self._tidy_at = now + TIDY_INTERVAL
            tidy(kazoo)


def _packed(events: Sequence[Event]) -> Iterator[tuple[bytes, int]]:
    """Yield the data of each write, and how many events it and earlier ones have.

    An event that does not fit into one write is dropped.
    """
    lines: list[bytes] = []
    size = 0
    for number, event in enumerate(events):
        line = json.dumps(stored(event)).encode()
        if len(line) > LARGEST_WRITE:
            log.warning(
                "Event %s is not recorded in the history: it has %d bytes, the limit is %d",
                event["type"],
                len(line),
                LARGEST_WRITE,
            )
            continue
        if lines and size + len(line) > LARGEST_WRITE:
            yield zlib.compress(b"\n".join(lines)), number
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        yield zlib.compress(b"\n".join(lines)), len(events)


def append(kazoo: KazooClient, kind: str, fields: dict[str, Any]) -> None:
    """Write one event of a process without a feed.

    :raises KazooException: no connection, or no answer in time.
    """
    for data, _number in _packed([{"time": round(time.time(), 3), "type": kind, **fields}]):
        create_next(kazoo, ROOT, data)


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


def unique(events: Iterable[Event]) -> list[Event]:
    """Return the events by time, each once.

    Several launchers may have seen the same change at different times.
    """
    found: dict[str, Event] = {}
    for event in sorted(events, key=lambda event: event["time"]):
        content = {
            key: value
            for key, value in stored(event).items()
            if key != "time" or "zxid" not in event
        }
        found.setdefault(json.dumps(content, sort_keys=True), event)
    return list(found.values())


def tidy(kazoo: KazooClient) -> None:
    """Delete old and excess writes, and merge many writes into one.

    Ages are relative to the newest write, on the clock of the server. A znode that cannot be
    deleted or read keeps no other from being deleted. What we may not read stays since ZooKeeper
    3.8.4 and 3.9.2 (ZOOKEEPER-2590): its age and size cannot be read, either.

    :raises KazooException: no connection, or no answer in time.
    """
    written = [f"{ROOT}/{name}" for name in children(kazoo, ROOT)]
    there = [
        (path.rpartition("/")[2], stat)
        for path, stat in answers(kazoo.exists_async, written, UNREADABLE)
        if stat is not None
    ]
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
    """Merge as many of these as fit into one write, oldest first.

    This is one transaction, so that no event is duplicated or missing.
    """
    taken: list[str] = []
    texts: list[bytes] = []
    size = length = 0
    for name, answer in [(name, kazoo.get_async(f"{ROOT}/{name}")) for name in names]:
        try:
            data = answer.get(timeout=TIMEOUT)[0]
        except NoNodeError:
            return  # another launcher is tidying up
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
    refused = [
        result
        for result in transaction.commit_async().get(timeout=TIMEOUT)
        if isinstance(result, Exception)
    ]
    if refused:
        log.debug("Cannot merge %d writes of the history: %r", len(taken), refused[0])


class HistoryFollower:
    """Reads each event once, or a few again: of writes that are merged while they are read."""

    def __init__(self) -> None:
        #: All writes up to this number were read.
        self._last = -1

    def read(self, kazoo: KazooClient) -> Iterator[list[Event]]:
        """Yield the events of each new write, by time.

        :raises KazooException: no connection, or no answer in time.
        """
        ends = {
            name: int(last)
            for name in children(kazoo, ROOT)
            if (last := name.rpartition("-")[2]).isdecimal()
        }
        if max(ends.values(), default=self._last) < self._last:
            self._last = -1  # ZooKeeper was emptied
        for name in [name for name, end in ends.items() if end > self._last]:
            try:
                data = kazoo.get_async(f"{ROOT}/{name}").get(timeout=TIMEOUT)[0]
            except NoNodeError:
                return  # merged, or too old: the next call reads what exists then
            except NoAuthError:
                data = b""
            if data:
                yield sorted(_events(name, data, b""), key=lambda event: event["time"])
            self._last = max(self._last, ends[name])


class HistoryReader:
    """Reads events of one object; data read are cached, as they never change.

    :param kind: a type of events: only these are read, and only they are cached.
    """

    def __init__(self, kind: str = "") -> None:
        self._kind = f'"{kind}"'.encode() if kind else b""
        self._lock = threading.Lock()
        #: Name -> UNIX seconds when it was written, and its data.
        self._segments: dict[str, tuple[float, bytes]] = {}

    def read(self, kazoo: KazooClient, key: str, name: str) -> list[Event]:
        """Return events whose field ``key`` is (or contains) ``name``, by time.

        :raises KazooException: no connection, or no answer in time.
        """
        wanted = name.encode()
        return unique(event for event in self._all(kazoo, wanted) if _has(event, key, name))

    def read_all(self, kazoo: KazooClient, since: float = 0.0) -> list[Event]:
        """Return all events, by time.

        :param since: UNIX seconds; earlier writes are omitted.
        :raises KazooException: no connection, or no answer in time.
        """
        return unique(self._all(kazoo, b"", since))

    def skip(self, kazoo: KazooClient) -> None:
        """Omit everything that is written now.

        :raises KazooException: no connection, or no answer in time.
        """
        self._segments = dict.fromkeys(children(kazoo, ROOT), (0.0, b""))

    def _all(self, kazoo: KazooClient, wanted: bytes, since: float = 0.0) -> Iterator[Event]:
        kept: dict[str, tuple[float, bytes]] = {}
        # Repeated if some were merged or deleted in the meantime.
        for _ in range(3):
            names = children(kazoo, ROOT)
            with self._lock:
                kept = {each: self._segments[each] for each in names if each in self._segments}
            missing = [each for each in names if each not in kept]
            for each, answer in [(each, kazoo.get_async(f"{ROOT}/{each}")) for each in missing]:
                try:
                    data, stat = answer.get(timeout=TIMEOUT)
                except (NoNodeError, NoAuthError):
                    continue
                kept[each] = (
                    stat.ctime / 1000,
                    _only(each, data, self._kind) if self._kind else data,
                )
            with self._lock:
                self._segments = kept
            if len(kept) == len(names):
                break
        for each, (written, data) in sorted(kept.items()):
            if written >= since:
                yield from _events(each, data, wanted)


def _unpacked(name: str, data: bytes) -> bytes:
    """Return the data, or nothing if they are damaged."""
    try:
        return zlib.decompressobj().decompress(data, LARGEST)
    except zlib.error as error:
        log.warning("Ignoring %s/%s: %s", ROOT, name, error)
        return b""


def _only(name: str, data: bytes, wanted: bytes) -> bytes:
    """Return the data of those lines that contain a text."""
    lines = [line for line in _unpacked(name, data).split(b"\n") if wanted in line]
    return zlib.compress(b"\n".join(lines)) if lines else b""


def place_of(event: Event) -> tuple[object, object]:
    """Return the id of an event's node and its provider, which has reported the event."""
    return event.get("node"), event.get("provider")


def kills_of(
    reader: HistoryReader,
    kazoo: KazooClient,
    nodes: Collection[tuple[object, object]],
    recent: Iterable[Event] = (),
    since: float = 0.0,
) -> list[Event]:
    """Return the kills for memory on these nodes, by time.

    :param reader: of the type ``KILLED``.
    :param nodes: ids, each with its provider: node managers report what they like.
    :param recent: events of this process, of which some are not written yet.
    :param since: UNIX seconds; earlier writes are omitted.
    :raises KazooException: no connection, or no answer in time.
    """
    return unique(
        event
        for event in itertools.chain(reader.read_all(kazoo, since), recent)
        if event["type"] == KILLED and place_of(event) in nodes and 0 <= event["time"] < LATEST
    )


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
        if (
            isinstance(event, dict)
            and isinstance(event.get("type"), str)
            and isinstance(event.get("time"), (int, float))
            and 0 <= event["time"] < LATEST
        ):
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
    """Return whether an event may have this value.

    Plural fields contain a list of texts, others no list or object. No number is infinite or NaN,
    or too large for a calculation.
    """
    if isinstance(value, (int, float)) and not abs(value) < MOST_NUMBER:
        return False
    if not isinstance(value, (list, dict)):
        return field not in ("labels", "nodes")
    return (
        field in ("labels", "nodes")
        and isinstance(value, list)
        and all(isinstance(each, str) for each in value)
    )


def _has(event: Event, key: str, name: str) -> bool:
    value = event.get(key)
    return name in value if isinstance(value, list) else value == name

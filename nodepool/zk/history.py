"""What happened, kept for a day beside the tree of release 11.0.0: ``nodepool explain`` and the pages show it.

``/nodepool/history/<sequence>``: compressed lines of JSON, an event (:mod:`nodepool.zk.mirror.feed`) each, in the order of time.
The launcher that is elected for statistics writes what the mirror shows, each launcher what only it knows: many events
in one write, half a minute late at most, and never on the way of a request. What was not written when a launcher is killed
is lost: nothing depends on it.
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
from kazoo.exceptions import NoNodeError

from nodepool.zk.mirror.feed import Event, Feed

ROOT = "/nodepool/history"
TIMEOUT = 30.0
"""Seconds for one answer of the server."""
FLUSH_AFTER, FLUSH_AT = 30.0, 1000
"""Seconds that an event waits, and how many events do: then they are written together."""
MOST_WAITING = 20000
"""Events that wait for ZooKeeper; older ones are left out."""
MOST_SEGMENTS, LONGEST = 200, 24 * 3600.0
"""What is kept: writes, and seconds."""
LARGEST = 16 << 20
"""Bytes that one write unpacks to, at most."""
CLEANUP_INTERVAL = 300.0

log = logging.getLogger("nodepool.zk.history")


class HistoryWriter:
    """Collects events of a feed and writes them now and then."""

    def __init__(self, feed: Feed, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._waiting: list[Event] = []
        self._oldest = 0.0
        self._clean_at = 0.0
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
        """Write what is due, and remove what is old.

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
        if events:
            lines = "\n".join(json.dumps(stored(event)) for event in events)
            data = zlib.compress(lines.encode())
            kazoo.create_async(f"{ROOT}/", data, sequence=True, makepath=True).get(timeout=TIMEOUT)
        if elected and now >= self._clean_at:
            self._clean_at = now + CLEANUP_INTERVAL
            remove_old(kazoo)


def stored(event: Event) -> Event:
    return {name: value for name, value in event.items() if name not in ("number", "noted")}


def remove_old(kazoo: KazooClient, clock: Callable[[], float] = time.time) -> None:
    """:raises KazooException: no connection, or no answer in time."""
    names = _names(kazoo)
    old = names[:-MOST_SEGMENTS]
    for name in names[-MOST_SEGMENTS:]:
        try:
            stat = kazoo.exists_async(f"{ROOT}/{name}").get(timeout=TIMEOUT)
        except NoNodeError:
            continue
        if stat is not None and clock() - stat.ctime / 1000 <= LONGEST:
            break  # those after it are younger
        old.append(name)
    for name in old:
        try:
            kazoo.delete_async(f"{ROOT}/{name}").get(timeout=TIMEOUT)
        except NoNodeError:
            continue


def _names(kazoo: KazooClient) -> list[str]:
    try:
        return sorted(kazoo.get_children_async(ROOT).get(timeout=TIMEOUT))
    except NoNodeError:
        return []


class HistoryReader:
    """Reads events of one object; what was read is kept, as it never changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[str, bytes] = {}

    def read(self, kazoo: KazooClient, key: str, name: str) -> list[Event]:
        """Events whose field ``key`` is (or has) ``name``, by time.

        :raises KazooException: no connection, or no answer in time.
        """
        wanted = name.encode()
        found = [event for event in self._all(kazoo, wanted) if _has(event, key, name)]
        return sorted(found, key=lambda event: event["time"])

    def read_all(self, kazoo: KazooClient) -> list[Event]:
        """All that are kept, by time.

        :raises KazooException: no connection, or no answer in time.
        """
        return sorted(self._all(kazoo, b""), key=lambda event: event["time"])

    def _all(self, kazoo: KazooClient, wanted: bytes) -> Iterator[Event]:
        """Those whose text has ``wanted``."""
        names = _names(kazoo)
        with self._lock:
            kept = {each: self._segments[each] for each in names if each in self._segments}
        missing = [each for each in names if each not in kept]
        for each, answer in [(each, kazoo.get_async(f"{ROOT}/{each}")) for each in missing]:
            try:
                kept[each] = answer.get(timeout=TIMEOUT)[0]
            except NoNodeError:
                continue
        with self._lock:
            self._segments = kept
        for each in names:
            yield from _events(each, kept.get(each, b""), wanted)


def _events(name: str, data: bytes, wanted: bytes) -> Iterable[Event]:
    try:
        text = zlib.decompressobj().decompress(data, LARGEST)
    except zlib.error as error:
        log.warning("Ignoring %s/%s: %s", ROOT, name, error)
        return
    if wanted not in text:
        return
    for line in text.split(b"\n"):
        if wanted not in line:
            continue
        try:
            event = json.loads(line)
            usable = isinstance(event["type"], str) and isinstance(event["time"], (int, float))
        except (ValueError, KeyError, TypeError):
            usable = False
        if usable:
            yield event


def _has(event: Event, key: str, name: str) -> bool:
    value: Any = event.get(key)
    return name in value if isinstance(value, list) else value == name

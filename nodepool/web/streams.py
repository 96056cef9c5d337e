"""``/api/v1/events``: server-sent events to many clients without a thread for each.

An ordinary request occupies one of the few server threads until it is answered. The connection of a stream is handed
over after its head was sent; one thread writes new events to all streams.
"""

from __future__ import annotations

import functools
import http
import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from waitress.channel import ClientDisconnected, HTTPChannel
from waitress.task import WSGITask

from nodepool.web import access
from nodepool.web.http import HttpError, Request
from nodepool.web.v1 import EVENTS
from nodepool.zk.mirror.feed import REPORTED, TYPES, Event, Feed, matches

MOST_STREAMS = 300
HEARTBEAT = 15.0
"""Seconds after which something is sent in any case: this detects closed connections and keeps others open."""
DIGEST, DIGEST_EACH = 0.4, 0.02
"""Seconds between two messages to pages, at least and per client: each client then fetches its page again."""
COST = 10
"""Factor of the seconds that the last answers took: pages cost at most a tenth of a core."""
BEAT = ": \n\n"
SLOW = 1 << 18
"""Bytes that may wait for a client; slower clients are disconnected, and reconnect."""
MOST_WAITING, TOGETHER = 20000, 500
"""Maximum number of events that wait to be sent, and that are sent together."""
_HEAD = (
    "HTTP/1.1 200 OK",
    "Content-Type: text/event-stream; charset=UTF-8",
    "Cache-Control: no-store",
    "Connection: close",
    "X-Accel-Buffering: no",
)
_NOT_FILTERS = frozenset({"digest", "since"})

log = logging.getLogger("nodepool.WebApp")


class Stream:
    """One client.

    :param digest: it gets the number of events of each type, and not the events.
    """

    def __init__(self, channel: HTTPChannel, digest: bool, filters: Mapping[str, list[str]]) -> None:
        self.channel = channel
        self.address = str(channel.addr[0])
        self.digest = digest
        self.filters = dict(filters)

    def send(self, text: str) -> bool:
        """Send a text; return False if the client has disconnected or is too slow."""
        channel = self.channel
        if not channel.connected or channel.total_outbufs_len > SLOW:
            self.close()
            return False
        try:
            channel.write_soon(text.encode())
        except (ClientDisconnected, OSError):
            return False
        return True

    def close(self) -> None:
        self.channel.will_close = True
        self.channel.server.pull_trigger()

    def wants(self, event: Event) -> bool:
        return matches(event, self.filters)


class Streams:
    """All streams of one server, and the thread that feeds them."""

    def __init__(
        self,
        feed: Feed | None,
        check: Callable[[Mapping[str, Any]], None],
        renew: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the streams.

        :param check: raises HttpError if a client may not follow events.
        :param renew: called before pages are notified to fetch again: no answer may be from before the change;
            returns the seconds that answers took since the last call.
        """
        self._feed = feed
        self._renew = renew
        self._spent = 0.0
        self._check = check
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._arrived: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        #: Events that arrived faster than they could be sent.
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="Thread-WebApp-events", daemon=True)

    def start(self) -> None:
        if self._feed is not None:
            self._feed.subscribe(self._heard, reports=True)
            self._thread.start()

    def stop(self, timeout: float) -> None:
        if self._feed is not None:
            self._feed.unsubscribe(self._heard)
        self._arrived.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def __len__(self) -> int:
        return len(self._streams)

    # -- a new stream, on a thread of the server

    def check(self, environ: Mapping[str, Any]) -> tuple[bool, dict[str, list[str]], int | None]:
        """Return whether a digest is requested, the filters, and the client's last event.

        :raises HttpError: the request is invalid.
        """
        self._check(environ)
        if self._feed is None:
            raise HttpError(http.HTTPStatus.NOT_FOUND, "Not found; only launchers provide events")
        request = Request.fromEnviron(environ)
        filters = {
            key: [one for value in values for one in value.split(",")]
            for key, values in request.lists.items()
            if key not in _NOT_FILTERS
        }
        if unknown := set(filters.get("type", ())) - TYPES.keys():
            raise HttpError(http.HTTPStatus.BAD_REQUEST, f"Unknown type {', '.join(sorted(unknown))[:80]}; see /api/v1")
        last = environ.get("HTTP_LAST_EVENT_ID") or request.parameters.get("since")
        if last is not None and not (last.isascii() and last.isdecimal() and len(last) < 16):
            raise HttpError(http.HTTPStatus.BAD_REQUEST, "since and Last-Event-ID must be the number of an event")
        with self._lock:
            full = len(self._streams) >= MOST_STREAMS and self._in_the_way(str(environ.get("REMOTE_ADDR"))) is None
        if full:
            raise HttpError(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_STREAMS} clients already follow events; try again later")
        return "digest" in request.parameters, filters, int(last) if last is not None else None

    def open(self, environ: Mapping[str, Any], channel: HTTPChannel) -> None:
        """Return the head of a stream and the missed events.

        :raises HttpError: the stream is refused; nothing was sent.
        """
        digest, filters, last = self.check(environ)
        assert self._feed is not None
        stream = Stream(channel, digest, filters)
        with self._lock:
            missed, complete = self._feed.since(last) if last is not None and not digest else ([], True)
            head = [*_HEAD, *(f"{key}: {value}" for key, value in access.HEADERS)]
            text = "\r\n".join(head) + "\r\n\r\nretry: 3000\n\n"
            if not complete:
                text += ": some events before these are not kept any more\n\n"
            text += "".join(_message(event) for event in missed if stream.wants(event))
            victim = self._in_the_way(stream.address) if len(self._streams) >= MOST_STREAMS else None
            if victim is not None:
                self._streams.remove(victim)
                victim.close()
            # Changes from now on are sent to it: an older answer must not be shared with it.
            self._streams.append(stream)
            self._renew()
            if not stream.send(text):
                self._streams.remove(stream)

    def _in_the_way(self, address: str) -> Stream | None:
        """Return the oldest stream of the address with the most streams.

        None if no other address has more than this one.
        """
        counts = Counter(stream.address for stream in self._streams)
        most, count = max(counts.items(), key=lambda item: item[1])
        return None if counts[address] >= count else next(stream for stream in self._streams if stream.address == most)

    # -- the thread

    def _heard(self, event: Event) -> None:
        if not self._streams:
            return  # nobody has to be told; a new client fetches everything
        if self._arrived.qsize() < MOST_WAITING:
            self._arrived.put(event)
        else:
            self._left_out += 1

    def _run(self) -> None:
        counted: Counter[str] = Counter()
        told = beat = self._monotonic()
        while True:
            now = self._monotonic()
            due = min(beat + HEARTBEAT, told + pace(len(self._streams), self._spent) if counted else now + HEARTBEAT)
            events = self._next(max(0.01, due - now))
            if events is None:
                return
            if events:
                counted.update(map(_subject, events))
                self._tell(events)
            now = self._monotonic()
            if counted and now >= told + pace(len(self._streams), self._spent):
                text = f"event: changed\ndata: {json.dumps(counted)}\n\n"
                counted, told, beat = Counter(), now, now
                self._spent = self._renew()
                self._send(functools.partial(_digest, text))
            elif now >= beat + HEARTBEAT:
                beat = now
                self._send(lambda stream: BEAT)

    def _next(self, seconds: float) -> list[Event] | None:
        """Return new events after at most this many seconds; None at the end."""
        events: list[Event] = []
        try:
            event = self._arrived.get(timeout=seconds)
            while event is not None:
                events.append(event)
                if len(events) >= TOGETHER:
                    return events
                event = self._arrived.get_nowait()
        except queue.Empty:
            return events
        return None

    def _tell(self, events: list[Event]) -> None:
        """Send events to clients that follow them; most clients are pages, which do not."""
        with self._lock:
            followers = [stream for stream in self._streams if not stream.digest]
        if followers:
            told = [(event, _message(event)) for event in events if event is not REPORTED]
            self._send(lambda stream: "".join(text for event, text in told if stream.wants(event)), followers)

    def _send(self, text_for: Callable[[Stream], str], streams: list[Stream] | None = None) -> None:
        """Send a text to all clients, or to the given ones."""
        if streams is None:
            with self._lock:
                streams = list(self._streams)
        gone = []
        for stream in streams:
            try:
                text = text_for(stream)
                if (text and not stream.send(text)) or not stream.channel.connected:
                    gone.append(stream)
            except Exception:  # it affects this client only
                log.exception("Disconnecting a client that follows events, because of an error:")
                gone.append(stream)
        if gone:
            with self._lock:
                self._streams = [stream for stream in self._streams if stream not in gone]


def pace(clients: int, spent: float) -> float:
    """Return the seconds between two digests.

    :param spent: seconds that the answers took that clients fetched after the last one.
    """
    return max(DIGEST, DIGEST_EACH * clients, COST * spent)


def _digest(text: str, stream: Stream) -> str:
    return text if stream.digest else BEAT


def _subject(event: Event) -> str:
    subject = str(event["type"]).partition("-")[0]
    return "node" if subject == "launch" else subject


def _message(event: Event) -> str:
    return f"id: {event['number']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"


class StreamChannel(HTTPChannel):
    """A connection that may become a stream."""

    streaming = False
    requests: list[Any]

    def service(self) -> None:
        request = self.requests[0]
        if request.error or request.path != EVENTS:
            super().service()
            return
        environ = WSGITask(self, request).get_environment()
        try:
            self.server.streams.open(environ, self)
        except HttpError:
            super().service()  # the application returns the same error
            return
        except Exception:
            log.exception("Cannot start an event stream:")
            self.will_close = True
        self.hand_over()

    def hand_over(self) -> None:
        """End the use of the connection for requests; only a disconnect is noticed from now on."""
        self.streaming = True
        with self.requests_lock:
            for each in self.requests:
                each.close()
            self.requests = []
        self.server.pull_trigger()

    def handle_write(self) -> None:
        # waitress assumes that it owns connections without requests: it would write concurrently with our thread.
        with self.outbuf_lock:
            super().handle_write()
            # It also assumes that nobody waits to write to such a connection.
            self.outbuf_lock.notify_all()

    def received(self, data: bytes) -> bool:
        return False if self.streaming else bool(super().received(data))

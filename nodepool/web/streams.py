"""``/api/v1/events``: server-sent events to many clients."""

from __future__ import annotations

import asyncio
import http
import json
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping

from nodepool.access.identity import Identity
from nodepool.status.results import to_json
from nodepool.web import access
from nodepool.web.http import RETRY, HttpError, Request, Stream, Write
from nodepool.zk.mirror.feed import REPORTED, TYPES, Event, Feed, matches

MOST_STREAMS = 300
HEARTBEAT = 15.0
"""Seconds after which something is sent in any case: this keeps connections open."""
DIGEST, DIGEST_EACH = 0.4, 0.02
"""Seconds between two messages to pages, at least and per client: each client then fetches its
page again.
"""
COST = 10
"""Factor of the seconds that the last answers took: pages cost at most a tenth of a core."""
BEAT = ": \n\n"
SLOW = 1 << 18
"""Characters that may wait for a client; slower clients are disconnected, and reconnect."""
MOST_WAITING, TOGETHER = 20000, 100
"""Maximum number of events that wait to be sent, and that are sent together."""
_HEADERS = (
    ("Content-Type", "text/event-stream; charset=UTF-8"),
    ("X-Accel-Buffering", "no"),
    *access.HEADERS,
)
_NOT_FILTERS = frozenset({"digest", "since"})


class Follower(Stream):
    """One client, and what it asks for.

    :param digest: it gets the number of events of each type, and not the events.
    :param last: the last event that it has seen; None: it does not know one.
    """

    headers = _HEADERS

    def __init__(
        self,
        streams: Streams,
        identity: Identity,
        digest: bool,
        filters: Mapping[str, list[str]],
        last: int | None,
    ) -> None:
        self.identity = identity
        self.digest = digest
        self.filters = filters
        self.last = last
        self._streams = streams
        self._waiting: list[str] = []
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[object] | None = None

    def add(self, text: str) -> None:
        """Send a text; disconnect the client if it is too slow."""
        if sum(map(len, self._waiting)) > SLOW:
            self.close()
        elif text:
            self._waiting.append(text)
            self._arrived.set()

    def close(self) -> None:
        self._streams.remove(self)
        if self._task is not None:
            self._task.cancel()

    def wants(self, event: Event) -> bool:
        return matches(event, self.filters)

    async def send(self, begin: Callable[[], Awaitable[Write]]) -> None:
        self._task, write = asyncio.current_task(), await begin()
        self._streams.add(self)
        try:
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT):
                        await self._arrived.wait()
                except TimeoutError:
                    self.add(BEAT)
                self._arrived.clear()
                text, self._waiting = "".join(self._waiting), []
                await write(text.encode())
        finally:
            self._streams.remove(self)


class Streams:
    """All clients that follow events; used on the loop of the server unless stated otherwise."""

    def __init__(
        self, feed: Feed | None, check: Callable[[Request], Identity], renew: Callable[[], float]
    ) -> None:
        """Create the streams.

        :param check: returns a client; raises an error if it may not follow events.
        :param renew: called before pages are notified to fetch again: no answer may be from before
            the change; returns the seconds that answers took since the last call.
        """
        self._feed = feed
        self._check = check
        self._renew = renew
        self._spent = 0.0
        self._followers: list[Follower] = []
        self._arrived: deque[Event] = deque()
        #: Whether events that have arrived are about to be sent.
        self._woken = False
        #: What pages are notified of next, and when they were notified last.
        self._counted: Counter[str] = Counter()
        self._notified = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._feed is not None:
            self._feed.subscribe(self._note_event, reports=True)

    def stop(self) -> None:
        if self._feed is not None:
            self._feed.unsubscribe(self._note_event)

    def __len__(self) -> int:
        return len(self._followers)

    # -- clients

    def read(self, request: Request) -> Follower:
        """Return what a client asks for; on any thread.

        :raises HttpError: the request is invalid, or too many clients follow events (503).
        """
        identity = self._check(request)
        if self._feed is None:
            raise HttpError(http.HTTPStatus.NOT_FOUND, "Not found; only launchers provide events")
        filters = {
            key: [one for value in values for one in value.split(",")]
            for key, values in request.lists.items()
            if key not in _NOT_FILTERS
        }
        if unknown := set(filters.get("type", ())) - TYPES.keys():
            raise HttpError(
                http.HTTPStatus.BAD_REQUEST,
                f"Unknown type {', '.join(sorted(unknown))[:80]}; see /api/v1",
            )
        last = request.headers.get("last-event-id") or request.parameters.get("since")
        if last is not None and not (last.isascii() and last.isdecimal() and len(last) < 16):
            raise HttpError(
                http.HTTPStatus.BAD_REQUEST,
                "since and Last-Event-ID must be the number of an event",
            )
        if len(self) >= MOST_STREAMS and self._in_the_way(identity.owner) is None:
            text = f"{MOST_STREAMS} clients already follow events; try again later"
            raise HttpError(http.HTTPStatus.SERVICE_UNAVAILABLE, text, "busy", (RETRY,))
        digest = "digest" in request.parameters
        seen = None if last is None or digest else int(last)
        return Follower(self, identity, digest, filters, seen)

    def add(self, follower: Follower) -> None:
        """Send the missed events, and from now on the new ones."""
        assert self._feed is not None
        missed, complete = (
            self._feed.since(follower.last) if follower.last is not None else ([], True)
        )
        parts = (
            ["retry: 3000\n\n"]
            if complete
            else ["retry: 3000\n\n: some events before these are not kept any more\n\n"]
        )
        follower.add(
            "".join([*parts, *(_message(event) for event in missed if follower.wants(event))])
        )
        victim = self._in_the_way(follower.identity.owner) if len(self) >= MOST_STREAMS else None
        if victim is not None:
            victim.close()
        # Changes from now on are sent to it: an older answer must not be shared with it.
        self._followers.append(follower)
        self._renew()

    def remove(self, follower: Follower) -> None:
        if follower in self._followers:
            self._followers.remove(follower)

    def _in_the_way(self, owner: str) -> Follower | None:
        """Return the oldest stream of the owner with the most streams.

        None if no other one has more than this one.
        """
        counts = Counter(follower.identity.owner for follower in list(self._followers))
        most, count = max(counts.items(), key=lambda item: item[1])
        return (
            None
            if counts[owner] >= count
            else next(each for each in self._followers if each.identity.owner == most)
        )

    # -- events

    def _note_event(self, event: Event) -> None:
        """Note an event; on the thread that brings it."""
        if not self._followers or len(self._arrived) >= MOST_WAITING:
            # nobody has to be notified, and a new client fetches everything; or nobody can be
            return
        self._arrived.append(event)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        """Send some events to clients that follow them; notify pages later."""
        self._woken = False
        events = [self._arrived.popleft() for _ in range(min(TOGETHER, len(self._arrived)))]
        self._counted.update(map(_subject, events))
        messages = [(event, _message(event)) for event in events if event is not REPORTED]
        for follower in [each for each in self._followers if not each.digest]:
            follower.add("".join(text for event, text in messages if follower.wants(event)))
        if self._counted and self._timer is None:
            self._timer = self._loop.call_at(
                self._notified + pace(len(self), self._spent), self._notify
            )
        if self._arrived:
            self._loop.call_soon(self._send)

    def _notify(self) -> None:
        """Let pages fetch their data again."""
        text = f"event: changed\ndata: {json.dumps(self._counted)}\n\n"
        self._timer, self._counted, self._notified = None, Counter(), self._loop.time()
        self._spent = self._renew()
        for follower in [each for each in self._followers if each.digest]:
            follower.add(text)


def pace(clients: int, spent: float) -> float:
    """Return the seconds between two digests.

    :param spent: seconds that the answers took that clients fetched after the last one.
    """
    return max(DIGEST, DIGEST_EACH * clients, COST * spent)


def _subject(event: Event) -> str:
    subject = str(event["type"]).partition("-")[0]
    return "node" if subject == "launch" else subject


def _message(event: Event) -> str:
    return f"id: {event['number']}\nevent: {event['type']}\ndata: {to_json(event)}\n\n"

"""The queue of requests: classes, claims, rests, reasons, and events (LAU-2 to LAU-4).

Requests that agree in labels, provider preference, tenant and declining pools form a class, kept
in serving order. Only the head of a class is considered; if it has to wait, the whole class waits,
with the reason, until something changes. Thousands of waiting requests thus cost nothing.

The queue knows no thread, no ZooKeeper and no clock: its owner locks it and passes the time.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nodepool.reasons import Code, Declined, Reason, because

#: After this many candidates a round ends, so that an urgent new request overtakes a flood.
ROUND = 32
#: Further candidates of a round, for the classes that were considered longest ago: each wake-up
#: starts with the most urgent class.
OVERDUE = 8

SortKey = tuple[str, int, str]


class ClassKey(NamedTuple):
    """The properties in which the requests of a class agree."""

    node_types: tuple[str, ...]
    provider: str | None
    tenant: str | None
    declined: frozenset[str]
    reuse: bool = True
    #: Requests of min-ready do not wait in a full pool; they are declined there.
    min_ready: bool = False


#: An open request: its class and its urgency, the smallest first.
Ticket = tuple[ClassKey, SortKey]


@dataclass(eq=False)
class RequestClass:
    """Requests that are treated alike."""

    key: ClassKey
    queue: list[tuple[SortKey, str]] = field(default_factory=list)
    #: Why its head has to wait; empty if it was not considered since the last change.
    reasons: tuple[Reason, ...] = ()
    #: Launcher ids of paused pools that found no reason to decline, with the moment of the check.
    checked: dict[str, int] = field(default_factory=dict)
    #: Launcher ids of pools that cannot serve it now, with the reason; until something changes.
    refused: dict[str, Reason] = field(default_factory=dict)
    #: The same for lack of capacity: pools of worse priority may serve it.
    full: dict[str, Reason] = field(default_factory=dict)
    #: When its head is considered again without an event (monotonic seconds).
    again_at: float = math.inf
    #: The error that was logged last.
    logged: str | None = None
    #: Number of the decision in which its head was last considered.
    decided: int = 0

    def __post_init__(self) -> None:
        self.labels = frozenset(self.key.node_types)

    @property
    def is_due(self) -> bool:
        """Return whether its head is to be considered."""
        return bool(self.queue) and not self.reasons

    def recheck_now(self, what: Reason | None = None) -> None:
        """Recheck the class, because what it waits for (that reason, if given) has changed."""
        self.reasons = ()
        self.again_at = math.inf
        for book in (self.refused, self.full):
            for launcher_id in [i for i, why in book.items() if what is None or why.includes(what)]:
                del book[launcher_id]


class Changes:
    """Counts events, to find out whether an awaited one may have happened since a moment."""

    def __init__(self) -> None:
        #: The present moment: the number of events so far.
        self.moment = 0
        #: The last moment at which reasons to decline may have changed.
        self.declines = 0
        #: When everything changed last (None), and since then, when each reason ended last.
        self.ends: dict[Reason | None, int] = {}

    def note(self, what: Reason | None) -> None:
        """Count the end of a reason, or a change of everything."""
        self.moment += 1
        if what is None:
            self.ends.clear()
        self.ends[what] = self.moment

    def since(self, moment: int, *reasons: Reason) -> bool:
        """Return whether one of the reasons may have ended after that moment."""
        ended = [what for what, at in self.ends.items() if at > moment]
        return any(what is None or any(each.includes(what) for each in reasons) for what in ended)


class Claim(NamedTuple):
    """A request that does not wait: a pool has it, it is being declined, or it rests."""

    #: Launcher id of the pool that has it; None: it rests, or is being declined.
    holder: str | None
    #: The moment on which the decision was based.
    moment: int


class Candidate(NamedTuple):
    """A request that is to be considered: the head of its class."""

    head: tuple[SortKey, str]
    cls: RequestClass
    moment: int
    #: Until when it is left to other launchers (monotonic seconds); None: never.
    left_until: float | None
    #: Labels of more urgent classes that are not decided yet; pools for them are excluded.
    before: Collection[frozenset[str]] = ()


class RequestQueue:
    """All open requests of a launcher; each waits in its class, or is claimed."""

    def __init__(self) -> None:
        self.changes = Changes()
        self.claims: dict[str, Claim] = {}
        #: Number of candidates so far.
        self.decisions = 0
        self._classes: dict[ClassKey, RequestClass] = {}
        self._waiting: dict[str, tuple[RequestClass, SortKey]] = {}
        #: When the rest of claimed requests ends (monotonic seconds).
        self._rests: dict[str, float] = {}
        #: Requests that were left to other launchers: how often, and until when.
        self._left: dict[str, tuple[int, float]] = {}
        self._recheck_all = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    # -- requests

    def put(self, request_id: str, ticket: Ticket | None) -> None:
        """Store a new or changed request in its class, unless it is claimed.

        :param ticket: None if it is not open.
        """
        if ticket is None or request_id in self.claims:
            self._remove(request_id)
            return
        key, urgency = ticket
        cls = self._classes.get(key) or self._classes.setdefault(key, RequestClass(key))
        if self._waiting.get(request_id) == (cls, urgency):
            return
        self._remove(request_id)
        bisect.insort(cls.queue, (urgency, request_id))
        if cls.queue[0][1] == request_id:
            # The former head may wait where a more urgent one need not.
            cls.recheck_now(because(Code.POOL_PAUSED))
        self._waiting[request_id] = (cls, urgency)

    def _remove(self, request_id: str) -> None:
        if entry := self._waiting.pop(request_id, None):
            cls, urgency = entry
            del cls.queue[bisect.bisect_left(cls.queue, (urgency, request_id))]

    def strays(self, alive: Collection[str], open_ids: set[str]) -> set[str]:
        """Return the requests that wait although they are not open, and open ones in no list.

        Forget those that are not alive.
        """
        self._left = {i: left for i, left in self._left.items() if i in alive}
        return (open_ids - self.claims.keys()) ^ self._waiting.keys()

    # -- claims

    def claim(self, request_id: str, claim: Claim) -> None:
        """Remove the request from its class."""
        self.claims[request_id] = claim
        self._remove(request_id)

    def rest(self, request_id: str, until: float) -> None:
        """End a claim; the request rests until that time."""
        self.claim(request_id, Claim(None, self.changes.moment))
        self._rests[request_id] = until

    def release(
        self,
        request_id: str,
        ticket: Ticket | None,
        wait_for: Reason | None = None,
        checked_by: str | None = None,
        refused_by: str | None = None,
        full: bool = False,
    ) -> RequestClass | None:
        """End a claim; return the class if the request waits in it again.

        :param checked_by: launcher id of a paused pool that found no reason to decline it.
        :param wait_for: why the class has to wait; only for the pool ``refused_by``, if given.
        :param full: the pool has no capacity.
        """
        self._rests.pop(request_id, None)
        claim = self.claims.pop(request_id, None) or Claim(None, self.changes.moment)
        self.put(request_id, ticket)
        if (entry := self._waiting.get(request_id)) is None:
            return None
        cls = entry[0]
        if checked_by is not None:
            cls.checked[checked_by] = claim.moment  # another pool may still serve it
        elif wait_for is not None and not self.changes.since(claim.moment, wait_for):
            # Otherwise an event since it was claimed may have removed the reason to wait.
            if refused_by is not None:
                (cls.full if full else cls.refused)[refused_by] = wait_for
            else:
                cls.reasons = (wait_for,)
        return cls

    # -- other launchers

    def yield_to_others(self, request_id: str, until: float) -> None:
        """Let other launchers accept the request until that time."""
        self._left[request_id] = self.times_left(request_id) + 1, until
        if entry := self._waiting.get(request_id):
            entry[0].again_at = min(entry[0].again_at, until)

    def times_left(self, request_id: str) -> int:
        """Return how often the request was left to others."""
        return self._left.get(request_id, (0, 0.0))[0]

    # -- events and time

    def wake(self, declines: bool = False) -> None:
        """Recheck everything with the next :meth:`tick`.

        :param declines: reasons to decline may have changed, too.
        """
        self.changes.note(None)
        if declines:
            self.changes.declines = self.changes.moment
        self._recheck_all = True

    def recheck(self, what: Reason) -> bool:
        """Recheck the classes that wait for this reason; return whether there are any."""
        self.changes.note(what)
        found = [
            cls
            for cls in self._classes.values()
            if cls.queue
            and any(each.includes(what) for each in (*cls.reasons, *cls.refused.values()))
        ]
        for cls in found:
            cls.recheck_now(what)
        return bool(found)

    def tick(self, now: float) -> list[str]:
        """Recheck what events or the time allow; return the requests that have rested.

        The caller puts them again.
        """
        everything, self._recheck_all = self._recheck_all, False
        if everything:
            self._classes = {key: cls for key, cls in self._classes.items() if cls.queue}
        for cls in self._classes.values():
            if everything or cls.again_at <= now:
                cls.recheck_now()
        rested = [request_id for request_id, until in self._rests.items() if until <= now]
        for request_id in rested:
            del self._rests[request_id], self.claims[request_id]
        return rested

    @property
    def due(self) -> float:
        """Return when the next :meth:`tick` is necessary (monotonic seconds)."""
        times = (cls.again_at for cls in self._classes.values() if cls.queue)
        return min([*times, *self._rests.values()], default=math.inf)

    # -- decisions

    @property
    def is_due(self) -> bool:
        """Return whether a class is to be considered."""
        return any(cls.is_due for cls in self._classes.values())

    def round(self) -> Iterator[Candidate]:
        """Yield the requests to consider, the most urgent first, then those of overdue classes.

        Each one has to be claimed or postponed before the next one is asked for; otherwise it is
        considered again.
        """
        due = [cls for cls in self._classes.values() if cls.is_due]
        heads = [(cls.queue[0], id(cls), cls) for cls in due]
        heapq.heapify(heads)
        for _ in range(ROUND):
            if not heads:
                return
            head, _ident, cls = heapq.heappop(heads)
            if cls.is_due and cls.queue[0] == head:
                yield self._candidate(cls)
            if cls.is_due:
                heapq.heappush(heads, (cls.queue[0], id(cls), cls))
        overdue = sorted(sorted(heads), key=lambda entry: entry[2].decided)[:OVERDUE]
        for head, _ident, cls in sorted(overdue):
            if cls.is_due and cls.queue[0] == head:
                before = {c.labels for better, _, c in heads if better < head and c.is_due}
                yield self._candidate(cls, before)

    def _candidate(self, cls: RequestClass, before: Collection[frozenset[str]] = ()) -> Candidate:
        self.decisions += 1
        cls.decided = self.decisions
        until = self._left.get(cls.queue[0][1], (0, None))[1]
        return Candidate(cls.queue[0], cls, self.changes.moment, until, before)

    def postpone(self, candidate: Candidate, reasons: tuple[Reason, ...], again_at: float) -> None:
        """Let its class wait, unless one of the reasons may have ended during the decision.

        :param again_at: when it is considered again without an event (monotonic seconds).
        """
        if not self.changes.since(candidate.moment, *reasons):
            candidate.cls.reasons, candidate.cls.again_at = reasons, again_at

    # -- queries

    def rows(self) -> list[tuple[str, tuple[str, ...], str, tuple[Reason, ...]]]:
        """Return (request, labels, state, reasons) of all requests that wait."""
        unknown = (because(Code.NOT_LOOKED_AT),)
        return [
            (name, cls.key.node_types, "requested", cls.reasons or unknown)
            for cls in self._classes.values()
            for _urgency, name in cls.queue
        ]

    def is_wanted(self, label: str) -> bool:
        """Return whether a request that waits needs such a node."""
        return any(cls.queue and label in cls.labels for cls in self._classes.values())

    def waiting_for(self) -> Counter[Code | Declined]:
        """Return the number of requests per reason; a request counts for each of its reasons."""
        found: Counter[Code | Declined] = Counter()
        for cls in self._classes.values():
            for code in {reason.code for reason in cls.reasons} or {Code.NOT_LOOKED_AT}:
                found[code] += len(cls.queue)
        return found

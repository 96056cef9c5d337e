"""States of a request, allowed events in each, and possible results (LAU-5 to LAU-7)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from nodepool.reasons import Reason


class State(enum.Enum):
    """State of a request handler."""

    #: It is being checked; nothing has been written.
    OFFERED = "offered"
    #: Nodes and request are being written; the answer of ZooKeeper is the next step.
    WRITING = "writing"
    #: More nodes are to be chosen, immediately or when it is its turn.
    FILLING = "filling"
    #: All nodes have records; launches may be running.
    LAUNCHING = "launching"
    #: There is no capacity for the nodes that are still missing.
    WAITING = "waiting"
    #: The request is being written as fulfilled, and all locks are released.
    FULFILLING = "fulfilling"
    #: The request is given up (declined, returned, removed by its owner), with the nodes that have reached an end.
    LEAVING = "leaving"
    #: The request is released; running launches still hold nodes.
    FREEING = "freeing"
    ENDED = "ended"


class Event(enum.Enum):
    """Calls to a handler. Answers of ZooKeeper are not events: they continue a started write."""

    #: Accept the request, or continue to fill its node set.
    RUN = "run"
    #: Check whether the nodes are complete.
    POLL = "poll"
    #: This pool cannot serve it.
    DECLINE = "decline"
    #: The pool is being removed.
    HAND_BACK = "hand back"
    #: Another pool gets the request, or its nodes.
    MOVE = "move"
    #: Locks or session are lost: nothing may be written any more.
    DROP = "drop"


class Admission(enum.Enum):
    """Handling of an event."""

    ACT = "act"
    #: When ZooKeeper has answered.
    LATER = "later"
    IGNORE = "ignore"


ACT, LATER, IGNORE = Admission.ACT, Admission.LATER, Admission.IGNORE
_EVENTS = (Event.RUN, Event.POLL, Event.DECLINE, Event.HAND_BACK, Event.MOVE, Event.DROP)
#: Event by event, as in ``_EVENTS``.
ADMISSION: Mapping[State, Mapping[Event, Admission]] = {
    state: dict(zip(_EVENTS, row, strict=True)) for state, row in {
        #                  RUN     POLL    DECLINE HAND_BACK MOVE  DROP
        State.OFFERED:    (ACT,    IGNORE, ACT,    ACT,    IGNORE, ACT),
        State.WRITING:    (IGNORE, LATER,  LATER,  LATER,  IGNORE, ACT),
        State.FILLING:    (ACT,    IGNORE, ACT,    ACT,    IGNORE, ACT),
        State.LAUNCHING:  (ACT,    ACT,    ACT,    ACT,    IGNORE, ACT),
        State.WAITING:    (ACT,    ACT,    ACT,    ACT,    ACT,    ACT),
        State.FULFILLING: (IGNORE, LATER,  LATER,  IGNORE, IGNORE, ACT),
        State.LEAVING:    (IGNORE, LATER,  IGNORE, IGNORE, IGNORE, ACT),
        State.FREEING:    (IGNORE, ACT,    IGNORE, IGNORE, IGNORE, ACT),
        State.ENDED:      (IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE),
    }.items()}  # fmt: skip
#: Events that waited for an answer are handled in this order; the first one that acts ends the others.
CATCH_UP = (Event.DECLINE, Event.HAND_BACK, Event.POLL)
#: States that wait for an answer of ZooKeeper.
BUSY = frozenset({State.WRITING, State.FULFILLING, State.LEAVING})

_SERVING = frozenset({State.WRITING, State.FILLING, State.LAUNCHING, State.WAITING, State.LEAVING, State.ENDED})
NEXT: Mapping[State, frozenset[State]] = {
    State.OFFERED: frozenset({State.WRITING, State.LEAVING, State.ENDED}),
    State.WRITING: _SERVING,
    State.FILLING: _SERVING,
    State.LAUNCHING: _SERVING | {State.FULFILLING},
    State.WAITING: _SERVING | {State.FULFILLING},
    State.FULFILLING: frozenset({State.LAUNCHING, State.LEAVING, State.ENDED}),
    State.LEAVING: frozenset({State.LEAVING, State.FREEING, State.ENDED}),
    State.FREEING: frozenset({State.LEAVING, State.ENDED}),
    State.ENDED: frozenset(),
}


class How(enum.Enum):
    """Result of serving a request in one pool."""

    FULFILLED = "fulfilled"
    #: Written by us: declined or failed.
    DECLINED = "declined"
    #: Its owner has removed it.
    REMOVED = "removed"
    #: Back to the queue; it had been accepted, or is tried again after a moment.
    RETURNED = "returned"
    #: Never accepted: there is no capacity for it.
    REFUSED = "refused"
    #: Never accepted: something has to change first.
    WITHDRAWN = "withdrawn"
    #: We may not write any more; the next launcher finds it in ZooKeeper.
    DROPPED = "dropped"


@dataclass(frozen=True)
class Outcome:
    """Result for the pool when a handler has ended."""

    how: How
    #: Seconds before the request is tried again.
    retry_after: float = 0.0
    #: Why it has to wait.
    wait_for: Reason | None = None
    #: The pool is paused, and there was nothing to decline.
    checked: bool = False

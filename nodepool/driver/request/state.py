"""The states of a request that is being served, what may happen in each, and how it can end (LAU-5 to LAU-7)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from nodepool.reasons import Reason


class State(enum.Enum):
    """Where the handler of a request stands."""

    #: It is being looked at; nothing has been written.
    OFFERED = "offered"
    #: Nodes and request are being written; the answer of ZooKeeper is the next step.
    WRITING = "writing"
    #: More nodes are to be chosen, at once or when its turn comes.
    FILLING = "filling"
    #: All nodes have records; launches may be under way.
    LAUNCHING = "launching"
    #: There is no room for the nodes that are still missing.
    WAITING = "waiting"
    #: The request is being written as fulfilled, and all locks are given up.
    FULFILLING = "fulfilling"
    #: The request is given up (declined, given back, removed by its owner), with the nodes that have reached an end.
    LEAVING = "leaving"
    #: The request is free; launches that are under way still hold nodes.
    FREEING = "freeing"
    ENDED = "ended"


class Event(enum.Enum):
    """What is asked of a handler; answers of ZooKeeper are no events, they continue what was begun."""

    #: Accept the request, or go on filling its node set.
    RUN = "run"
    #: Look whether the nodes are complete.
    POLL = "poll"
    #: This pool cannot serve it.
    DECLINE = "decline"
    #: The pool goes away.
    HAND_BACK = "hand back"
    #: Another pool is to have the request, or its nodes.
    MOVE = "move"
    #: Locks or session are lost: nothing may be written any more.
    DROP = "drop"


class Admission(enum.Enum):
    """What becomes of an event."""

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
#: In this order events are taken up that had to wait for an answer; the first that acts makes an end of the others.
CATCH_UP = (Event.DECLINE, Event.HAND_BACK, Event.POLL)
#: States in which an answer of ZooKeeper is awaited.
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
    """How the serving of a request by one pool has ended."""

    FULFILLED = "fulfilled"
    #: Written by us: declined or failed.
    DECLINED = "declined"
    #: Its owner has removed it.
    REMOVED = "removed"
    #: Back to the queue; it had been accepted, or is looked at again after a moment.
    RETURNED = "returned"
    #: Never accepted: there is no room for it.
    REFUSED = "refused"
    #: Never accepted: something has to change first.
    WITHDRAWN = "withdrawn"
    #: We may not write any more; the next launcher finds it in ZooKeeper.
    DROPPED = "dropped"


@dataclass(frozen=True)
class Outcome:
    """What the pool is told when a handler has come to its end."""

    how: How
    #: Seconds before the request is looked at again.
    retry_after: float = 0.0
    #: Why it has to wait.
    wait_for: Reason | None = None
    #: The pool is paused, and there was nothing to decline.
    checked: bool = False

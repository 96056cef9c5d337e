"""States of a request, allowed events in each, and possible results (LAU-5 to LAU-7)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nodepool.reasons import Reason


class State(enum.Enum):
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
    #: The request is given up (declined, returned, removed by its owner), with the nodes that have
    #: reached an end.
    LEAVING = "leaving"
    #: The request is released; running launches still hold nodes.
    FREEING = "freeing"
    ENDED = "ended"


class Event(enum.Enum):
    """Calls to a handler. Answers of ZooKeeper are not events: they continue a started write."""

    #: Accept the request, or continue to fill its node set.
    RUN = "run"
    #: Only check whether this pool can ever serve it: the pool is paused.
    CHECK = "check"
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
    ACT = "act"
    #: When ZooKeeper has answered.
    LATER = "later"
    IGNORE = "ignore"


ACT, LATER, IGNORE = Admission.ACT, Admission.LATER, Admission.IGNORE
_EVENTS = (
    Event.RUN,
    Event.CHECK,
    Event.POLL,
    Event.DECLINE,
    Event.HAND_BACK,
    Event.MOVE,
    Event.DROP,
)
#: Event by event, as in ``_EVENTS``.
ADMISSION: Mapping[State, Mapping[Event, Admission]] = {
    state: dict(zip(_EVENTS, row, strict=True))
    for state, row in {
        #                  RUN     CHECK   POLL    DECLINE HAND_BACK MOVE  DROP
        State.OFFERED: (ACT, ACT, IGNORE, ACT, ACT, IGNORE, ACT),
        State.WRITING: (IGNORE, IGNORE, LATER, LATER, LATER, IGNORE, ACT),
        State.FILLING: (ACT, IGNORE, IGNORE, ACT, ACT, IGNORE, ACT),
        State.LAUNCHING: (ACT, IGNORE, ACT, ACT, ACT, IGNORE, ACT),
        State.WAITING: (ACT, IGNORE, ACT, ACT, ACT, ACT, ACT),
        State.FULFILLING: (IGNORE, IGNORE, LATER, LATER, IGNORE, IGNORE, ACT),
        State.LEAVING: (IGNORE, IGNORE, LATER, IGNORE, IGNORE, IGNORE, ACT),
        State.FREEING: (IGNORE, IGNORE, ACT, IGNORE, IGNORE, IGNORE, ACT),
        State.ENDED: (IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE),
    }.items()
}
#: Events that waited for an answer are handled in this order; the first one that acts ends the
#: others.
CATCH_UP = (Event.DECLINE, Event.HAND_BACK, Event.POLL)
#: States that wait for an answer of ZooKeeper.
BUSY = frozenset({State.WRITING, State.FULFILLING, State.LEAVING})

_SERVING = frozenset(
    {State.WRITING, State.FILLING, State.LAUNCHING, State.WAITING, State.LEAVING, State.ENDED}
)
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
    #: There was nothing to decline; without ``wait_for`` it waits because the pool is paused.
    checked: bool = False
    #: Launcher id of the pool that gets it.
    hand_to: str | None = None


class End(Exception):
    """Ends the service of a request.

    It is raised by the life of the request, or by an event at the point where its life waits for
    one.

    :ivar reasons: why it is declined, for users who wait for it.
    :ivar discard: delete the released nodes, because they occupy what others wait for.
    """

    def __init__(
        self, outcome: Outcome, reasons: list[Reason] | None = None, discard: bool = False
    ) -> None:
        super().__init__(outcome.how.value)
        self.outcome = outcome
        self.reasons = reasons or []
        self.discard = discard


class LabelRecorder:
    """Records which node serves which label (DRV-5.7)."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def add(self, label: str, node_id: str | None) -> None:
        self.data.append({"label": label, "node_id": node_id})

    def labels(self) -> list[str]:
        """Return labels in the order added."""
        return [entry["label"] for entry in self.data]

    def pop(self, label: str) -> Any:
        """Remove the first entry of the label and return its node id; None if there is none."""
        for index, entry in enumerate(self.data):
            if entry["label"] == label:
                del self.data[index]
                return entry["node_id"]
        return None

    def removeNode(self, id: str | None) -> None:
        self.data = [entry for entry in self.data if entry["node_id"] != id]

    def missing(self, wanted: list[str]) -> list[str]:
        """Return the wanted labels without a node."""
        missing = list(wanted)
        for label in self.labels():
            if label in missing:
                missing.remove(label)
        return missing

    def ordered(self, wanted: list[str]) -> list[str]:
        """Return the node ids in the order of the wanted labels."""
        rest = LabelRecorder()
        rest.data = list(self.data)
        return [rest.pop(label) for label in wanted]

"""The queue of requests: nothing is lost, nothing is considered twice, and the most urgent is
first.
"""

from __future__ import annotations

import ast
import math
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nodepool.launcher.requests import queue
from nodepool.launcher.requests.queue import (
    OVERDUE,
    ROUND,
    Candidate,
    Claim,
    ClassKey,
    RequestQueue,
    SortKey,
    Ticket,
)
from nodepool.reasons import Code, Reason, because

BUSY = because(Code.BUSY)
PAUSED = because(Code.POOL_PAUSED, request="200-1")
LIMIT = because(Code.TENANT_LIMIT, tenant="t", limit=3, used=3)
#: Why a class has to wait.
REASONS = st.sampled_from([BUSY, PAUSED, LIMIT])
#: Of what the end is reported: the last one is awaited by nobody.
ENDS = st.sampled_from(
    [BUSY, because(Code.TENANT_LIMIT, tenant="t"), because(Code.TENANT_LIMIT, tenant="u")]
)
#: What may happen while a decision is made; None: anything may have changed.
EVENTS = st.lists(st.one_of(st.none(), ENDS), max_size=2)
TICKETS = st.tuples(
    st.builds(
        ClassKey, st.sampled_from([("a",), ("b",)]), st.none(), st.none(), st.just(frozenset[str]())
    ),
    st.tuples(st.sampled_from(["100", "200"]), st.integers(0, 2), st.just("")),
)


class Model:
    """The same without any haste: it sorts all requests and remembers all events."""

    def __init__(self) -> None:
        self.now = 0.0
        #: All open requests; those that a pool has, with the number of events when it got them.
        self.tickets: dict[str, Ticket] = {}
        self.claimed: dict[str, int] = {}
        self.resting: dict[str, float] = {}
        self.events: list[Reason | None] = []
        self.woken = False
        #: By class.
        self.reasons: dict[ClassKey, Reason] = {}
        self.refused: dict[ClassKey, dict[str, Reason]] = {}
        self.again_at: dict[ClassKey, float] = {}
        self.left: dict[str, tuple[int, float]] = {}

    def waiting(self, key: ClassKey | None = None) -> list[str]:
        found = [i for i in self.tickets if i not in self.claimed and i not in self.resting]
        return sorted(
            (i for i in found if key in (None, self.tickets[i][0])),
            key=lambda i: (self.tickets[i][1], i),
        )

    def happened(self, since: int, reason: Reason) -> bool:
        return any(event is None or reason.includes(event) for event in self.events[since:])

    def unblock(self, key: ClassKey, what: Reason | None) -> None:
        self.reasons.pop(key, None)
        self.again_at.pop(key, None)
        refused = self.refused.get(key, {})
        self.refused[key] = (
            {} if what is None else {p: r for p, r in refused.items() if not r.includes(what)}
        )

    def queued(self, request_id: str) -> None:
        """A request is in its class that was not there: it may be its first."""
        key = self.tickets[request_id][0]
        if self.waiting(key)[0] == request_id:
            self.unblock(key, because(Code.POOL_PAUSED))

    def happen(self, event: Reason | None) -> None:
        self.events.append(event)
        if event is None:
            self.woken = True
            return
        for key in {self.tickets[i][0] for i in self.waiting()}:
            awaited = [
                *self.refused.get(key, {}).values(),
                *([self.reasons[key]] if key in self.reasons else []),
            ]
            if any(reason.includes(event) for reason in awaited):
                self.unblock(key, event)

    def tick(self) -> None:
        keys = {key for key, at in self.again_at.items() if at <= self.now}
        if self.woken:
            self.woken = False
            keys |= {*self.reasons, *self.refused, *self.again_at}
        for key in keys:
            self.unblock(key, None)
        for request_id in [i for i, until in self.resting.items() if until <= self.now]:
            del self.resting[request_id]
            if request_id in self.tickets:
                self.queued(request_id)

    def best(self) -> str | None:
        return next((i for i in self.waiting() if self.tickets[i][0] not in self.reasons), None)


class Operations(RuleBasedStateMachine):
    """Random sequences of operations, on the queue and on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.model, self.count = RequestQueue(), Model(), 0

    def pick(self, data: st.DataObject, names: Any) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    def happen(self, events: list[Reason | None]) -> None:
        for event in events:
            self.model.happen(event)
            if event is None:
                self.queue.wake()
            else:
                self.queue.recheck(event)

    @rule(ticket=TICKETS)
    def submit(self, ticket: Ticket) -> None:
        self.count += 1
        name = f"{self.count:04}"
        self.model.tickets[name] = ticket
        self.model.queued(name)
        self.queue.put(name, ticket)

    @precondition(lambda self: self.model.tickets)
    @rule(data=st.data(), ticket=TICKETS)
    def change(self, data: st.DataObject, ticket: Ticket) -> None:
        name = self.pick(data, self.model.tickets)
        before, self.model.tickets[name] = self.model.tickets[name], ticket
        if before != ticket and name in self.model.waiting():
            self.model.queued(name)
        self.queue.put(name, ticket)

    @precondition(lambda self: self.model.tickets)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = self.pick(data, self.model.tickets)
        del self.model.tickets[name]
        self.queue.put(name, None)

    @rule(events=EVENTS)
    def events(self, events: list[Reason | None]) -> None:
        self.happen(events)

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds: int) -> None:
        self.model.now += seconds

    @precondition(lambda self: self.model.tickets)
    @rule(data=st.data(), seconds=st.integers(1, 3))
    def yield_to_others(self, data: st.DataObject, seconds: int) -> None:
        name, until = self.pick(data, self.model.tickets), self.model.now + seconds
        self.model.left[name] = self.model.left.get(name, (0, 0.0))[0] + 1, until
        if name in self.model.waiting():
            key = self.model.tickets[name][0]
            self.model.again_at[key] = min(self.model.again_at.get(key, math.inf), until)
        self.queue.yield_to_others(name, until)
        assert self.queue.times_left(name) == self.model.left[name][0]

    @rule(
        events=EVENTS,
        waits=st.one_of(st.none(), st.just(()), st.tuples(REASONS)),
        seconds=st.one_of(st.just(math.inf), st.integers(0, 3)),
    )
    def decide(
        self, events: list[Reason | None], waits: tuple[Reason, ...] | None, seconds: float
    ) -> None:
        """Consider the next request; it is claimed (None), or has to wait."""
        self.model.tick()
        for name in self.queue.tick(self.model.now):
            self.queue.put(name, self.model.tickets.get(name))
        candidate, best = next(self.queue.round(), None), self.model.best()
        assert self.queue.is_due == (best is not None)
        if candidate is None or best is None:
            assert candidate is best is None
            return
        assert candidate.head[1] == best and candidate.cls.queue[0] == candidate.head
        assert candidate.left_until == self.model.left.get(best, (0, None))[1]
        key, moment = self.model.tickets[best][0], len(self.model.events)
        assert candidate.cls.refused == self.model.refused.get(key, {})
        self.happen(events)
        if waits is None:
            self.model.claimed[best] = moment
            self.queue.claim(best, Claim("pool", candidate.moment))
            return
        self.queue.postpone(candidate, waits, self.model.now + seconds)
        everything = None in self.model.events[moment:]
        if not everything and not any(self.model.happened(moment, reason) for reason in waits):
            self.model.again_at[key] = self.model.now + seconds
            if waits:
                self.model.reasons[key] = waits[0]

    @precondition(lambda self: self.model.claimed)
    @rule(data=st.data(), seconds=st.integers(1, 3))
    def rest(self, data: st.DataObject, seconds: int) -> None:
        name = self.pick(data, self.model.claimed)
        del self.model.claimed[name]
        self.model.resting[name] = self.model.now + seconds
        self.queue.rest(name, self.model.now + seconds)

    @precondition(lambda self: self.model.claimed or self.model.resting)
    @rule(
        data=st.data(),
        reason=st.one_of(st.none(), REASONS),
        refused=st.booleans(),
        before=EVENTS,
        after=EVENTS,
    )
    def release(
        self,
        data: st.DataObject,
        reason: Reason | None,
        refused: bool,
        before: list[Reason | None],
        after: list[Reason | None],
    ) -> None:
        """End a claim; events happen just before and just after it."""
        name = self.pick(data, [*self.model.claimed, *self.model.resting])
        self.happen(before)
        if self.model.resting.pop(name, None) is not None:
            reason = None
        since = self.model.claimed.pop(name, 0)
        ticket = self.model.tickets.get(name)
        self.queue.release(name, ticket, reason, refused_by="pool" if refused else None)
        if ticket is None:
            return
        self.model.queued(name)
        if reason is not None and not self.model.happened(since, reason):
            if refused:
                self.model.refused.setdefault(ticket[0], {})["pool"] = reason
            else:
                self.model.reasons[ticket[0]] = reason
        self.happen(after)

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        rows = self.queue.rows()
        assert sorted(name for name, *_ in rows) == sorted(self.model.waiting())
        for name, labels, _state, reasons in rows:
            of_class = self.model.tickets[name][0]
            expected = self.model.reasons.get(of_class, because(Code.NOT_LOOKED_AT))
            assert (labels, reasons) == (of_class.node_types, (expected,))
        assert len(self.queue) == len(rows) == sum(self.queue.waiting_for().values())
        assert self.queue.claims.keys() == self.model.claimed.keys() | self.model.resting.keys()
        assert not self.queue.strays(set(self.model.left), set(self.model.tickets))


Operations.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestOperations = Operations.TestCase


def filled(tickets: list[Ticket]) -> RequestQueue:
    made = RequestQueue()
    for number, ticket in enumerate(tickets):
        made.put(f"{number:04}", ticket)
    return made


def key(tenant: str = "t", label: str = "a") -> ClassKey:
    return ClassKey((label,), None, tenant, frozenset())


def urgency(number: int) -> SortKey:
    return "100", number, ""


@given(st.lists(TICKETS, max_size=2 * ROUND), st.integers(0, ROUND))
def test_round_of_claimed_requests_is_in_serving_order(tickets: list[Ticket], waits: int) -> None:
    waiting = filled(tickets)
    order = sorted(range(len(tickets)), key=lambda number: (tickets[number][1], number))
    blocked: set[ClassKey] = set()
    found, expected = [], []
    for candidate in waiting.round():
        found.append(candidate.head[1])
        if len(found) == waits:
            waiting.postpone(candidate, (BUSY,), math.inf)
        else:
            waiting.claim(candidate.head[1], Claim("pool", candidate.moment))
    for number in order:
        if tickets[number][0] not in blocked and len(expected) < ROUND:
            expected.append(f"{number:04}")
            if len(expected) == waits:
                blocked.add(tickets[number][0])
    assert found[:ROUND] == expected
    assert len(found) == len(set(found)) <= ROUND + OVERDUE


def test_round_ends_with_the_classes_considered_longest_ago_and_names_those_before_them() -> None:
    number = ROUND + 2 * OVERDUE
    waiting = filled([(key(f"t{n}", f"l{n}"), urgency(n)) for n in range(number)])
    rounds: list[list[Candidate]] = []
    for _ in range(2):
        rounds.append([])
        for candidate in waiting.round():
            rounds[-1].append(candidate)
            waiting.postpone(candidate, (BUSY,), math.inf)
        waiting.wake()
        waiting.tick(0.0)
    first, second = [[int(each.head[1]) for each in one] for one in rounds]
    assert first == list(range(ROUND + OVERDUE))
    assert second == [*range(ROUND), *range(ROUND + OVERDUE, number)]
    last = rounds[1][-1]
    assert last.before == {frozenset({f"l{n}"}) for n in range(ROUND, ROUND + OVERDUE)}
    assert rounds[1][0].before == ()


def test_more_urgent_request_that_arrives_during_a_round_is_considered_in_it() -> None:
    waiting = filled([(key(), urgency(5)), (key("u"), urgency(6))])
    candidates = waiting.round()
    waiting.claim("0000", Claim("pool", next(candidates).moment))
    waiting.put("urgent", (key("u"), urgency(1)))
    assert [candidate.head[1] for candidate in [next(candidates)]] == ["urgent"]


def test_request_that_another_pool_has_meanwhile_does_not_end_its_rest() -> None:
    waiting = filled([(key(), urgency(1))])
    waiting.rest("0000", 5.0)
    waiting.release("0000", (key(), urgency(1)))
    waiting.claim("0000", Claim("pool", 0))
    assert waiting.tick(6.0) == [] and waiting.claims["0000"].holder == "pool"


@pytest.mark.parametrize("declines", [False, True])
def test_check_of_a_paused_pool_counts_until_reasons_to_decline_may_have_changed(
    declines: bool,
) -> None:
    """Also when that happens between the check and its result."""
    waiting = filled([(key(), urgency(1))])
    waiting.claim("0000", Claim("pool", waiting.changes.moment))
    waiting.wake(declines)
    cls = waiting.release("0000", (key(), urgency(1)), checked_by="pool")
    assert cls is not None
    assert (cls.checked["pool"] < waiting.changes.declines) == declines


def test_pool_without_capacity_is_remembered_until_that_reason_ends() -> None:
    waiting = filled([(key(), urgency(1))])
    waiting.claim("0000", Claim("pool", 0))
    cls = waiting.release("0000", (key(), urgency(1)), BUSY, refused_by="pool", full=True)
    assert cls is not None and cls.full == {"pool": BUSY} and cls.is_due
    waiting.recheck(LIMIT)
    assert cls.full == {"pool": BUSY}
    cls.recheck_now(BUSY)
    assert cls.full == {}


def test_waiting_class_is_rechecked_when_the_reason_ends_for_which_a_pool_refused_it() -> None:
    waiting = filled([(key(), urgency(1))])
    cls = waiting.release("0000", (key(), urgency(1)), LIMIT, refused_by="pool")
    assert cls is not None and cls.refused == {"pool": LIMIT}
    waiting.postpone(next(waiting.round()), (BUSY,), math.inf)
    assert not waiting.recheck(because(Code.TENANT_LIMIT, tenant="u")) and not cls.is_due
    assert waiting.recheck(because(Code.TENANT_LIMIT, tenant="t")) and cls.is_due
    assert cls.refused == {}


def test_times_that_a_request_was_left_to_others_are_forgotten_with_it() -> None:
    waiting = filled([(key(), urgency(1))])
    waiting.yield_to_others("0000", 5.0)
    waiting.strays({"0000"}, {"0000"})
    assert waiting.times_left("0000") == 1 and waiting.due == 5.0
    assert waiting.strays(set(), set()) == {"0000"} and waiting.times_left("0000") == 0


def test_ends_of_reasons_are_forgotten_when_everything_has_changed() -> None:
    changes = queue.Changes()
    for number in range(100):
        changes.note(because(Code.TENANT_LIMIT, tenant=f"t{number}"))
    assert changes.since(99, because(Code.TENANT_LIMIT, tenant="t99"))
    assert not changes.since(99, because(Code.TENANT_LIMIT, tenant="t98"))
    changes.note(None)
    assert len(changes.ends) == 1 and changes.since(100) and not changes.since(101)


def test_queue_knows_no_thread_no_zookeeper_and_no_clock() -> None:
    imported = set()
    for node in ast.walk(ast.parse(pathlib.Path(queue.__file__).read_text())):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert imported == {
        "__future__",
        "bisect",
        "collections",
        "collections.abc",
        "dataclasses",
        "heapq",
        "math",
        "nodepool.reasons",
        "typing",
    }

"""Which request next, and for which pool: the pure decision and the queue of classes (LAU-2 to
LAU-4).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodepool.launcher.requests import choice
from nodepool.launcher.requests.assignment import (
    OTHERS_TURN,
    REGISTRATION_GRACE,
    RESYNC,
    Assignment,
)
from nodepool.launcher.requests.choice import PoolView
from nodepool.launcher.requests.queue import OVERDUE, ClassKey, RequestClass
from nodepool.metrics import Metrics
from nodepool.reasons import Code, Reason, because, render
from nodepool.zk.components import RegisteredPool
from nodepool.zk.records import PENDING, REQUESTED, NodeRequest
from tests.support.clock import HandClock
from tests.support.launcher import reason_for

DECLINE = "nodepool.launcher.requests.assignment.decline_for_all"


@dataclass
class Worker:
    """Our own pool as the decision sees it."""

    label: str
    load: int = 0
    paused: bool = False
    refusal: Reason | None = None

    closure: Reason | None = None
    paused_handlers: tuple[Any, ...] = ()
    fullness: Reason | None = None

    def admission(self, _cls: RequestClass) -> Reason | None:
        return self.refusal

    def view(self, cls: RequestClass) -> PoolView:
        return PoolView(
            self.label, self.load, self.paused, self.closure, self.fullness, self.admission(cls)
        )

    def has(self, _request_id: str) -> bool:
        return True


def pool(
    pool_id: str,
    labels: str = "a",
    priority: int = 100,
    paused: bool = False,
    provider: str | None = None,
) -> RegisteredPool:
    return RegisteredPool(
        {
            "id": pool_id,
            "name": "main",
            "provider_name": provider or f"p-{pool_id}",
            "supported_labels": labels.split(),
            "priority": priority,
            "paused": paused,
        }
    )


FULL, BUSY = because(Code.NO_ROOM, labels="a"), because(Code.BUSY)


def choose(
    cls: RequestClass,
    pools: list[RegisteredPool],
    workers: dict[str, Worker],
    version: int,
    insist: bool = False,
) -> Any:
    """The decision, with the worker and the words of the reasons."""
    decision = choice.choose(
        cls, pools, {name: worker.view(cls) for name, worker in workers.items()}, version, insist
    )
    return SimpleNamespace(
        worker=workers.get(decision.pool or ""), reason=render(decision.reasons), **vars(decision)
    )


def requests(labels: str = "a", provider: str | None = None, declined: str = "") -> RequestClass:
    return RequestClass(
        ClassKey(tuple(labels.split()), provider, None, frozenset(declined.split()))
    )


@pytest.mark.spec("LAU-2.3: an eligible pool takes it; the less busy one of equals")
def test_less_busy_eligible_pool_is_chosen() -> None:
    worker = Worker("one")
    assert choose(requests(), [pool("one")], {"one": worker}, 0).worker is worker
    busy, idle = Worker("one", load=5), Worker("two", load=1)
    assert (
        choose(requests(), [pool("one"), pool("two")], {"one": busy, "two": idle}, 0).worker is idle
    )


@pytest.mark.spec("LAU-2.4: the wished provider, unless it cannot")
def test_preferred_provider_is_chosen_if_it_can_serve() -> None:
    one, two = Worker("one"), Worker("two")
    workers, pools = {"one": one, "two": two}, [pool("one"), pool("two")]
    assert choose(requests(provider="p-two"), pools, workers, 0).worker is two
    assert (
        choose(requests(provider="p-two"), pools, {"one": one}, 0).reason
        == "another launcher can serve it"
    )
    assert choose(requests(provider="p-two", declined="two"), pools, workers, 0).worker is one
    assert choose(requests(provider="unknown"), pools, workers, 0).worker is not None


@pytest.mark.spec("LAU-2.5, LAU-4: yield to a better pool that is not paused")
def test_open_pool_of_better_priority_is_chosen() -> None:
    low, high = Worker("low"), Worker("high")
    pools = [pool("low", priority=50), pool("high", priority=10)]
    workers = {"low": low, "high": high}
    assert choose(requests(), pools, workers, 0).worker is high
    assert choose(requests(), pools, {"low": low}, 0).worker is None
    assert (
        choose(
            requests(),
            [pool("low", priority=50), pool("high", priority=10, paused=True)],
            {"low": low},
            0,
        ).worker
        is low
    )
    high.refusal = because(Code.MAX_CONCURRENCY, active=1)
    assert choose(requests(), pools, workers, 0).worker is None  # it merely defers


@pytest.mark.spec(
    "LAU-2.9, LAU-6: a paused pool only looks whether it has to decline, once per state of affairs"
)
def test_paused_pools_only_check() -> None:
    worker = Worker("one", paused=True)
    cls = requests()
    decision = choose(cls, [pool("one")], {"one": worker}, 7)
    assert decision.worker is worker and decision.check_only
    cls.checked["one"] = 7
    decision = choose(cls, [pool("one")], {"one": worker}, 7)
    assert decision.worker is None and "paused" in decision.reason
    assert choose(cls, [pool("one")], {"one": worker}, 8).check_only
    other = Worker("two")
    assert (
        choose(
            cls, [pool("one"), pool("two", priority=200)], {"one": worker, "two": other}, 7
        ).worker
        is other
    )


@pytest.mark.spec(
    "LAU-2.6, LAU-3: declined only when nobody is eligible, by all of ours; the last one fails it"
)
def test_request_is_declined_by_all_pools_only_if_none_is_eligible() -> None:
    pools = [pool("one"), pool("two", "b"), pool("theirs", "c")]
    workers = {"one": Worker("one"), "two": Worker("two")}
    assert choose(requests("c"), pools, workers, 0).reason == "another launcher can serve it"
    assert set(choose(requests("d"), pools, workers, 0).decline_by) == {"one", "two"}
    assert choose(requests("d", declined="one"), pools, workers, 0).decline_by == ("two",)
    assert choose(requests("d", declined="one two"), pools, workers, 0).decline_by == ()
    # The launcher that had not declined no longer exists.
    assert choose(requests("d", declined="one two"), pools[:2], workers, 0).decline_by
    assert choose(requests("a b"), pools, workers, 0).decline_by


@pytest.mark.spec("issue: nothing is declined while our own pools are still being registered")
def test_no_decline_before_all_pools_are_registered() -> None:
    workers = {"one": Worker("one"), "two": Worker("two")}
    decision = choose(requests("b"), [pool("one")], workers, 0)
    assert decision.worker is None and not decision.decline_by and "registered" in decision.reason
    assert choose(requests("a"), [pool("one")], workers, 0).worker is workers["one"]


# -- the queue


class Tree:
    def __init__(self) -> None:
        self.requests: dict[str, NodeRequest] = {}

    def get(self, request_id: str) -> NodeRequest | None:
        return self.requests.get(request_id)

    def snapshot(self) -> list[NodeRequest]:
        return list(self.requests.values())


class TakingWorker(Worker):
    """Takes everything offered and remembers the order."""

    def __init__(self, log: list[str]) -> None:
        super().__init__("worker")
        self.log = log

    def offer(self, request_id: str, check_only: bool, gives_way: bool = False) -> None:
        assert not check_only
        self.log.append(request_id)


class Zk:
    connected = synced = True

    def __init__(self, tree: Tree, pools: list[RegisteredPool]) -> None:
        self.request_tree = tree
        self.pools = pools

    def getRegisteredPools(self) -> list[RegisteredPool]:
        return self.pools


class Launcher:
    def __init__(self, tree: Tree, worker: Any) -> None:
        self.statsd = Metrics()
        self.clock = HandClock()
        self.zk = Zk(tree, [pool("one", "a b c")])
        self.workers = {"one": worker}
        self.handlers: dict[str, Any] = {}
        self.is_starting = lambda _labels: False


def make(tree: Tree, worker: Any) -> Assignment:
    return Assignment(Launcher(tree, worker))  # type: ignore[arg-type]


def hand(assignment: Assignment) -> HandClock:
    clock = assignment.state.clock
    assert isinstance(clock, HandClock)
    return clock


def request(request_id: str, labels: tuple[str, ...] = ("a",), **values: Any) -> NodeRequest:
    result = NodeRequest(request_id)
    result.state = REQUESTED
    result.node_types = list(labels)
    for key, value in values.items():
        setattr(result, key, value)
    return result


def test_disconnected_launcher_does_not_loop_until_it_may_check_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assignment, looks = make(Tree(), Worker("one")), Mock()
    monkeypatch.setattr(assignment._moves, "check", looks)
    monkeypatch.setattr(assignment.state.zk, "connected", False)
    assignment._moves.due = hand(assignment).monotonic() - 1
    assignment._pass()
    assert assignment._moves.due == math.inf and not looks.called
    monkeypatch.setattr(assignment.state.zk, "connected", True)
    assignment.rebuild()
    assignment._pass()
    assignment._pass()
    looks.assert_called_once_with()


RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["099", "100", "199", "200", "300", "900"]),
        st.integers(0, 5),
        st.sampled_from([("a",), ("b",), ("a", "b"), ("c", "c")]),
        st.sampled_from([None, "t1", "t2"]),
        st.sampled_from([None, "p-one", "elsewhere"]),
    ),
    max_size=80,
)


@pytest.mark.spec("LAU-2: served by (priority string, relative priority, sequence); ZK-5")
@given(RECORDS)
def test_requests_are_served_by_priority_and_sequence(
    records: list[tuple[str, int, tuple[str, ...], str | None, str | None]],
) -> None:
    tree = Tree()
    log: list[str] = []
    for number, (priority, relative, labels, tenant, wish) in enumerate(records):
        name = f"{priority}-{number:010d}"
        tree.requests[name] = request(
            name, labels, relative_priority=relative, tenant_name=tenant, provider=wish
        )
    assignment = make(tree, TakingWorker(log))
    assignment.rebuild()
    for _ in range(len(records) // 32 + 1):
        assignment._pass()
    assert log == sorted(tree.requests, key=lambda i: tree.requests[i].priority)
    assert assignment.waiting() == 0


def crowd(assignment: Assignment, classes: int) -> None:
    """Classes of good priority that wait at the full pool."""
    tree: Any = assignment.state.zk.request_tree
    for number in range(classes):
        name = f"100-{number:010d}"
        tree.requests[name] = request(name, tenant_name=f"t{number}")


def test_low_priority_is_decided_about_while_wake_ups_never_stop() -> None:
    tree, idle = Tree(), Room("idle", room=1)
    assignment = make(tree, Room(room=0))
    assignment.state.zk.pools.append(pool("idle", "d"))
    assignment.state.workers["idle"] = idle  # type: ignore[index]
    crowd(assignment, 300)
    assignment.rebuild()
    assignment._pass()
    tree.requests["300-0000000999"] = request("300-0000000999", ("d",))
    assignment.request_changed("300-0000000999", tree.requests["300-0000000999"])
    for _ in range(300 // OVERDUE + 2):
        assignment.wake()
        assignment._pass()
    assert idle.log == ["300-0000000999"]


def test_overdue_class_takes_nothing_that_an_undecided_better_one_may_want() -> None:
    tree, busy = Tree(), Room(room=0)
    assignment = make(tree, busy)
    crowd(assignment, 100)
    tree.requests["300-0000000999"] = request("300-0000000999")
    assignment.rebuild()
    for _ in range(100 // OVERDUE + 2):
        assignment.wake()
        assignment._pass()
    assert not busy.log
    busy.room = 100
    for _ in range(100):
        assignment.wake()
        if busy.room:
            assignment._pass()
    assert (
        len(busy.log) == 100 and busy.log == sorted(busy.log) and "300-0000000999" not in busy.log
    )


@dataclasses.dataclass
class Room(Worker):
    """A worker with capacity for this many; the rest waits."""

    label: str = "worker"
    why: Reason = BUSY
    room: int = 0
    log: list[str] = dataclasses.field(default_factory=list)

    def admission(self, _cls: RequestClass) -> Reason | None:
        return None if self.room else self.why

    def offer(self, request_id: str, check_only: bool, gives_way: bool = False) -> None:
        self.room -= 1
        self.log.append(request_id)


CHANGES = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.sampled_from(["100", "200"]),
            st.integers(0, 3),
            st.sampled_from("ab"),
        ),
        st.tuples(st.just("room"), st.integers(1, 3)),
        st.tuples(st.just("revise"), st.integers(0, 30), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("taken by another"), st.integers(0, 30)),
    ),
    max_size=40,
)


@example(
    [
        ("add", "100", 0, "a"),
        ("add", "100", 0, "b"),
        ("room", 1),
        ("cancel", 0),
        ("room", 1),
        ("add", "100", 0, "b"),
    ]
)
@pytest.mark.spec(
    "LAU-2: at each moment the best of those that wait; issue: an urgent one overtakes"
)
@given(CHANGES)
def test_the_best_waiting_request_is_next(changes: list[tuple[Any, ...]]) -> None:
    tree, worker = Tree(), Room()
    assignment = make(tree, worker)
    waiting: dict[str, NodeRequest] = {}
    count = 0

    def changed(name: str) -> None:
        assignment.request_changed(name, tree.get(name))

    for kind, *values in changes:
        name = (
            sorted(waiting)[values[0] % len(waiting)]
            if waiting and isinstance(values[0], int)
            else None
        )
        if kind == "add":
            priority, relative, label = values
            new = f"{priority}-{count:010d}"
            count += 1
            waiting[new] = tree.requests[new] = request(new, (label,), relative_priority=relative)
            changed(new)
        elif kind == "room":
            worker.room += values[0]
            assignment.wake()
        elif name is None:
            continue
        elif kind == "revise":
            waiting[name] = tree.requests[name] = request(
                name, tuple(waiting[name].node_types), relative_priority=values[1]
            )
            changed(name)
        elif kind == "cancel":
            del waiting[name], tree.requests[name]
            changed(name)
        else:
            other = waiting.pop(name).copy()
            other.state = PENDING
            tree.requests[name] = other
            changed(name)
        expected = sorted(waiting, key=lambda i: waiting[i].priority)[: worker.room]
        before = len(worker.log)
        assignment._pass()
        taken = worker.log[before:]
        assert taken == expected
        for done in taken:
            del waiting[done]
        assert assignment.waiting() == len(waiting)


@pytest.mark.spec("issue: thousands of waiting requests cost nothing")
def test_only_heads_are_looked_at() -> None:
    tree, worker = Tree(), Room()
    assignment = make(tree, worker)
    for number in range(3000):
        name = f"200-{number:010d}"
        tree.requests[name] = request(name, ("a",) if number % 2 else ("b",))
    assignment.rebuild()
    assignment._pass()
    assert assignment.queue.decisions == 2
    assert reason_for(assignment, "200-0000002999") == "worker: scheduler busy"
    worker.room = 1
    assignment.wake()
    assignment._pass()
    assert worker.log == ["200-0000000000"] and assignment.queue.decisions < 8


def tenant_limit(tenant: str) -> Reason:
    return because(Code.TENANT_LIMIT, tenant=tenant, limit=3, resource="cores", used=3, needed=1)


@pytest.mark.spec("LAU-2: what happened while a pool looked at the request is not missed")
def test_a_change_while_it_was_handed_out_is_not_lost() -> None:
    tree, worker = Tree(), Room(room=1)
    assignment = make(tree, worker)
    name = "200-0000000001"
    tree.requests[name] = request(name)
    assignment.rebuild()
    assignment._pass()
    assert worker.log == [name]
    assignment.wake()  # quota came free after the pool had looked
    worker.room = 1
    assignment.release(name, wait_for=tenant_limit("t"))
    assignment._pass()
    assert worker.log == [name, name]
    # Without a change it waits.
    worker.room = 1
    assignment.release(name, wait_for=tenant_limit("t"))
    assignment._pass()
    assert worker.log == [name, name] and reason_for(assignment, name) == str(tenant_limit("t"))
    assignment.recheck(Code.TENANT_LIMIT, tenant="u")
    assert reason_for(assignment, name) == str(tenant_limit("t"))
    assignment.recheck(Code.TENANT_LIMIT, tenant="t")
    assignment._pass()
    assert len(worker.log) == 3


@pytest.mark.spec("LAU-2.10: left alone for a moment")
def test_request_with_retry_after_rests() -> None:
    tree, worker = Tree(), Room(room=9)
    assignment = make(tree, worker)
    name = "200-0000000001"
    tree.requests[name] = request(name)
    assignment.rebuild()
    assignment._pass()
    assignment.release(name, retry_after=2.0)
    assignment.request_changed(name, tree.get(name))
    assignment._pass()
    assert worker.log == [name]
    hand(assignment).now += 2.1
    assignment._pass()
    assert worker.log == [name, name]


def test_request_that_was_left_to_others_is_looked_at_when_their_turn_is_over() -> None:
    tree = Tree()
    assignment = make(tree, Room(room=0))
    name = "200-0000000001"
    tree.requests[name] = request(name)
    assignment.rebuild()
    assignment._pass()
    before = assignment.queue.decisions
    assignment._resync_at = math.inf  # else it checks everything in between
    assignment.yield_to_others(name)
    assignment._pass()
    assert assignment.queue.decisions == before, "it waits for the same reason"
    hand(assignment).now += OTHERS_TURN + 0.1
    assignment._pass()
    assert assignment.queue.decisions == before + 1


@pytest.fixture
def no_resync() -> None:
    """The periodic comparison with the mirror is tested here."""


@pytest.mark.spec(
    "issue 11, A5: the comparison with the mirror is a clock, which events do not put off"
)
def test_request_without_an_event_is_found_by_the_periodic_comparison() -> None:
    tree, log = Tree(), []
    assignment = make(tree, TakingWorker(log))
    assignment._pass()
    tree.requests["200-0000000001"] = request("200-0000000001")
    for number in range(2, 5):
        hand(assignment).now += RESYNC / 3 - 0.1
        name = f"200-{number:010}"
        tree.requests[name] = request(name)
        assignment.request_changed(name, tree.get(name))
        assignment._pass()
    assert "200-0000000001" not in log and len(log) == 3
    hand(assignment).now += 1
    assignment._pass()
    assert "200-0000000001" in log and len(log) == 4


def test_deleted_request_without_an_event_is_found_by_the_periodic_comparison() -> None:
    tree = Tree()
    assignment = make(tree, Room(room=0))
    name = "200-0000000001"
    tree.requests[name] = request(name)
    assignment.rebuild()
    assignment._pass()
    del tree.requests[name]
    assignment._pass()
    assert assignment.waiting() == 1
    hand(assignment).now += RESYNC
    assignment._pass()
    assert assignment.waiting() == 0


@pytest.mark.spec("issue 11, C1: a request that is handed out and that nobody has is found")
def test_a_forgotten_claim_is_found() -> None:
    tree, log = Tree(), []
    worker = TakingWorker(log)
    assignment = make(tree, worker)
    name = "200-0000000001"
    tree.requests[name] = request(name)
    assignment.rebuild()
    assignment._pass()
    for _ in range(3):
        hand(assignment).now += RESYNC
        assignment._pass()
    assert log == [name], "the pool has it"
    worker.has = lambda _request_id: False  # type: ignore[method-assign]
    assignment.state.handlers[name] = Mock()
    for _ in range(3):
        hand(assignment).now += RESYNC
        assignment._pass()
    assert log == [name], "a handler of a former pool has it"
    del assignment.state.handlers[name]
    hand(assignment).now += RESYNC
    assignment._pass()
    assert log == [name], "it may be about to be released"
    hand(assignment).now += RESYNC
    assignment._pass()
    assert log == [name] * 2


def test_periodic_comparison_rechecks_classes_that_no_event_wakes() -> None:
    tree, worker = Tree(), Room(why=because(Code.ERROR, error="induced"))
    assignment = make(tree, worker)
    name = "200-0000000001"
    tree.requests[name] = request(name)
    assignment.rebuild()
    assignment._pass()
    worker.room = 1
    assignment._pass()
    assert worker.log == []
    hand(assignment).now += RESYNC
    assignment._pass()
    assert worker.log == [name]


@pytest.mark.spec(
    "issue 11, B4: a recheck between the decision and the storing of its reason is not lost"
)
def test_a_recheck_during_the_decision() -> None:
    tree = Tree()

    class Racing(Room):
        def admission(self, cls: RequestClass) -> Reason | None:
            reason = super().admission(cls)
            if reason is not None and not raced:
                raced.append(1)
                self.room = 1
                assignment.recheck(Code.BUSY)
            return reason

    raced: list[int] = []
    worker = Racing()
    assignment = make(tree, worker)
    name = "200-0000000001"
    tree.requests[name] = request(name)
    assignment.rebuild()
    assignment._pass()
    assert raced and worker.log == [name]


@pytest.mark.spec(
    "issue 11, B4: classes that a pool has refused for a reason are looked at again, too, when it "
    "goes"
)
def test_a_recheck_after_a_refusal() -> None:
    tree, worker = Tree(), Room(room=1)
    assignment = make(tree, worker)
    name = "200-0000000001"
    tree.requests[name] = request(name)
    assignment.rebuild()
    assignment._pass()
    assignment.release(name, wait_for=tenant_limit("t"), refused_by="one")
    assignment._pass()
    assert (
        worker.log == [name]
        and reason_for(assignment, name)
        == "worker: tenant t is limited to 3 cores, 3 in use, 1 needed"
    )
    worker.room = 2
    assignment.recheck(Code.TENANT_LIMIT, tenant="u")
    assignment._pass()
    assert worker.log == [name]
    assignment.recheck(Code.TENANT_LIMIT, tenant="t")
    assignment._pass()
    # Promised to another one while this one is being checked.
    assignment.recheck(Code.TENANT_LIMIT, tenant="t")
    assignment.release(name, wait_for=tenant_limit("t"), refused_by="one")
    assignment._pass()
    assert worker.log == [name] * 3


@pytest.mark.spec(
    "issue 11, C7: a timer to look again takes no request away from the pool that has it"
)
def test_a_timer_leaves_claims_alone() -> None:
    tree, worker = Tree(), Room(room=5)
    launcher = Launcher(tree, worker)
    assignment = Assignment(launcher)  # type: ignore[arg-type]
    assignment.session_lost()
    name = "200-0000000001"
    launcher.zk.pools = [pool("one", "other")]
    tree.requests[name] = request(name)
    assignment.rebuild()
    assignment._pass()
    assert "session was lost" in reason_for(assignment, name)
    launcher.zk.pools = [pool("one", "a b c")]
    assignment.wake(recheck=True)
    assignment._pass()
    assert worker.log == [name]
    hand(assignment).now += 6
    assignment._pass()
    assert worker.log == [name]


@pytest.mark.spec(
    "issue 11, users 5 hoarding: a pool without room gives way to one that is open, and keeps it "
    "when none is"
)
def test_full_pool_releases_a_request_if_another_one_is_open() -> None:
    one, two = Worker("one"), Worker("two", load=3)
    workers, pools = {"one": one, "two": two}, [pool("one"), pool("two")]
    assert choose(requests(), pools, workers, 0).gives_way
    one.fullness = FULL
    decision = choose(requests(), pools, workers, 0)
    assert decision.worker is two and not decision.gives_way
    two.paused = True
    cls = requests()
    cls.checked["two"] = 0
    decision = choose(cls, pools, workers, 0)
    assert decision.worker is one and not decision.gives_way, "it waits there"
    # A pool of another launcher.
    for worse, there in ((pool("theirs"), True), (pool("theirs", paused=True), False)):
        decision = choose(requests(), [pool("one"), worse], {"one": one}, 0)
        assert (decision.worker is None) == there
        assert not there or "another launcher" in decision.reason
        assert choose(requests(), [pool("one"), worse], {"one": one}, 0, insist=True).worker is one
        one.fullness = None
        assert choose(requests(), [pool("one"), worse], {"one": one}, 0).gives_way == there
        one.fullness = FULL
    # Another launcher's pool that has no capacity for this label is open for others.
    partly = RegisteredPool({**pool("theirs", "a b").content, "full_labels": ["a"]})
    assert choose(requests(), [pool("one"), partly], {"one": one}, 0).worker is one
    assert choose(requests("b"), [pool("one", "b"), partly], {"one": one}, 0).worker is None
    # One of worse priority is not a reason to leave it, but has it when this one is known to be
    # full.
    one.fullness, two.paused = None, False
    pools[1].priority = 200
    decision = choose(requests(), pools, workers, 0)
    assert decision.worker is one and not decision.gives_way
    one.fullness = FULL
    assert choose(requests(), pools, workers, 0).worker is two
    # B5: a static pool without a free node is closed.
    one.fullness, one.closure = None, because(Code.NO_FREE_NODE, labels="a")
    assert choose(requests(), pools, workers, 0).worker is two
    assert choose(requests(), [pool("one")], {"one": one}, 0).reason == "one: no free node of a"


class Poisoned(TakingWorker):
    """Raises for label b."""

    def admission(self, cls: Any) -> Reason | None:
        if "b" in cls.labels:
            raise TypeError("induced")
        return super().admission(cls)


@pytest.mark.spec("issue 11, A1: one class that raises stops no other")
def test_a_class_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    tree, log = Tree(), []
    assignment = make(tree, Poisoned(log))
    for name, labels in (
        ("100-0000000001", ("b",)),
        ("200-0000000002", ("a",)),
        ("200-0000000003", ("b",)),
    ):
        tree.requests[name] = request(name, labels)
    for _ in range(3):
        assignment.rebuild()
        assignment._pass()
    assert log == ["200-0000000002"]
    assert reason_for(assignment, "100-0000000001") == "error: TypeError('induced')"
    assert sum("Cannot assign request 100-0000000001 (b)" in r.message for r in caplog.records) == 1


def test_nothing_is_declined_until_other_launchers_had_time_to_register_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = Tree()
    assignment = make(tree, Room(room=9))
    name = "200-0000000001"
    tree.requests[name] = request(name, ("theirs",))
    declined: list[str] = []
    monkeypatch.setattr(DECLINE, lambda _state, request_id, *_rest: declined.append(request_id))
    assignment.session_lost()
    assignment.rebuild()
    assignment._pass()
    hand(assignment).now += REGISTRATION_GRACE - 0.1
    assignment._pass()
    assert declined == []
    hand(assignment).now += 0.2
    assignment._pass()
    assert declined == [name]


def test_a_request_that_replaces_one_during_the_grace_time_is_declined_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = Tree()
    assignment = make(tree, Room(room=9))
    first, second = "200-0000000001", "200-0000000002"
    tree.requests[first] = request(first, ("theirs",))
    declined: list[str] = []
    monkeypatch.setattr(DECLINE, lambda _state, request_id, *_rest: declined.append(request_id))
    assignment.session_lost()
    assignment.rebuild()
    assignment._pass()
    del tree.requests[first]
    assignment.request_changed(first, None)
    tree.requests[second] = request(second, ("theirs",))
    assignment.request_changed(second, tree.get(second))
    assignment._pass()
    assert declined == []
    assignment._resync_at = math.inf  # else it checks everything
    hand(assignment).now += REGISTRATION_GRACE + 0.1
    assignment._pass()
    assert declined == [second]


@pytest.mark.spec("issue 11, C1: a request whose decline fails is tried again")
def test_a_decline_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, worker = Tree(), Room(room=9)
    assignment = make(tree, worker)
    name = "200-0000000001"
    tree.requests[name] = request(name, ("nobody's",))
    tried: list[str] = []

    def fail(_state: Any, request_id: str, *_rest: Any) -> None:
        tried.append(request_id)
        raise OSError("induced")

    monkeypatch.setattr(DECLINE, fail)
    assignment.rebuild()
    for seconds in (0, 0.5, 1, 1.1):
        hand(assignment).now += seconds
        assignment._pass()
    assert tried == [name] * 3

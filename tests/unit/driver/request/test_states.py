"""The request handler as a state machine: its table is complete, and in any order of events it
ends once and keeps nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.exceptions import (
    BadVersionError,
    ConnectionLoss,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
)
from kazoo.protocol.serialization import Create, SetData

from nodepool.base.clock import SYSTEM
from nodepool.base.problems import LabelProblems
from nodepool.driver.quota.support import LimitsPending, QuotaSupport
from nodepool.driver.request.handler import NodeRequestHandler
from nodepool.driver.request.life import NOT_ALLOWED
from nodepool.driver.request.state import (
    ADMISSION,
    BUSY,
    CATCH_UP,
    NEXT,
    Admission,
    Event,
    How,
    Outcome,
    State,
)
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.writer import TransactionFailed


def test_the_tables_are_complete() -> None:
    assert set(ADMISSION) == set(NEXT) == set(State)
    assert all(set(row) == set(Event) for row in ADMISSION.values())
    assert not NEXT[State.ENDED]
    assert set(ADMISSION[State.ENDED].values()) == {Admission.IGNORE}
    assert all(
        State.ENDED in following for state, following in NEXT.items() if state is not State.ENDED
    )


def test_what_waits_for_an_answer_is_taken_up_after_it() -> None:
    for state, row in ADMISSION.items():
        for event, admission in row.items():
            if admission is Admission.LATER:
                assert state in BUSY
                assert event in CATCH_UP
            if state in BUSY:
                assert (
                    admission is not Admission.ACT or event is Event.DROP
                )  # nothing is written twice at a time


class Pool:
    """A pool that runs each step immediately, and remembers what it was given."""

    launcher_id, provider_name, pool_name = "me", "p", "main"
    paused = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.tasks: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.claims: dict[str | None, object] = {}
        self.outcomes: list[Outcome] = []
        self.creators: set[int] = set()
        self.capacity = self
        self.nodepool = SimpleNamespace(
            clock=SYSTEM,
            claims=self.claims,
            decline=lambda *_args: None,
            launch_failures=SimpleNamespace(trials=lambda *_args: [], blocked=lambda *_args: None),
        )

    def getZK(self) -> Any:
        return self.world.zk

    def getProviderConfig(self) -> Any:
        return SimpleNamespace(name="p")

    def getPoolConfig(self) -> Any:
        return SimpleNamespace(
            name="main", labels={"small": None}, max_servers=9, node_attributes=None
        )

    def getProviderManager(self) -> Any:
        return SimpleNamespace(
            errorLabels=lambda: (), PAUSE_AT_QUOTA=True, label_problems=LabelProblems("p")
        )

    def blocks(self, _handler: Any) -> bool:
        return self.paused

    def post(self, _handler: Any, function: Callable[..., Any], *args: Any) -> None:
        self.tasks.append((function, args))

    def begin_creation(self, handler: Any) -> bool:
        self.creators.add(id(handler))
        return True

    def end_creation(self, handler: Any) -> None:
        self.creators.discard(id(handler))

    def promise(self, _handler: Any) -> bool:
        return False

    def recorded(self, _handler: Any, _missing: list[str]) -> None: ...

    def pause_changed(self, _handler: Any) -> None: ...

    def note_full(self, _labels: list[str], _reason: Any) -> None: ...

    def promise_released(self) -> None: ...

    def limits_known(self) -> None: ...

    def ended(self, handler: Any, outcome: Outcome) -> None:
        if handler.done:
            self.outcomes.append(outcome)


class World:
    """ZooKeeper and cloud of one request, as far as a handler asks."""

    def __init__(self, room: int, ready: int) -> None:
        self.room = room
        self.sent: list[tuple[Any, Callable[..., None]]] = []
        self.numbers = 0
        self.promises: set[Any] = set()
        self.request: zk.NodeRequest | None = zk.NodeRequest("100-0000000001")
        self.request.node_types = ["small", "small"]
        self.request.state = zk.REQUESTED
        self.request.stat = SimpleNamespace(version=0)
        free = {f"r{i}": self._ready(f"r{i}") for i in range(ready)}
        tree = SimpleNamespace(
            iter_free=lambda *_key: list(free),
            get=free.get,
            is_locked=lambda _id: False,
            lock_dirs=set(),
        )
        client = SimpleNamespace(
            full_path=lambda path: path, abandoned=SimpleNamespace(add=lambda _path: None)
        )
        synced = threading.Event()
        synced.set()
        self.zk: Any = SimpleNamespace(
            node_tree=tree,
            note_tree=SimpleNamespace(of=lambda _kind: []),
            request_tree=SimpleNamespace(get=lambda _id: self.request, synced=synced),
            kazoo_client=client,
            reservations=SimpleNamespace(
                reserve=lambda key, *_args: self.promises.add(key), release=self.promises.discard
            ),
            writer=SimpleNamespace(
                submit=lambda txn, then=None: (
                    self.sent.append((txn, then)) if then is not None else None
                )
            ),
            make_room=lambda _provider, _pool: None,
            getNodeRequest=lambda _id: self.request.copy() if self.request is not None else None,
        )
        self.pool = Pool(self)
        assert self.request is not None
        self.handler = Handler(self.pool, self.request.copy())

    @staticmethod
    def _ready(node_id: str) -> zk.Node:
        node = zk.Node(node_id)
        node.state, node.type, node.provider, node.pool = zk.READY, ["small"], "p", "main"
        node.stat = SimpleNamespace(version=0)
        return node

    def steps(self) -> None:
        while self.pool.tasks:
            function, args = self.pool.tasks.pop(0)
            function(*args)

    def answer(self, error: BaseException | None) -> None:
        """The oldest transaction is answered."""
        if not self.sent:
            return
        txn, then = self.sent.pop(0)
        if error is not None:
            then(None, error)
            return
        results: list[Any] = []
        for operation in txn.operations:
            self.numbers += 1
            if isinstance(operation, Create):
                results.append(f"{operation.path}{self.numbers:010}")
            else:
                results.append(
                    SimpleNamespace(version=1, mtime=0, ctime=0)
                    if isinstance(operation, SetData)
                    else True
                )
        then(results, None)

    def refusal(self, kind: str) -> BaseException:
        """One that the transaction at hand can get."""
        txn = self.sent[0][0] if self.sent else None
        if kind == "connection" or txn is None:
            return ConnectionLoss()
        path = (
            txn.operations[0].path
            if kind != "version"
            else next(
                (op.path for op in txn.operations if isinstance(op, SetData)),
                txn.operations[0].path,
            )
        )
        cause = {
            "version": BadVersionError,
            "gone": NoNodeError,
            "exists": NodeExistsError,
            "held": NotEmptyError,
        }[kind]
        return TransactionFailed(0, cause(), path)


class Handler(NodeRequestHandler):
    """Of a driver whose machines come up, fail or are refused when the test says so."""

    BLOCKING = False
    RESERVES = True
    pw: Any

    @property
    def alive_thread_count(self) -> int:
        return sum(node.state == zk.BUILDING for node in self.nodeset)

    def imagesAvailable(self) -> bool:
        return True

    def launch(self, node: zk.Node) -> None:
        return

    def launchesComplete(self) -> bool:
        return self.alive_thread_count == 0

    def hasRemainingQuota(self, ntype: str) -> bool:
        building = sum(node.state == zk.BUILDING for node in self.nodeset)
        return self.pw.world.room > building

    def launched(self, state: str) -> None:
        for node in self.nodeset:
            if node.state == zk.BUILDING:
                node.state = state
                self.pw.post(self, self.poll)
                return


EVENTS = st.sampled_from(
    [
        "run",
        "poll",
        "decline",
        "hand_back",
        "move",
        "room",
        "no room",
        "removed",
        "ready",
        "failed",
        "aborted",
        "ok",
        "ok",
        "ok",
        "version",
        "gone",
        "exists",
        "held",
        "connection",
        "drop",
    ]
)


def happen(world: World, event: str) -> None:
    handler = world.handler
    if event in ("run", "poll", "hand_back", "move", "drop"):
        world.pool.post(handler, getattr(handler, event))
    elif event == "decline":
        world.pool.post(handler, handler.declineRequest)
    elif event in ("room", "no room"):
        world.room = 9 if event == "room" else 0
    elif event == "removed":
        world.request = None
    elif event in (zk.READY, zk.FAILED, zk.ABORTED):
        handler.launched(event)
    else:
        world.answer(None if event == "ok" else world.refusal(event))
    world.steps()


def test_refusal_that_is_not_a_conflict_is_not_retried_immediately() -> None:
    world = World(9, 0)
    happen(world, "run")
    world.sent.pop(0)[1](None, TransactionFailed(0, NoAuthError(), paths.NODES + "/"))
    world.steps()
    assert world.sent == [] and world.pool.outcomes == [Outcome(How.RETURNED, NOT_ALLOWED)]


def test_end_that_may_not_be_written_is_not_tried_again_immediately() -> None:
    world = World(9, 0)
    happen(world, "decline")
    world.sent.pop(0)[1](
        None, TransactionFailed(0, NoAuthError(), paths.request_lock("100-0000000001"))
    )
    world.steps()
    assert world.sent == [] and world.pool.outcomes == [Outcome(How.DROPPED, NOT_ALLOWED)]


def test_request_whose_lock_is_lost_is_not_written_again() -> None:
    world = World(0, 1)
    for event in ("run", "ok", "room", "run"):
        happen(world, event)
    assert world.handler.accepted and len(world.sent) == 1
    world.sent.pop(0)[1](None, TransactionFailed(0, NoNodeError(), world.handler.request.lock.path))
    world.steps()
    assert world.sent == [] and world.pool.outcomes == [Outcome(How.DROPPED)]


def test_capacity_of_nodes_that_were_not_created_is_offered_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, released = World(9, 0), Mock()
    monkeypatch.setattr(world.pool, "promise_released", released)
    happen(world, "run")
    happen(world, "version")
    assert released.call_count == 1


@given(st.lists(EVENTS, max_size=40), st.integers(0, 2), st.integers(0, 3))
def test_any_order_of_events(events: list[str], room: int, ready: int) -> None:
    world = World(room, ready)
    handler = world.handler
    errors: list[logging.LogRecord] = []
    handler.log.logger.addFilter(
        lambda record: errors.append(record) or True if record.levelno >= logging.ERROR else True
    )
    for event in events:
        happen(world, event)
        assert len(world.pool.outcomes) == int(handler.done)
        assert len(world.sent) <= 1, "two transactions at a time"
        assert (handler.state in BUSY) == bool(world.sent) or handler.done
    # What begins now goes well: it has to come to an end.
    world.room = 9
    for _ in range(30):
        if handler.done and not world.sent:
            break
        for event in ("ok", "ready", "run", "poll"):
            happen(world, event)
    assert handler.done
    assert len(world.pool.outcomes) == 1
    assert not world.pool.claims
    assert not world.promises
    assert not world.pool.creators
    assert not errors


@pytest.mark.parametrize(
    ("events", "how"),
    [
        (["run", "ok", "ok", "ready", "ready", "ok"], How.FULFILLED),
        (["run", "ok", "ok", "ready", "failed", "ok"], How.DECLINED),
        (["run", "hand_back", "ok", "ok", "ready", "ready", "ok", "ok"], How.RETURNED),
        (["hand_back"], How.REFUSED),
        (["run", "connection"], How.DROPPED),
        (["run", "ok", "ok", "removed", "ready", "ready", "ok"], How.REMOVED),
    ],
)
def test_pool_gets_one_outcome_for_each_way_to_end(events: list[str], how: How) -> None:
    world = World(9, 0)
    for event in events:
        happen(world, event)
    assert [outcome.how for outcome in world.pool.outcomes] == [how]


def test_free_node_is_claimed_by_one_handler_at_a_time_and_for_one_label() -> None:
    world = World(9, 2)
    world.pool.claims["r0"] = "another handler"
    happen(world, "run")
    written = [getattr(operation, "path", "") for operation in world.sent[0][0].operations]
    assert paths.node("r1") in written and paths.node("r0") not in written
    assert world.pool.claims.keys() == {"r0", "r1"}
    happen(world, "ok")
    assert world.pool.claims == {"r0": "another handler"}


def test_node_that_the_driver_refuses_is_not_claimed_any_more() -> None:
    world = World(0, 1)
    handler: Any = world.handler
    handler.checkReusableNode = lambda _node: False
    happen(world, "run")
    assert world.pool.claims == {}


def test_decline_by_a_hook_of_the_driver_is_handled_after_its_step() -> None:
    world = World(9, 0)
    handler: Any = world.handler
    handler.launch = lambda _node: handler.declineRequest()
    for event in ("run", "ok", "ok", "ok", "ready", "ready", "ok"):
        happen(world, event)
    assert [outcome.how for outcome in world.pool.outcomes] == [How.DECLINED]


def test_error_of_a_check_is_raised_to_its_caller_and_the_check_is_repeated() -> None:
    world = World(9, 0)
    handler: Any = world.handler
    for event in ("run", "ok", "ok"):
        happen(world, event)
    check, handler.launchesComplete = (
        handler.launchesComplete,
        Mock(side_effect=ValueError("no idea")),
    )
    with pytest.raises(ValueError, match="no idea"):
        handler.poll()
    handler.launchesComplete = check
    for event in ("ready", "ready", "ok"):
        happen(world, event)
    assert [outcome.how for outcome in world.pool.outcomes] == [How.FULFILLED]


def test_error_of_a_driver_while_quota_is_promised_is_a_problem_of_the_labels() -> None:
    pool: Any = World(9, 0).pool
    manager = pool.getProviderManager()
    pool.getProviderManager, pool.promise = lambda: manager, Mock(side_effect=ValueError("no idea"))
    for event in ("run", "ok"):
        happen(pool.world, event)
    assert [outcome.how for outcome in pool.outcomes] == [How.DECLINED]
    (problem,) = manager.label_problems.listed()
    assert (
        problem.label == "small"
        and "pool main: its driver failed: ValueError('no idea')" in problem.text
    )


def test_request_that_cannot_be_checked_yet_is_withdrawn_until_the_limits_are_known() -> None:
    pool: Any = World(9, 0).pool
    woken, pending = Mock(), LimitsPending("p")
    pool.getProviderManager = lambda: Mock(spec=QuotaSupport, when_limits_known=woken)
    pool.world.handler.decline_reasons = Mock(side_effect=pending)
    pool.world.handler.run()
    assert [(outcome.how, outcome.wait_for) for outcome in pool.outcomes] == [
        (How.WITHDRAWN, pending.reason)
    ]
    woken.assert_called_once_with(pool.limits_known)


@pytest.mark.parametrize("event", [Event.RUN, Event.CHECK])
def test_request_is_not_accepted_while_another_one_waits_for_capacity(event: Event) -> None:
    world = World(9, 2)
    world.pool.paused = event is Event.RUN
    world.handler.life.happen(event)
    assert world.pool.outcomes == [Outcome(How.WITHDRAWN, checked=True)] and not world.sent


def test_request_that_has_paused_its_pool_is_accepted_after_a_conflict() -> None:
    world = World(0, 0)
    pool: Any = world.pool
    pool.pause_changed = lambda handler: setattr(pool, "paused", handler.paused)
    happen(world, "run")
    happen(world, "exists")
    assert pool.paused and world.sent and not pool.outcomes
    happen(world, "ok")
    assert world.handler.accepted and world.handler.state is State.WAITING


def test_a_wrong_step_harms_this_request_only(caplog: pytest.LogCaptureFixture) -> None:
    world = World(9, 0)
    world.handler.life.to(State.FREEING)
    assert "Unexpected transition of node request from offered to freeing" in caplog.text
    world.handler.drop()
    assert [outcome.how for outcome in world.pool.outcomes] == [How.DROPPED]

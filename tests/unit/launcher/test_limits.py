"""Limits of pools and of patience: what happens just below and at each."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nodepool.launcher.nodes.reconciler import INIT_AGE, INIT_LOOK, NodeReconciler
from nodepool.launcher.pools.admission import PoolAdmission
from nodepool.launcher.pools.backlog import LIMIT, Backlog
from nodepool.launcher.requests.moves import LONG_REST, STANDSTILL, end_standstill
from nodepool.launcher.requests.queue import ClassKey, RequestClass
from nodepool.reasons import Code
from nodepool.zk.zookeeper import Node
from tests.support.clock import HandClock

CLASS = RequestClass(ClassKey(("label",), None, None, frozenset()))


class Room(PoolAdmission):
    """A pool with this many offers, whose driver counts no labels."""

    offer = ask = refresh = Mock()

    def __init__(self, offered: int, launches: int = 0, limit: int = -1) -> None:
        self.backlog = Backlog()
        self.backlog.ids = {str(number) for number in range(offered)}
        self._launching = launches
        provider = SimpleNamespace(max_concurrency=limit)
        config = SimpleNamespace(providers={"p": provider}, provider_managers={"p": object()})
        self.nodepool: Any = SimpleNamespace(config=config, getPoolWorkers=lambda _name: [self])
        self.provider_name = "p"

    def active_launches(self) -> int:
        return self._launching

    def refusal(self) -> Code | None:
        reason = self._admission(CLASS)
        return None if reason is None else reason.code


def test_pool_is_busy_with_a_full_backlog_and_not_before() -> None:
    assert Room(LIMIT - 1).refusal() is None
    assert Room(LIMIT).refusal() is Code.BUSY


def test_pool_takes_requests_until_max_concurrency_launches_are_under_way() -> None:
    assert Room(0, launches=2, limit=3).refusal() is None
    assert Room(0, launches=3, limit=3).refusal() is Code.MAX_CONCURRENCY
    assert Room(0, launches=1000, limit=-1).refusal() is None


# -- requests that keep each other's nodes


class Standstill:
    """Two paused requests of one provider; the worse one has a ready node."""

    def __init__(self, same_pool: bool = True) -> None:
        self.clock = HandClock()
        self.pool: Any = SimpleNamespace(provider_name="p", pool_name="main", posted=[])
        self.pool.post = lambda _handler, *call: self.pool.posted.append(call)
        elsewhere: Any = SimpleNamespace(
            provider_name="p", pool_name="other", paused_handlers=set()
        )
        self.worst = self._handler("2", 2, self.pool, [Node()])
        self.worst.nodeset[0].state = "ready"
        self.better = self._handler("1", 1, self.pool if same_pool else elsewhere, [])
        self.better.wants_more_of_provider = not same_pool
        self.pool.paused_handlers = {self.worst, self.better} if same_pool else {self.worst}
        elsewhere.paused_handlers = set() if same_pool else {self.better}
        self.requests: dict[str, Any] = {}
        self.nodes: dict[str, Any] = {}
        self.by_request: dict[str, list[str]] = {}
        tree = SimpleNamespace(
            lock=threading.Lock(), by_request=self.by_request, get=self.nodes.get
        )
        self.handled: set[str] = set()
        self.state: Any = SimpleNamespace(
            clock=self.clock,
            zk=SimpleNamespace(node_tree=tree, request_tree=self.requests),
            getPoolWorkers=lambda _name: [self.pool, elsewhere],
            handlers=self.handled,
        )

    def _handler(self, name: str, priority: int, pool: Any, nodes: list[Node]) -> Any:
        class Handler(SimpleNamespace):
            __hash__ = object.__hash__  # type: ignore[assignment]

        log = SimpleNamespace(info=lambda *_args: None)
        request = SimpleNamespace(id=name, priority=priority)
        return Handler(
            request=request,
            pw=pool,
            nodeset=nodes,
            log=log,
            paused_since=self.clock.now,
            wants_more_of_provider=None,
            move="move",
        )

    def ended(self, after: float) -> list[tuple[Any, ...]]:
        """What is asked of the worse request when this many seconds have passed."""
        self.clock.now += after
        end_standstill(self.state, self.pool)
        return list(self.pool.posted)


@pytest.mark.parametrize(
    "same_pool, call",
    [(True, ("move", STANDSTILL, False)), (False, ("move", LONG_REST, True))],
    ids=["same pool", "other pool"],
)
def test_worse_request_gives_way_after_a_standstill_and_not_before(
    same_pool: bool, call: tuple[Any, ...]
) -> None:
    scene = Standstill(same_pool)
    assert scene.ended(STANDSTILL - 0.1) == []
    assert scene.ended(0.1) == [call]


def test_worse_request_that_paused_just_now_does_not_give_way() -> None:
    scene = Standstill()
    scene.worst.paused_since += 1
    assert scene.ended(STANDSTILL) == []
    assert scene.ended(1) == [("move", STANDSTILL, False)]


def test_request_does_not_give_way_to_one_that_paused_just_now() -> None:
    scene = Standstill()
    scene.better.paused_since += 1
    assert scene.ended(STANDSTILL) == []
    assert scene.ended(1) == [("move", STANDSTILL, False)]


def test_request_does_not_give_way_while_its_nodes_are_launched() -> None:
    scene = Standstill()
    scene.worst.nodeset[0].state = "building"
    assert scene.ended(STANDSTILL * 2) == []


def test_request_does_not_give_way_to_one_of_the_same_priority() -> None:
    scene = Standstill()
    scene.better.request.priority = scene.worst.request.priority
    assert scene.ended(STANDSTILL * 2) == []


def _stuck_elsewhere(scene: Standstill, **values: Any) -> None:
    """A request of another launcher has had a ready node of our pool since now."""
    scene.pool.paused_handlers = {scene.worst}
    scene.requests["0"] = SimpleNamespace(state="pending", priority=1)
    node = {
        "provider": "p",
        "pool": "main",
        "state": "ready",
        "state_time": scene.clock.now,
        **values,
    }
    scene.nodes["n"] = SimpleNamespace(**node)
    scene.by_request["0"] = ["n"]


def test_request_gives_way_to_one_that_is_stuck_at_another_launcher() -> None:
    scene = Standstill()
    _stuck_elsewhere(scene)
    assert scene.ended(STANDSTILL - 0.1) == []
    assert scene.ended(0.1) == [("move", STANDSTILL, False)]


@pytest.mark.parametrize("values", [{"pool": "other"}, {"provider": "q"}, {"state": "building"}])
def test_request_keeps_its_nodes_if_the_other_one_has_others(values: dict[str, Any]) -> None:
    scene = Standstill()
    _stuck_elsewhere(scene, **values)
    assert scene.ended(STANDSTILL * 2) == []


@pytest.mark.parametrize("values", [{"state": "fulfilled"}, {"priority": 2}, {"priority": 3}])
def test_request_keeps_its_nodes_if_no_pending_one_comes_first(values: dict[str, Any]) -> None:
    scene = Standstill()
    _stuck_elsewhere(scene)
    vars(scene.requests["0"]).update(values)
    assert scene.ended(STANDSTILL * 2) == []


def test_request_of_this_launcher_is_not_stuck_at_another() -> None:
    scene = Standstill()
    _stuck_elsewhere(scene)
    scene.handled.add("0")
    assert scene.ended(STANDSTILL * 2) == []


# -- a node that was recorded and never launched


class Orphan(NodeReconciler):
    """Checks an init node without a request; its launcher is registered, or not."""

    def __init__(self, alive: bool) -> None:
        self.clock = HandClock()
        pools = [SimpleNamespace(id="launcher" if alive else "another")]
        facade = SimpleNamespace(
            getRegisteredPools=lambda: pools,
            request_tree=SimpleNamespace(get=lambda _id: None),
            kazoo_client=SimpleNamespace(exists=lambda _path: None),
        )
        state = SimpleNamespace(clock=self.clock, zk=facade, workers={}, handlers={})
        super().__init__(state, lambda: 5.0)  # type: ignore[arg-type]
        self.deleted: list[str | None] = []
        self.node = Node("0000000001")
        self.node.state = "init"
        self.node.launcher, self.node.state_time = "launcher", self.clock.now

    def _change(
        self, _seen: Node, changed: Node, _message: str, _exists: bool | None = None
    ) -> None:
        self.deleted.append(changed.state)

    def look(self, after: float) -> float | None:
        self.clock.now += after
        return self._init(self.node)


def test_unused_init_node_of_a_living_launcher_is_deleted_when_it_is_old_and_not_before() -> None:
    scene = Orphan(alive=True)
    assert scene.look(1) == INIT_LOOK and scene.deleted == []
    assert scene.look(INIT_AGE - 2) == pytest.approx(1.01) and scene.deleted == []
    assert scene.look(1) is None and scene.deleted == ["deleting"]


def test_unused_init_node_of_a_dead_launcher_is_deleted_immediately() -> None:
    scene = Orphan(alive=False)
    assert scene.look(0) is None and scene.deleted == ["deleting"]


def test_unused_init_node_of_this_launcher_is_deleted_when_nothing_serves_its_request() -> None:
    scene = Orphan(alive=True)
    scene.node.allocated_to = "200-0000000001"
    vars(scene.state).update(workers={"launcher": None}, handlers={"200-0000000001": None})
    assert scene.look(0) == INIT_LOOK and scene.deleted == []
    scene.state.handlers.clear()
    assert scene.look(0) is None and scene.deleted == ["deleting"]

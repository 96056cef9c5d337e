"""Whom a pool notifies of the end of requests, and of its capacity."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from nodepool.driver.quota.support import LimitsPending
from nodepool.driver.request.state import How, Outcome
from nodepool.launcher.pools.backlog import LIMIT
from nodepool.launcher.pools.worker import PoolWorker
from nodepool.launcher.state import LauncherState
from nodepool.reasons import Code, because

BUSY = because(Code.BUSY)


class Pool(PoolWorker):
    """One whose thread is not started."""

    def __init__(self) -> None:
        self.provider = SimpleNamespace(
            max_concurrency=-1, pools={"main": SimpleNamespace(labels={"a": None})}
        )
        state = LauncherState()
        state.zk = Mock(note_tree=Mock(notes={}))
        state.config = SimpleNamespace(
            providers={"p": self.provider}, provider_managers={}, tenant_resource_limits={}
        )
        self.dropped = Mock()
        super().__init__(state, Mock(), "p", "main", self.dropped)
        state.workers = {self.launcher_id: self}

    def run_tasks(self) -> None:
        while not self._tasks.empty():
            task = self._tasks.get()
            assert task is not None
            task[0](*task[1])


@pytest.fixture
def pool() -> Pool:
    return Pool()


def handler(**values: Any) -> Any:
    made = Mock(paused=False, BLOCKING=False)
    made.life = Mock(released=False, promised=False, gives_way=False)
    made.request.id, made.request.node_types = "200-1", ["label"]
    for name, value in values.items():
        setattr(made, name, value)
    return made


ENDS: dict[str, tuple[Outcome, dict[str, Any], bool]] = {
    "fulfilled": (Outcome(How.FULFILLED), {"retry_after": 0.0, "hand_to": None}, True),
    "declined": (Outcome(How.DECLINED), {"retry_after": 0.0, "hand_to": None}, True),
    "given back": (Outcome(How.RETURNED), {"retry_after": 0.0, "hand_to": None}, True),
    "given back for a while": (
        Outcome(How.RETURNED, 5.0),
        {"retry_after": 5.0, "hand_to": None},
        False,
    ),
    "no room": (
        Outcome(How.REFUSED, wait_for=BUSY),
        {"wait_for": BUSY, "refused_by": "me", "full": False},
        False,
    ),
    "something has to change": (
        Outcome(How.WITHDRAWN, wait_for=BUSY),
        {"wait_for": BUSY, "checked_by": None, "refused_by": "me"},
        False,
    ),
    "something has to change, and it was checked": (
        Outcome(How.WITHDRAWN, wait_for=BUSY, checked=True),
        {"wait_for": BUSY, "checked_by": "me", "refused_by": "me"},
        False,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_claim_of_a_request_that_has_ended_is_released(pool: Pool, end: str) -> None:
    outcome, told, woken = ENDS[end]
    pool.launcher_id = "me"
    pool.ended(handler(), outcome)
    assert pool.assignment.release.mock_calls == [call("200-1", **told)]  # type: ignore[attr-defined]
    assert pool.assignment.wake.called == woken  # type: ignore[attr-defined]


ANSWERS: dict[str, tuple[Any, bool]] = {
    "room": (Mock(return_value=True), True),
    "no room": (Mock(return_value=False), False),
    "error": (Mock(side_effect=ValueError("no idea")), False),
    "limits unknown": (Mock(side_effect=LimitsPending("p")), False),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_pool_without_capacity_asks_the_next_one(
    pool: Pool, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.launcher_id, pool.running = "me", True
    could_serve, takes_it = ANSWERS[answer]
    monkeypatch.setattr(
        pool,
        "getProviderManager",
        lambda: Mock(getRequestHandler=lambda *_: handler(could_serve=could_serve)),
    )
    waiting, other, unanswered = handler(), Mock(), set[str]()
    pool.ask(waiting, unanswered, [other])
    assert unanswered == {"me"}
    pool.run_tasks()
    assert unanswered == set()
    assert waiting.pw.post.mock_calls == (
        [call(waiting, waiting.move, 0.0, False, "me")] if takes_it else []
    )
    assert other.ask.mock_calls == ([] if takes_it else [call(waiting, unanswered, [])])


def test_a_driver_that_makes_no_handler_holds_up_no_other_pool(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pool,
        "getProviderManager",
        lambda: Mock(getRequestHandler=Mock(side_effect=ValueError("no"))),
    )
    waiting, other, unanswered = handler(), Mock(), set[str]()
    pool.ask(waiting, unanswered, [other])
    pool.run_tasks()
    assert other.ask.mock_calls == [call(waiting, unanswered, [])] and unanswered == set()


def test_claim_that_another_pool_may_have_stays(pool: Pool) -> None:
    pool.ended(handler(life=Mock(released=True, promised=False)), Outcome(How.RETURNED))
    assert pool.assignment.wake.called and not pool.assignment.release.called  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", [How.DROPPED, How.RETURNED])
def test_clean_up_is_notified_of_requests_that_were_dropped(pool: Pool, how: How) -> None:
    pool.ended(handler(), Outcome(how))
    assert pool.dropped.called == (how is How.DROPPED)


def test_requests_are_looked_at_when_a_pool_pauses_and_when_it_does_no_more(pool: Pool) -> None:
    one, two = handler(paused=True), handler(paused=True)
    for each, woken in ((one, True), (two, False)):
        pool.assignment.wake.reset_mock()  # type: ignore[attr-defined]
        pool.capacity.pause_changed(each)
        assert pool.paused and pool.assignment.wake.called == woken  # type: ignore[attr-defined]
    for each, woken in ((one, True), (two, True)):  # others may overtake the one that still waits
        pool.assignment.wake.reset_mock()  # type: ignore[attr-defined]
        each.paused = False
        pool.capacity.pause_changed(each)
        assert pool.assignment.wake.called == woken  # type: ignore[attr-defined]
    assert not pool.paused


def test_other_launchers_see_that_a_pool_has_paused(pool: Pool) -> None:
    pool.capacity.pause_changed(handler(paused=True))
    assert pool._publish_at is not None


def test_changes_that_follow_each_other_are_published_together(pool: Pool) -> None:
    pool.publish_soon()
    due = pool._publish_at
    pool.publish_soon()
    assert pool._publish_at == due and pool._tasks.qsize() == 1


def test_requests_are_looked_at_when_the_limits_are_known(pool: Pool) -> None:
    pool.capacity.limits_known()
    assert pool.assignment.wake.called  # type: ignore[attr-defined]


@pytest.mark.parametrize("promised", [True, False])
def test_what_a_request_was_promised_and_its_turn_go_to_others_when_it_ends(
    pool: Pool, promised: bool
) -> None:
    first, second = handler(life=Mock(released=False, promised=promised)), handler()
    assert pool.capacity.begin_creation(first) and not pool.capacity.begin_creation(second)
    pool.ended(first, Outcome(How.FULFILLED))
    pool.run_tasks()
    assert second.run.called
    rechecked = pool.assignment.recheck.mock_calls  # type: ignore[attr-defined]
    assert (call(Code.TENANT_LIMIT, tenant=first.request.tenant_name) in rechecked) == promised


def test_requests_that_a_busy_pool_refused_are_offered_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only they: the others would fill the backlog again, without an end."""
    monkeypatch.setattr(pool, "_take_on", lambda *_: None)
    assignment: Any = pool.assignment
    pool._consider("200-1", False)
    assert not assignment.recheck.called
    pool.backlog.ids = set(map(str, range(LIMIT)))
    assert pool.backlog.refuses()
    pool.backlog.ids = {"200-1", "200-2"}
    pool._consider("200-1", False)
    assert assignment.recheck.mock_calls == [call(Code.BUSY)] and not assignment.wake.called


def retried(pool: Pool, *handlers: Any) -> list[Any]:
    """Those that have tried again since this was asked last, in order."""
    order: list[Any] = []
    for each in handlers:
        each.run = lambda each=each: order.append(each)
    pool.run_tasks()
    return order


def test_paused_requests_try_again_the_most_urgent_first(pool: Pool) -> None:
    late, urgent = handler(paused=True), handler(paused=True)
    late.request.priority, urgent.request.priority = (300, 0), (100, 0)
    pool.paused_handlers = {late, urgent}
    for event in (
        pool.capacity_changed,
        pool.capacity.limits_known,
        pool.capacity.promise_released,
    ):
        event()
        event()
        assert retried(pool, late, urgent) == [urgent, late], event.__name__
    assert retried(pool, late, urgent) == []
    pool._publish = Mock()  # type: ignore[method-assign]
    pool.refresh()
    assert retried(pool, late, urgent) == [urgent, late] and pool._publish.called


def test_pool_that_is_closed_takes_no_request(pool: Pool) -> None:
    pool._closed = True
    pool.offer("200-1", False)
    assert pool.assignment.release.mock_calls == [call("200-1")] and not pool.backlog.ids  # type: ignore[attr-defined]


def test_handlers_are_dropped_when_the_session_is_lost(pool: Pool) -> None:
    pool.request_handlers = [handler(), handler()]
    pool.session_lost()
    pool.run_tasks()
    assert all(each.drop.called for each in pool.request_handlers)

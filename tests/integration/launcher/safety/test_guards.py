"""Guards that are no conditions of transactions: each test fails without its guard."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from kazoo.exceptions import ConnectionLoss, SessionExpiredError

from nodepool.driver.request.handler import NodeRequestHandler
from nodepool.driver.request.life import CONFLICT_RETRIES, Life
from nodepool.driver.request.state import End, Event, How, LabelRecorder, Outcome, State
from nodepool.driver.test.handler import TestHandler
from nodepool.launcher.pools.capacity import PoolCapacity
from nodepool.launcher.pools.worker import PoolWorker
from nodepool.launcher.requests.moves import Moves
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import NodeRequest
from tests.conftest import wait_for
from tests.support.calls import count_calls
from tests.support.interference import LOCKS, NODES, REQUESTS, OtherClient, sets
from tests.support.launcher import LauncherBench, config, provider


@pytest.fixture
def other(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> OtherClient:
    return OtherClient(bench.chroot.connect().client, monkeypatch)


# -- requests


def test_zookeeper_is_not_asked_who_holds_our_own_requests(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 1})), cleanup_interval=1000)
    bench.fulfilled("fake-label")
    bench.wait_request(bench.submit("fake-label"), "pending")
    wait_for(lambda: pool.zk.request_tree.pending)
    asked = count_calls(pool.zk.kazoo_client, "get_children_async", monkeypatch)
    pool.cleanup.lost.run(True)
    assert [path for path, *_ in asked if path.startswith(LOCKS.rstrip("/"))] == []


def test_nothing_is_written_for_a_request_that_another_launcher_holds(
    bench: LauncherBench, other: OtherClient
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=1000)
    request_id = bench.submit("fake-label", state="testing")  # a state that no launcher touches
    contender = other.lock(LOCKS + request_id)
    sent: list[str] = []
    other.before(sets(REQUESTS, state="requested"), sent.append)
    other.write(REQUESTS + request_id, state="pending")
    wait_for(lambda: pool.zk.request_tree.pending)
    pool.cleanup.lost.run(True)
    assert not sent
    other.unlock(contender)
    bench.wait_request(request_id, "fulfilled")


def test_request_is_not_reset_together_with_a_node_that_is_known_to_be_locked(
    bench: LauncherBench, other: OtherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=1000)
    request_id = bench.submit("fake-label", state="testing")  # a state that no launcher touches
    node = bench.ready_node("fake-provider", "main", "fake-label", allocated_to=request_id)
    other.lock(f"{NODES}{node.id}/lock")
    wait_for(lambda: pool.zk.node_tree.is_locked(node.id))
    late = other.before(sets(REQUESTS, state="requested"), lambda _path: None)
    other.write(REQUESTS + request_id, state="pending")
    wait_for(lambda: pool.zk.request_tree.pending)
    pool.cleanup.lost.run(True)
    bench.wait_request(request_id, "fulfilled")
    assert late.outcome == [None], "refused for a lock that was known"
    assert bench.node(node.id).allocated_to == request_id


@pytest.mark.parametrize(
    "labels", [("fake-label", "fake-label"), ("unknown",)], ids=["by a pool", "by nobody's label"]
)
def test_request_that_another_launcher_has_fulfilled_is_not_declined(
    bench: LauncherBench, other: OtherClient, labels: tuple[str, ...]
) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    late = other.before(
        sets(REQUESTS, state="failed"),
        lambda path: other.write(path, state="fulfilled", nodes=["0000009999"]),
    )
    request_id = bench.submit(*labels)
    assert late.refused() == REQUESTS + request_id
    wait_for(lambda: request_id not in pool.state.handlers)
    bench.fulfilled("fake-label")  # the launcher has dealt with what came after it
    record = bench.zuul.request(request_id)
    assert (record["state"], record["nodes"], record.get("declined_by", [])) == (
        "fulfilled",
        ["0000009999"],
        [],
    )


def test_request_that_changes_again_and_again_goes_back_to_the_queue(
    bench: LauncherBench, other: OtherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()))
    submit, fits = pool.zk.writer.submit, sets(REQUESTS, state="pending")
    attempts: list[object] = []
    ended = count_calls(PoolWorker, "ended", monkeypatch)

    def interfere(txn: Any, callback: Any = None) -> None:
        path = fits(txn)
        if path is not None and not ended:
            attempts.append(path)
            other.write(path, relative_priority=len(attempts))
        submit(txn, callback)

    monkeypatch.setattr(pool.zk.writer, "submit", interfere)
    request_id = bench.submit("fake-label")
    bench.wait_request(request_id, "fulfilled")
    assert [outcome.how for _worker, _handler, outcome in ended][:1] == [How.RETURNED]
    assert len(attempts) == CONFLICT_RETRIES + 1


def test_pool_that_gives_way_does_not_accept_the_request_first(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        TestHandler, "hasRemainingQuota", lambda handler, _label: handler.provider.name != "full"
    )
    monkeypatch.setattr(
        PoolWorker, "load", property(lambda worker: worker.provider_name != "full")
    )  # full is asked first
    pools = [{"name": "main", "labels": ["test-label"]}]
    providers = [{"name": name, "driver": "test", "pools": pools} for name in ("full", "empty")]
    pool = bench.start({"labels": [{"name": "test-label"}], "providers": providers})
    paused = count_calls(Life, "pause", monkeypatch)
    offered = count_calls(pool.getPoolWorkers("full")[0], "offer", monkeypatch)
    _request, (node,) = bench.fulfilled("test-label")
    assert offered and node.provider == "empty"
    assert not any(value for life, value in paused if life.handler.provider.name == "full")


def test_request_that_waits_for_its_turn_is_withdrawn_when_the_pool_pauses_meanwhile(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, may_look, looking = {"nodes": 1}, threading.Event(), threading.Event()

    def has_room(handler: Any, _label: str) -> bool:
        looking.set()
        assert may_look.wait(20)
        return len([n for n in handler.zk.nodeIterator() if n.provider == "tp"]) < room["nodes"]

    monkeypatch.setattr(TestHandler, "hasRemainingQuota", has_room)
    pools = [{"name": "main", "labels": ["test-label"]}]
    pool = bench.start(
        {
            "labels": [{"name": "test-label"}],
            "providers": [{"name": "tp", "driver": "test", "pools": pools}],
        }
    )
    first = bench.submit("test-label", "test-label")
    assert looking.wait(10)
    second = bench.submit("test-label")
    wait_for(
        lambda: pool.getPoolWorkers("tp")[0].capacity.queue,
        what="the second request waits for its turn",
    )
    may_look.set()
    bench.wait_request(first, "pending")
    wait_for(lambda: second not in pool.state.handlers, what="the second request is given up")
    assert bench.zuul.request(second)["state"] == "requested"
    room["nodes"] = 9
    for worker in pool.state.workers.values():
        worker.capacity_changed()
    bench.wait_request(first, "fulfilled")
    bench.wait_request(second, "fulfilled")


def test_request_that_the_pool_declines_is_not_moved_to_it(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 2})))
    bench.fulfilled("fake-label", "fake-label")
    waiting = bench.submit("fake-label", "fake-label")
    bench.wait_request(waiting, "pending")
    handler = wait_for(lambda: pool.state.handlers.get(waiting))
    bench.zuul.cancel(waiting)
    wait_for(lambda: handler.done)
    for node in bench.nodes():
        bench.zuul.write_node(node.id, state="used", allocated_to=None)
    bench.wait_nodes(0)
    wait_for(handler.could_serve)
    monkeypatch.setattr(handler, "decline_reasons", lambda: ["it cannot"])
    assert not handler.could_serve()


@pytest.mark.parametrize("accepted", [True, False])
def test_only_accepted_requests_are_overtaken(accepted: bool) -> None:
    handler: Any = SimpleNamespace(accepted=accepted, paused=True, nodeset=[])
    assert NodeRequestHandler.holds_nothing.fget(handler) is accepted  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "urgency, holds_nothing, blocked", [("1", True, False), ("2", True, True), ("1", False, True)]
)
def test_paused_pool_accepts_only_what_may_overtake(
    urgency: str, holds_nothing: bool, blocked: bool
) -> None:
    waiting = SimpleNamespace(request=NodeRequest("200-0000000001"), holds_nothing=holds_nothing)
    pool: Any = SimpleNamespace(label="pool", paused_handlers={waiting.request: waiting}.values())
    coming: Any = SimpleNamespace(request=NodeRequest(f"{urgency}00-0000000002"))
    assert PoolCapacity(pool).blocks(coming) is blocked


@pytest.mark.parametrize("accepted, done", [(True, False), (False, False), (True, True)])
def test_only_accepted_requests_are_moved(
    monkeypatch: pytest.MonkeyPatch, accepted: bool, done: bool
) -> None:
    handler = SimpleNamespace(
        accepted=accepted, done=done, request=SimpleNamespace(priority=(0, 0))
    )
    state: Any = SimpleNamespace(
        workers={"p": SimpleNamespace(paused_handlers={1: handler}.values())},
        zk=SimpleNamespace(getRegisteredPools=list),
    )
    moves = Moves(state, lambda _id: 0, lambda _id: None)
    looked: list[Any] = []
    monkeypatch.setattr(moves, "_check_pools", lambda handler, *_: looked.append(handler))
    moves.check()
    assert looked == ([handler] if accepted and not done else [])


def life(state: State = State.OFFERED) -> Any:
    handler = Mock(launcher_id="me", nodeset=[], homeless=False, accepted=False, paused=False)
    handler.request, handler.pw.nodepool.decline.return_value = NodeRequest("200-0000000001"), None
    made = handler.life = Life(handler, LabelRecorder())
    made.state = state
    return made


def test_trouble_with_zookeeper_declines_nothing() -> None:
    without_zookeeper, wrong = life(), life()
    without_zookeeper.handler.refresh.side_effect = ConnectionLoss()
    without_zookeeper.happen(Event.RUN)
    (_handler, outcome), _options = without_zookeeper.handler.pw.ended.call_args
    assert outcome.how is How.DROPPED and not without_zookeeper.handler.pw.nodepool.decline.called
    wrong.handler.refresh.side_effect = RuntimeError("the driver is wrong")
    wrong.happen(Event.RUN)
    assert wrong.handler.pw.nodepool.decline.called and not wrong.handler.pw.ended.called


def test_launches_of_a_dropped_request_end_and_those_of_others_do_not() -> None:
    dropped, removed = life(), life()
    dropped.end(Outcome(How.DROPPED))
    removed.end(Outcome(How.REMOVED))
    dropped.handler.launchesDropped.assert_called_once_with()
    assert not removed.handler.launchesDropped.called


def test_locks_that_a_handler_obtains_after_its_end_are_released() -> None:
    dropped, lock, step = (
        life(),
        f"{NODES}0000000001/lock/{'a' * 32}__lock__0000000000",
        Mock(return_value=None),
    )
    dropped.end(Outcome(How.DROPPED))
    dropped._life = Mock(send=step)
    dropped.answered([f"{NODES}0000000001", lock, object()], None)
    dropped.handler.zk.kazoo_client.abandoned.add.assert_called_once_with(lock)
    ((results, error),), _options = step.call_args
    assert results is None and isinstance(error, SessionExpiredError)


@pytest.mark.parametrize("admitted", [True, False])
def test_request_is_declined_only_in_states_that_admit_it(admitted: bool) -> None:
    handler: Any = life(State.LAUNCHING if admitted else State.FREEING).handler
    NodeRequestHandler.declineRequest(handler)
    assert handler.pw.nodepool.decline.called == handler.pw.capacity.end_creation.called == admitted


def test_turn_goes_to_the_next_request_immediately_when_one_is_returned() -> None:
    returned = life()
    returned.happen(Event.HAND_BACK, End(Outcome(How.RETURNED)))
    assert returned.handler.pw.capacity.end_creation.called


# -- min-ready


def test_min_ready_node_is_not_freed_while_it_is_locked(
    bench: LauncherBench, other: OtherClient
) -> None:
    contenders: list[str] = []

    def lock(path: str) -> None:
        contenders.append(other.lock(f"{path}/lock"))

    late = other.before(sets(NODES, state="ready", allocated_to=None), lock)
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    path = late.refused()
    node_id = path.removesuffix("/lock").removeprefix(NODES)
    assert path == f"{NODES}{node_id}/lock" and bench.node(node_id).allocated_to is not None
    other.unlock(*contenders)
    wait_for(lambda: bench.node(node_id).allocated_to is None)


def test_node_that_is_still_launched_for_a_deleted_min_ready_request_counts(
    bench: LauncherBench, other: OtherClient
) -> None:
    made_for = {"allocated_to": "100-0000009999", "requestor": MIN_READY}
    node = bench.ready_node("fake-provider", "main", "fake-label", state="hold", **made_for)
    contender = other.lock(f"{NODES}{node.id}/lock")
    other.write(NODES + node.id, state="building")
    options = {
        "fake-label": {"min-ready": 1},
        "zz-other": {"min-ready": 1},
    }  # labels are checked in this order
    bench.start(config(provider(labels=list(options)), labels=options))
    bench.wait_nodes(1, state="ready", type=["zz-other"])
    assert [node.id for node in bench.nodes(type=["fake-label"])] == [node.id]
    assert not [r for r in bench.zk.nodeRequestIterator() if r.node_types == ["fake-label"]]
    other.unlock(contender)
    bench.wait_nodes(1, state="ready", type=["fake-label"])


def test_requests_of_others_do_not_wake_min_ready(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    woken = count_calls(pool.min_ready, "wake", monkeypatch)
    request_id = bench.submit("unknown")
    bench.wait_request(request_id, "failed")
    bench.zuul.cancel(request_id)
    wait_for(lambda: pool.zk.request_tree.get(request_id) is None)
    assert woken == []


# -- the clean-up


def test_two_searches_for_leaks_of_one_provider_never_run_concurrently(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(
        config(provider(), provider("fake-other", labels=["other"])), cleanup_interval=1000
    )
    running: Counter[str] = Counter()
    may_end, most = threading.Event(), Counter[str]()

    def search(name: str) -> Callable[[], None]:
        def run() -> None:
            running[name] += 1
            most[name] = max(most[name], running[name])
            assert may_end.wait(20)
            running[name] -= 1

        return run

    for name, manager in pool.config.provider_managers.items():
        search_ended = pool.cleanup._of_providers.get(f"Thread-leaks-{name}")
        assert search_ended is None or wait([search_ended], 20).done
        monkeypatch.setattr(manager, "cleanupLeakedResources", search(name))
    for _ in range(3):
        pool.cleanup._leaks()
    wait_for(lambda: sum(running.values()) == 2)
    may_end.set()
    wait_for(lambda: not any(running.values()))
    assert most == {"fake-provider": 1, "fake-other": 1}


def test_clean_up_that_is_woken_checks_all_lost_requests(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=1000)
    looked = count_calls(pool.cleanup.lost, "run", monkeypatch)
    pool.cleanup.wake()
    wait_for(lambda: (True,) in looked)


def test_wake_up_of_the_clean_up_does_not_check_everything(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=1000)
    wait_for(lambda: pool.cleanup._last_full > 0)
    looked, full = (
        count_calls(pool.cleanup.lost, "run", monkeypatch),
        count_calls(pool.cleanup, "_sweep_request_locks", monkeypatch),
    )
    pool.cleanup.lost.check_soon("100-0000000000")
    wait_for(lambda: looked)
    pool.cleanup.lost.check_soon("100-0000000000")
    wait_for(lambda: len(looked) > 1)
    assert full == []


def test_lock_of_a_deleted_node_wakes_nobody(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()))
    looked, capacity = (
        count_calls(pool.node_reconciler, "check_soon", monkeypatch),
        count_calls(pool.events, "_capacity", monkeypatch),
    )
    pool.events._node_lock_changed("0000009999", False)
    assert looked == [] and capacity == []


def test_deletion_is_not_tried_again_before_its_time(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()), delete_interval=1000.0)
    manager = pool.getProviderManager("fake-provider")
    began: list[str] = []

    def fail(_handler: Any, node: Any) -> Any:
        began.append(node.id)
        raise RuntimeError("the cloud refuses")

    monkeypatch.setattr(manager, "startNodeCleanup", lambda node: fail(None, node))
    node = bench.ready_node(
        "fake-provider", "main", "fake-label", state="used", external_id="there"
    )
    wait_for(lambda: began)
    wait_for(lambda: pool.node_reconciler._attempts.get(node.id, (0, 0))[1] == 1)
    state = bench.node(node.id)
    assert pool.node_reconciler._delete(state) > 900
    assert began == [node.id]


def test_node_of_a_provider_that_is_not_configured_is_not_touched(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=1000)
    looked = count_calls(pool.node_reconciler, "_delete", monkeypatch)
    node = bench.ready_node("another", "main", "fake-label", state="used")
    wait_for(lambda: pool.zk.getCachedNode(node.id))
    pool.node_reconciler.reconcile(node.id)
    pool.node_reconciler._delete(bench.node(node.id))
    assert looked and bench.node(node.id).state == "used" and bench.zuul.contenders(node.id) == []


@pytest.mark.parametrize("state", ["used", "init"])
def test_nothing_is_written_for_a_node_that_is_known_to_be_locked(
    bench: LauncherBench, other: OtherClient, state: str
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=1000)
    node = bench.ready_node("fake-provider", "main", "fake-label", state="hold")
    contender = other.lock(f"{NODES}{node.id}/lock")
    wait_for(lambda: pool.zk.node_tree.is_locked(node.id))
    sent: list[str] = []
    other.before(sets(NODES, state="deleting"), sent.append)
    other.write(NODES + node.id, state=state)
    wait_for(
        lambda: (
            pool.zk.node_tree.get(node.id).state == state
            and not pool.zk.node_tree.is_changing(node.id)
        )
    )
    assert pool.node_reconciler.reconcile(node.id) is None
    assert not sent
    other.unlock(contender)
    bench.wait_gone(node.id)


def test_record_of_a_deleted_node_is_removed_without_its_provider(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()))
    asked = count_calls(pool.getProviderManager("fake-provider"), "startNodeCleanup", monkeypatch)
    node = bench.ready_node("fake-provider", "main", "fake-label", state="deleted")
    bench.wait_gone(node.id)
    assert asked == []


@pytest.mark.parametrize(
    "name", ["assignment", "min_ready", "cleanup", "statistics", "node_reconciler", "probes"]
)
def test_part_that_waits_for_events_ends_when_it_is_stopped(
    bench: LauncherBench, name: str
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=1000, delete_interval=1000)
    part = getattr(pool, name)
    part.stop()
    for thread in getattr(part, "threads", [part]):
        thread.join(10)
        assert not thread.is_alive(), thread.name

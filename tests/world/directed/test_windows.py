"""Moments at which a pool comes, goes or changes while requests are in its hands: nothing is
lost, nothing fails.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from typing import Any

import pytest
from kazoo.exceptions import BadVersionError, SessionExpiredError

from nodepool.driver.request.life import Life
from nodepool.driver.request.state import Event
from nodepool.driver.statemachine.handler import StateMachineHandler
from nodepool.driver.statemachine.launcher import StateMachineNodeLauncher
from nodepool.driver.statemachine.loop import LoopEnded
from nodepool.launcher.requests.declining import decline_for_all
from nodepool.zk import paths
from nodepool.zk.writer import TransactionFailed
from tests.conftest import wait_for
from tests.support.calls import count_calls
from tests.support.launcher import LauncherBench, config, expire_session, provider, reason_for

ONE = {"max-servers": 1}


def rename(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, inside: Any) -> None:
    """fake-a becomes fake-b; ``inside`` runs when the new configuration is in force and the
    pools do not know it yet.
    """
    (pool,) = bench.pools
    update, done = pool._update_workers, threading.Event()

    def slowly() -> None:
        if "fake-b" in pool.config.providers and not done.is_set():
            inside(pool)
            done.set()
        update()

    monkeypatch.setattr(pool, "_update_workers", slowly)
    bench.config(config(provider("fake-b", pool={"max-servers": 3})))
    assert done.wait(20)


@pytest.mark.spec(
    "issue 11, B1: a capacity event while the provider of a waiting request is renamed fails no "
    "request"
)
def test_a_capacity_event_during_a_rename(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider("fake-a", pool=ONE)))
    bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    (worker,) = pool.getPoolWorkers("fake-a")
    wait_for(lambda: worker.paused_handlers)

    def inside(_pool: Any) -> None:
        worker.capacity_changed()
        wait_for(lambda: not worker.paused_handlers, what="the handler has tried again")

    rename(bench, monkeypatch, inside)
    record = bench.wait_request(waiting, "fulfilled")
    assert record["declined_by"] == [] and bench.node(record["nodes"][0]).provider == "fake-b"


def test_end_of_old_launches_leaves_the_claim_of_the_next_pool(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider("fake-a"), provider("fake-b", priority=200)))
    (old,), (new,) = pool.getPoolWorkers("fake-a"), pool.getPoolWorkers("fake-b")
    offers: list[str] = []
    real, go_on = new._consider, threading.Event()

    def slowly(request_id: str, *args: Any) -> None:
        offers.append(request_id)
        assert go_on.wait(20)
        real(request_id, *args)

    monkeypatch.setattr(new, "_consider", slowly)
    launch, launchers = StateMachineNodeLauncher.launch, list[Any]()
    monkeypatch.setattr(
        StateMachineNodeLauncher, "launch", lambda launcher: launchers.append(launcher)
    )
    request_id = bench.submit("fake-label")
    wait_for(lambda: launchers)
    monkeypatch.setattr(StateMachineNodeLauncher, "launch", launch)
    handler = pool.state.handlers.get(request_id)
    old.running = False  # closed, as when it goes away
    old.post(handler, handler.hand_back)
    wait_for(lambda: offers, what="the offer to the next pool")
    handler.nodeset[0].state = "failed"
    monkeypatch.setattr(handler, "launchesComplete", lambda: True)
    old.progress(handler)
    wait_for(lambda: handler.done, what="the end of the old launch")
    assert pool.assignment.queue.claims[request_id].holder == new.launcher_id
    pool.assignment.wake()
    go_on.set()
    record = bench.wait_request(request_id, "fulfilled")
    assert bench.node(record["nodes"][0]).provider == "fake-b" and offers == [request_id]


def test_request_written_by_another_client_is_returned_not_declined(bench: LauncherBench) -> None:
    bench.start(config(provider("fake-a", pool=ONE)))
    bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    path, record = f"/nodepool/requests/{waiting}", bench.zuul.request(waiting)
    bench.zuul.client.set(path, json.dumps({**record, "relative_priority": 7}).encode())
    bench.config(config(provider("fake-b")))
    served = bench.wait_request(waiting, "fulfilled")
    assert served["declined_by"] == [] and served["relative_priority"] == 7


@pytest.mark.spec(
    "issue 11, B1: nor does a launch that its provider, just renamed, does not begin any more"
)
def test_a_launch_during_a_rename(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = bench.start(config(provider("fake-a")))
    launching, original = threading.Event(), StateMachineNodeLauncher.launch

    def launch(launcher: Any) -> None:
        if launcher.provider_config.name == "fake-a":
            launching.set()
            wait_for(lambda: "fake-a" not in pool.config.providers)
            raise LoopEnded
        original(launcher)

    monkeypatch.setattr(StateMachineNodeLauncher, "launch", launch)
    request_id = bench.submit("fake-label")
    assert launching.wait(10)
    rename(bench, monkeypatch, lambda _pool: None)
    record = bench.wait_request(request_id, "fulfilled")
    assert record["declined_by"] == [] and bench.node(record["nodes"][0]).provider == "fake-b"


@pytest.mark.spec(
    "issue 11, B1: nor the first look at a request whose pool, or its manager, has gone meanwhile"
)
@pytest.mark.parametrize("tenant", [None, "t"])
def test_the_first_read_during_a_rename(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, tenant: str | None
) -> None:
    limits = {"tenant-resource-limits": [{"tenant-name": "t", "max-servers": 5}]}
    pool = bench.start(config(provider("fake-a"), **limits))
    (worker,) = pool.getPoolWorkers("fake-a")
    looking, run = threading.Event(), StateMachineHandler.run

    def slow(handler: StateMachineHandler) -> None:
        if handler.pw is worker:
            looking.set()
            wait_for(lambda: "fake-a" not in pool.config.providers)
        run(handler)

    monkeypatch.setattr(StateMachineHandler, "run", slow)
    request_id = bench.submit("fake-label", tenant_name=tenant)
    assert looking.wait(10)
    rename(bench, monkeypatch, lambda _pool: wait_for(lambda: not worker.request_handlers))
    assert bench.wait_request(request_id, "fulfilled")["declined_by"] == []


@pytest.mark.spec(
    "issue 11, C1: the list of pools cannot be had while a request is declined: tried again, not "
    "forgotten"
)
def test_a_decline_that_fails(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.start(config(provider()))
    raised: list[int] = []

    def decline(*args: Any) -> None:
        if not raised:
            raised.append(1)
            raise ConnectionError("induced")
        decline_for_all(*args)

    monkeypatch.setattr("nodepool.launcher.requests.assignment.decline_for_all", decline)
    bench.wait_request(bench.submit("nobody-has-it"), "failed")
    assert raised


@pytest.mark.spec("issue 11, C2: a provider that changes its driver under the same name")
def test_a_static_provider_becomes_a_cloud(bench: LauncherBench) -> None:
    labels = [{"name": "fake-label"}, {"name": "other"}]
    host = {
        "name": "p",
        "driver": "static",
        "pools": [
            {
                "name": "main",
                "nodes": [
                    {
                        "name": "fake-host-1",
                        "labels": "fake-label",
                        "host-key-checking": False,
                        "connection-type": "winrm",
                    }
                ],
            }
        ],
    }
    pool = bench.start({"labels": labels, "providers": [host]})
    bench.wait_nodes(1, state="ready")
    bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    wait_for(lambda: "no free node" in reason_for(pool.assignment, waiting))
    cloud = {**provider("p"), "driver": "fake"}
    bench.config({"labels": labels, "providers": [cloud]})
    bench.wait_request(waiting, "fulfilled")


@pytest.mark.spec(
    "issue 11, C4: a handler that is to be handed back waits for the answer of ZooKeeper; it does "
    "not spin"
)
def test_handing_back_does_not_spin(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = bench.start(config(provider("fake-a"), provider("fake-b", priority=200)))
    (worker,) = pool.getPoolWorkers("fake-a")
    events = count_calls(Life, "happen", monkeypatch)

    def hand_backs() -> int:
        return sum(event is Event.HAND_BACK for _life, event, *_end in events)

    held: list[Any] = []
    submit = pool.zk.writer.submit
    monkeypatch.setattr(pool.zk.writer, "submit", lambda *args: held.append(args))
    request_id = bench.submit("fake-label")
    wait_for(lambda: held)
    bench.config(config(provider("fake-b", priority=200)))
    wait_for(lambda: not pool.getPoolWorkers("fake-a"))
    wait_for(hand_backs)
    passed = threading.Event()
    worker._tasks.put((passed.set, ()))
    assert passed.wait(10) and hand_backs() == 1
    monkeypatch.setattr(pool.zk.writer, "submit", submit)
    for args in held:
        submit(*args)
    assert bench.node(bench.wait_request(request_id, "fulfilled")["nodes"][0]).provider == "fake-b"
    assert hand_backs() <= 2


@pytest.mark.spec(
    "issue 11, C8: a request that is offered to a pool that has just ended goes back to the queue"
)
@pytest.mark.parametrize("late", [False, True])
def test_an_offer_to_a_pool_that_has_ended(bench: LauncherBench, late: bool) -> None:
    pool = bench.start(config(provider("fake-a"), provider("fake-b", labels=["other"])))
    (worker,) = pool.getPoolWorkers("fake-a")
    released: list[str] = []
    release = pool.assignment.release
    pool.assignment.release = lambda request_id, *args, **options: (
        released.append(request_id),  # type: ignore[func-returns-value]
        release(request_id, *args, **options),
    )[1]
    if late:  # in the queue when its thread ends
        worker.running = False
        worker._tasks.put(None)
        worker.offer("200-0000000009", False)
    bench.config(config(provider("fake-b", labels=["other"])))
    wait_for(lambda: not worker.is_alive())
    if not late:
        worker.offer("200-0000000009", False)
    assert released == ["200-0000000009"] and not worker.backlog.ids


def dropped_with_an_answer_to_come(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, str, Any]:
    """A classic handler whose session was lost while it waited for ZooKeeper: it, its request,
    what takes the answer.
    """
    pool = bench.start(
        {
            "labels": [{"name": "test-label"}],
            "providers": [
                {
                    "name": "tp",
                    "driver": "test",
                    "pools": [{"name": "main", "labels": ["test-label"]}],
                }
            ],
        }
    )
    held: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(pool.zk.writer, "submit", lambda *args: held.append(args))
        request_id = bench.submit("test-label")
        handler = wait_for(lambda: pool.state.handlers.get(request_id) if held else None)
        expire_session(pool)
        wait_for(lambda: request_id not in pool.state.handlers)
    ((_txn, answered),) = held
    return handler, request_id, answered


@pytest.mark.spec(
    "issue 11, C10: what is kept for a handler goes with it, also when an answer comes after its "
    "end"
)
def test_nothing_is_kept_for_a_handler_that_has_ended(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, request_id, answered = dropped_with_an_answer_to_come(bench, monkeypatch)
    kept = weakref.ref(handler)
    answered(None, SessionExpiredError())
    del handler, answered
    bench.wait_request(request_id, "fulfilled")

    def gone() -> bool:
        gc.collect()
        return kept() is None

    wait_for(gone, what="nobody knows the handler any more")


@pytest.mark.spec(
    "issue 11, C10: an answer that comes after the end of a handler takes the request from nobody "
    "else"
)
def test_a_late_answer(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, request_id, answered = dropped_with_an_answer_to_come(bench, monkeypatch)
    finished: list[Any] = []
    bench.wait_request(request_id, "fulfilled")
    wait_for(
        lambda: request_id not in bench.pools[0].state.handlers,
        what="the end of the handler that has served it",
    )
    monkeypatch.setattr(handler.pw, "ended", lambda *args, **_options: finished.append(args))
    answered(None, TransactionFailed(0, BadVersionError(), paths.request(request_id)))
    passed = threading.Event()
    handler.pw.post(handler, passed.set)
    assert passed.wait(10) and not finished

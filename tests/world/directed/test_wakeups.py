"""Whoever waits is woken by what it waits for, not by the clock (see the fixture ``no_resync``)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nodepool.zk.components import PoolComponent
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider, reason_for


class Slow:
    """New servers of the fake cloud come up when they are let go."""

    def __init__(self, bench: LauncherBench) -> None:
        self.cloud = bench.cloud("fake-provider")
        self.cloud.pause_creates = True

    def started(self, count: int) -> None:
        wait_for(lambda: len(self.cloud._server_list) == count)

    def finish(self, *which: int) -> None:
        for number in which:
            self.cloud._server_list[number].event.set()

    def stop(self) -> None:
        self.cloud.pause_creates = False
        self.finish(*range(len(self.cloud._server_list)))


@pytest.mark.spec(
    "issue 11, B4: max-concurrency: each launch that ends makes room, not only the last one of a "
    "request"
)
def test_one_of_several_launches_ends(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(**{"max-concurrency": 2})))
    slow = Slow(bench)
    first = bench.submit("fake-label", "fake-label")
    slow.started(2)
    second = bench.submit("fake-label")
    wait_for(lambda: "max-concurrency reached: 2 launches" in reason_for(pool.assignment, second))
    slow.finish(0)
    wait_for(lambda: second in pool.state.handlers, 10, "taken when one launch has ended")
    assert bench.zuul.request(first)["state"] == "pending"
    slow.stop()
    for request_id in (first, second):
        bench.wait_request(request_id, "fulfilled")


@pytest.mark.spec(
    "issue 11, B4: what a tenant was promised for a request that is given back goes to its other "
    "requests"
)
def test_a_promise_that_comes_back(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    from nodepool.driver.statemachine.handler import StateMachineHandler

    pool = bench.start(
        config(
            provider("fake-one", labels=["one"]),
            provider("fake-two", labels=["two"]),
            **{"tenant-resource-limits": [{"tenant-name": "t", "max-servers": 1}]},
        )
    )
    looking, go_on = threading.Event(), threading.Event()
    look = StateMachineHandler.getDeclinedReasons

    def slow(handler: Any) -> list[str]:
        if handler.request.node_types == ["one"] and not go_on.is_set():
            looking.set()
            assert go_on.wait(20)
            raise_later()
        return look(handler)

    def raise_later() -> None:
        from nodepool.driver.quota.support import LimitsPending

        raise LimitsPending(
            "induced"
        )  # not taken after all, for a reason that has nothing to do with the tenant

    monkeypatch.setattr(StateMachineHandler, "getDeclinedReasons", slow)
    manager = pool.getProviderManager("fake-one")
    woken: list[Any] = []
    monkeypatch.setattr(manager, "when_limits_known", woken.append)
    first = bench.submit("one", tenant_name="t", priority="100")
    assert looking.wait(10)
    second = bench.submit("two", tenant_name="t")
    wait_for(lambda: "tenant t is limited" in reason_for(pool.assignment, second))
    go_on.set()
    bench.wait_request(second, "fulfilled", timeout=10)
    assert woken and bench.zuul.request(first)["state"] == "requested"
    bench.use_up(second)
    bench.wait_request(first, "fulfilled")


def test_request_whose_wake_up_is_lost_is_served_after_the_periodic_comparison(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.launcher.requests.assignment.RESYNC", 30.0)
    pool = bench.start(config(provider(**{"max-concurrency": 1})))
    slow = Slow(bench)
    first = bench.submit("fake-label")
    slow.started(1)
    second = bench.submit("fake-label")
    wait_for(lambda: "max-concurrency reached: 1 launches" in reason_for(pool.assignment, second))
    for event in ("wake", "recheck"):
        monkeypatch.setattr(pool.assignment, event, lambda *_args, **_options: None)
    slow.stop()
    bench.wait_request(first, "fulfilled")
    bench.wait_request(second, "fulfilled", timeout=60)


@pytest.mark.spec(
    "issue 11, B4: nodes that were counted twice for a moment, as promised and as there, keep "
    "nobody waiting"
)
def test_a_node_that_was_counted_twice(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(
        config(provider(), **{"tenant-resource-limits": [{"tenant-name": "t", "max-servers": 2}]})
    )
    slow = Slow(bench)
    (worker,) = pool.state.workers.values()
    recorded, held = worker.capacity.recorded, []  # type: ignore[var-annotated]
    monkeypatch.setattr(
        worker.capacity, "recorded", lambda *args: recorded(*args) if held else held.append(args)
    )
    first = bench.submit("fake-label", tenant_name="t")
    slow.started(1)
    assert held, "a record is in the mirror, and its promise still counts"
    second = bench.submit("fake-label", tenant_name="t")
    wait_for(lambda: "tenant t is limited" in reason_for(pool.assignment, second))
    worker._tasks.put((recorded, held[0]))
    wait_for(lambda: second in pool.state.handlers, 10, "taken although the first launch goes on")
    slow.stop()
    bench.wait_request(second, "fulfilled")
    bench.wait_request(first, "fulfilled")


def test_full_pool_of_another_launcher_changes_no_decline(bench: LauncherBench) -> None:
    pool = bench.start(config(provider()))
    theirs = PoolComponent(bench.zk.client, "elsewhere")
    theirs.content.update(
        id="theirs", name="main", provider_name="p", state="running", supported_labels=["other"]
    )
    theirs.register()

    def seen() -> Any:
        return next((p for p in pool.zk.getRegisteredPools() if p.id == "theirs"), None)

    wait_for(seen)
    changes = pool.assignment.queue.changes
    wait_for(lambda: changes.declines > 0)
    for change, again in (
        ({"paused": True}, False),
        ({"full_labels": ["other"]}, False),
        ({"paused": False}, False),
        ({"priority": 5}, True),
        ({"supported_labels": ["other", "more"]}, True),
    ):
        before, woken = changes.declines, changes.moment
        theirs.update(**change)
        wait_for(lambda woken=woken: changes.moment > woken, what=f"the wake-up by {change}")  # type: ignore[misc]
        assert (changes.declines > before) == again, change
    before = changes.declines
    theirs.unregister()
    wait_for(lambda: changes.declines > before, what="declines checked again")

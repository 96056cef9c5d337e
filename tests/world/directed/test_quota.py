"""Pool and provider limits: pause, continue node by node, decline what never fits (LAU-8)."""

from __future__ import annotations

import json
import math
import threading
import time
from typing import Any

import pytest

from nodepool.base.backoff import Backoff
from nodepool.driver.request.state import State
from nodepool.launcher.pools.capacity import PoolCapacity
from nodepool.launcher.pools.worker import PoolWorker
from nodepool.reasons import render
from tests.conftest import wait_for
from tests.support.interference import NODES, sets
from tests.support.launcher import LauncherBench, config, provider, reason_for

# The fake cloud makes SDK exceptions in a way that SDK 5 will not know any more.
pytestmark = pytest.mark.filterwarnings("ignore:The 'http_status' parameter")

VOLUME = {"boot-from-volume": True, "volume-size": 40}


def two_then_two(bench: LauncherBench, pool: Any) -> None:
    """Two nodes fit: the second two-node request pauses, then gets one node per node freed."""
    worker = pool.getPoolWorkers("fake-provider")[0]
    first = bench.submit("fake-label", "fake-label")
    nodes = bench.wait_request(first, "fulfilled")["nodes"]
    second = bench.submit("fake-label", "fake-label")
    bench.wait_request(second, "pending")
    wait_for(lambda: worker.paused_handlers, what="a paused handler")
    assert len(bench.servers("fake-provider")) == 2
    wait_for(lambda: any(p.paused for p in bench.zk.getRegisteredPools()), what="paused published")
    bench.zuul.accept(first)
    bench.zuul.give_back(nodes[0])
    bench.wait_gone(nodes[0])
    bench.wait_nodes(1, allocated_to=second)
    bench.wait_nodes(1, allocated_to=second, state="ready")
    assert bench.zuul.request(second)["state"] == "pending"
    assert len(bench.servers("fake-provider")) == 2
    bench.zuul.give_back(nodes[1])
    request = bench.wait_request(second, "fulfilled")
    assert len(set(request["nodes"])) == 2
    bench.wait_gone(*nodes)
    assert len(bench.servers("fake-provider")) == 2
    wait_for(lambda: not worker.paused_handlers)
    wait_for(
        lambda: not any(p.paused for p in bench.zk.getRegisteredPools()), what="unpaused published"
    )
    bench.use_up(second)


@pytest.mark.spec("LAU-21.3, LAU-21.4, LAU-21.5, LAU-21.6, LAU-21.7; OST-3.11")
@pytest.mark.parametrize(
    ("limit", "label"),
    [
        ({"max-cores": 8}, {}),
        ({"max-servers": 2}, {}),
        ({"max-ram": 16384}, {}),
        ({"max-volumes": 2}, VOLUME),
        ({"max-volume-gb": 80}, VOLUME),
    ],
)
def test_request_waits_for_limits_of_the_pool(
    bench: LauncherBench, limit: dict[str, int], label: dict[str, Any]
) -> None:
    two_then_two(bench, bench.start(config(provider(pool=limit, label=label))))


@pytest.mark.spec("LAU-21.14, LAU-21.15, LAU-21.16, LAU-21.17, LAU-21.18; OST-3.12")
@pytest.mark.parametrize(
    ("limits", "label"),
    [
        ({"cores": 8}, {}),
        ({"instances": 2}, {}),
        ({"ram": 16384}, {}),
        ({"volumes": 2}, VOLUME),
        ({"gigabytes": 80}, VOLUME),
    ],
)
def test_request_waits_for_limits_of_the_cloud(
    bench: LauncherBench, limits: dict[str, float], label: dict[str, Any]
) -> None:
    bench.quota(**limits)
    two_then_two(bench, bench.start(config(provider(label=label))))


@pytest.mark.spec("LAU-21.14: no limit; OST-3.12")
@pytest.mark.parametrize("unlimited", [-1, math.inf])
def test_cloud_without_limits_serves_all(bench: LauncherBench, unlimited: float) -> None:
    bench.quota(
        cores=unlimited, instances=-1, ram=unlimited, volumes=unlimited, gigabytes=unlimited
    )
    bench.start(config(provider(label=VOLUME)))
    bench.fulfilled(*["fake-label"] * 6)


@pytest.mark.spec("LAU-21.19; DRV-14.14")
def test_decline_at_quota(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 2}), labels={"other-label": {}}))
    bench.fulfilled("fake-label")
    paused = bench.submit("fake-label", "fake-label")
    bench.wait_request(paused, "pending")
    wait_for(lambda: pool.getPoolWorkers("fake-provider")[0].paused_handlers)
    unservable = bench.submit("fake-label", "unknown-label")
    too_big = bench.submit(*["fake-label"] * 3)
    assert bench.wait_request(unservable, "failed")["declined_by"]
    assert bench.wait_request(too_big, "failed")["declined_by"]
    assert bench.zuul.request(paused)["state"] == "pending"


@pytest.mark.spec("LAU-21.20; DRV-14.11; OST-3.14")
@pytest.mark.parametrize("ignore", [False, True])
def test_over_quota_error_pauses_and_is_retried(bench: LauncherBench, ignore: bool) -> None:
    """The cloud refuses although the numbers said it would fit."""
    bench.quota(instances=2)
    pool = bench.start(config(provider(pool={"ignore-provider-quota": ignore})))
    first, _nodes = bench.fulfilled("fake-label")
    bench.quota(instances=1)
    second = bench.submit("fake-label")
    worker = pool.getPoolWorkers("fake-provider")[0]
    wait_for(lambda: worker.paused_handlers, what="a paused handler")
    bench.wait_request(second, "pending")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")
    assert len(bench.servers("fake-provider")) == 1


@pytest.mark.spec(
    "DRV-14.11: the cloud refuses a node for a quota of which it does not tell: paused, retried"
)
def test_a_quota_that_is_not_reported(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a new node each second nor a request that keeps what has failed."""
    monkeypatch.setattr("nodepool.driver.statemachine.stage.REFUSED", Backoff(0.2, 30.0))
    pool = bench.start(config(provider()))
    adapter, tries = bench.adapter("fake-provider"), []
    original = adapter._createServer

    def refuse(*_args: Any, **_options: Any) -> Any:
        tries.append(1)
        raise RuntimeError("Quota exceeded")

    monkeypatch.setattr(adapter, "_createServer", refuse)
    request_id = bench.submit("fake-label")
    worker = pool.getPoolWorkers("fake-provider")[0]
    wait_for(lambda: len(tries) >= 3, what="it is tried again")
    (handler,) = wait_for(lambda: list(worker.paused_handlers), what="a paused handler")
    assert len(handler.launchers) <= 1
    wait_for(
        lambda: "cloud quota exceeded (label fake-label)" in str(handler.shortage),
        what="the reason",
    )
    assert bench.zuul.request(request_id)["state"] == "pending"
    monkeypatch.setattr(adapter, "_createServer", original)
    bench.wait_request(request_id, "fulfilled", timeout=30)
    assert not pool.getProviderManager("fake-provider").refusals.wait("fake-label")


@pytest.mark.spec("DRV-14.11: a refused node of a request that waits for room occupies nothing")
def test_a_refused_node_of_a_request_that_waits_already(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(config(provider(pool={"max-servers": 3})))
    held = bench.ready_node(
        "fake-provider", "main", "fake-label", state="hold", resources={"instances": 1}
    )
    bench.wait_nodes(1)
    adapter, refused = bench.adapter("fake-provider"), []
    original = adapter._createServer

    def refuse_one(*args: Any, **options: Any) -> Any:
        if not refused:
            refused.append(1)
            raise RuntimeError("Quota exceeded")
        return original(*args, **options)

    monkeypatch.setattr(adapter, "_createServer", refuse_one)
    request_id = bench.submit("fake-label", "fake-label", "fake-label")
    bench.wait_nodes(2, state="ready", allocated_to=request_id)
    assert bench.zuul.request(request_id)["state"] == "pending"
    bench.zuul.write_node(held.id, state="used")
    bench.wait_request(request_id, "fulfilled")


@pytest.mark.spec("LAU-21.79; OST-3.15; DRV-14.11: statistics")
def test_a_quota_fault_pauses(
    bench: LauncherBench, statsd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nodepool.driver.fake.adapter import FakeLaunchAndGetFaultCloud
    from nodepool.driver.statemachine import StateMachineProvider

    invalidated: list[str] = []
    original = StateMachineProvider.invalidateQuotaCache
    monkeypatch.setattr(
        StateMachineProvider,
        "invalidateQuotaCache",
        lambda self: (invalidated.append(self.provider.name), original(self))[1],  # type: ignore[func-returns-value]
    )
    bench.use_cloud(FakeLaunchAndGetFaultCloud)
    pool = bench.start(config(provider(**{"launch-retries": 1})))
    request_id = bench.submit("fake-label")
    worker = pool.getPoolWorkers("fake-provider")[0]
    wait_for(lambda: worker.paused_handlers, what="a paused handler")
    record = bench.wait_request(request_id, "pending")
    assert record["declined_by"] == []
    assert invalidated
    statsd.wait("nodepool.launch.error.quota", "1|c")
    statsd.wait("nodepool.launch.provider.fake-provider.error.quota", "1|c")
    bench.zuul.cancel(request_id)
    bench.wait_nodes(0)


@pytest.mark.spec("LAU-21.83")
def test_provider_quota_is_obeyed(bench: LauncherBench) -> None:
    bench.quota(cores=0)
    pool = bench.start(config(provider()))
    request_id = bench.submit("fake-label")
    assert bench.wait_request(request_id, "failed")["declined_by"] == list(pool.state.workers)


@pytest.mark.spec("LAU-21.84; DRV-14.17")
def test_provider_quota_is_ignored_when_configured_so(bench: LauncherBench) -> None:
    bench.quota(cores=0)
    pool = bench.start(config(provider(pool={"ignore-provider-quota": True, "max-servers": 1})))
    first, _nodes = bench.fulfilled("fake-label")
    second = bench.submit("fake-label")
    wait_for(lambda: pool.getPoolWorkers("fake-provider")[0].paused_handlers)
    assert bench.wait_request(second, "pending")["declined_by"] == []
    third = bench.submit("fake-label", "fake-label")
    bench.wait_request(third, "failed")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec("LAU-21.85")
def test_provider_errors_with_ignored_quota(bench: LauncherBench, statsd: Any) -> None:
    bench.quota(instances=0)
    pool = bench.start(config(provider(pool={"ignore-provider-quota": True})))
    request_id = bench.submit("fake-label")
    wait_for(lambda: pool.getPoolWorkers("fake-provider")[0].paused_handlers)
    bench.wait_request(request_id, "pending")
    statsd.wait("nodepool.launch.error.quota", "1|c")
    bench.quota(instances=1)
    assert len(bench.wait_request(request_id, "fulfilled")["nodes"]) == 1
    bench.wait_nodes(1)


@pytest.mark.spec("LAU-21.24; DRV-14.16")
def test_min_ready_requests_never_wait(bench: LauncherBench) -> None:
    bench.start(config(provider(pool={"max-servers": 1})))
    bench.fulfilled("fake-label")
    request_id = bench.submit(
        "fake-label", priority="900", requestor="NodePool:min-ready", reuse=False
    )
    assert len(bench.wait_request(request_id, "failed")["declined_by"]) == 1


@pytest.mark.spec("LAU-21.76; DRV-14.15")
def test_provider_wont_wedge(bench: LauncherBench) -> None:
    """Full of idle nodes of another label: the oldest one goes, and only that."""
    bench.start(config(provider(labels=["fake-label1", "fake-label2"], pool={"max-servers": 2})))
    bench.zuul.cancel(bench.fulfilled("fake-label1", "fake-label1")[0])
    idle = bench.wait_nodes(2, state="ready", allocated_to=None)
    bench.fulfilled("fake-label2")
    left = bench.wait_nodes(1, type=["fake-label1"])
    assert left[0].id in {n.id for n in idle}
    assert left[0].state == "ready"


def test_pool_continues_while_zookeeper_does_not_answer_that_a_node_frees_capacity(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(
        config(provider(labels=["fake-label1", "fake-label2"], pool={"max-servers": 1}))
    )
    bench.ready_node("fake-provider", "main", "fake-label1")
    wait_for(lambda: pool.zk.node_tree.oldest_free("fake-provider", "main"))
    held, submit, is_deletion = (
        threading.Event(),
        pool.zk.writer.submit,
        sets(NODES, state="deleting"),
    )

    def hold(txn: Any, callback: Any = None) -> None:
        held.set() if is_deletion(txn) else submit(txn, callback)

    monkeypatch.setattr(pool.zk.writer, "submit", hold)
    bench.submit("fake-label2")
    assert held.wait(10)
    goes_on = threading.Event()
    (worker,) = pool.state.workers.values()
    worker._tasks.put((goes_on.set, ()))
    assert goes_on.wait(10), "the thread of the pool waits for the answer"


@pytest.mark.spec("LAU-21.69; DRV-14.13")
def test_paused_gets_declined(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 2})))
    bench.fulfilled("fake-label", "fake-label")
    waiting = bench.submit("fake-label", "fake-label")
    worker = pool.getPoolWorkers("fake-provider")[0]
    wait_for(lambda: worker.paused_handlers)
    bench.config(config(provider(pool={"max-servers": 1})))
    bench.wait_request(waiting, "failed")
    wait_for(lambda: not worker.paused_handlers and not worker.request_handlers)


@pytest.mark.spec("LAU-21.86; DRV-14.12")
def test_multiple_paused_requests(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud refuses two launches under way; they are served in the order of the requests."""
    pool = bench.start(config(provider(pool={"max-servers": 2, "ignore-provider-quota": True})))
    adapter, gate = bench.adapter("fake-provider"), threading.Event()
    original = adapter._createServer

    def refuse(*_args: Any, **_options: Any) -> Any:
        assert gate.wait(10)
        raise RuntimeError("Quota exceeded")

    monkeypatch.setattr(adapter, "_createServer", refuse)
    late = bench.submit("fake-label", priority="300")
    bench.wait_request(late, "pending")
    early = bench.submit("fake-label", priority="100")
    bench.wait_request(early, "pending")
    gate.set()
    worker = pool.getPoolWorkers("fake-provider")[0]
    wait_for(lambda: len(worker.paused_handlers) == 2)
    # Somebody's nodes fill the pool; then there is capacity for one, and later for the other.
    held = [
        bench.ready_node(
            "fake-provider", "main", "fake-label", state="hold", resources={"instances": 1}
        )
        for _ in range(2)
    ]
    bench.wait_nodes(2)
    monkeypatch.setattr(adapter, "_createServer", original)
    assert len(worker.paused_handlers) == 2
    bench.zuul.write_node(held[0].id, state="used")
    bench.wait_request(early, "fulfilled")
    assert bench.zuul.request(late)["state"] == "pending"
    bench.zuul.write_node(held[1].id, state="used")
    bench.wait_request(late, "fulfilled")


@pytest.mark.spec("LAU-21.82; DRV-14.13")
def test_an_exception_declines_a_paused_request(bench: LauncherBench) -> None:
    bench.quota(instances=2)
    pool = bench.start(config(provider(pool={"max-servers": 2})))
    bench.fulfilled("fake-label", "fake-label")
    waiting = bench.submit("fake-label")
    worker = pool.getPoolWorkers("fake-provider")[0]
    wait_for(lambda: worker.paused_handlers)
    manager = pool.getProviderManager("fake-provider")

    def fail(*_args: Any) -> None:
        raise RuntimeError("induced")

    for handler in worker.request_handlers:
        handler.hasProviderQuota = fail
    manager.adapter.getQuotaForLabel = fail
    assert bench.wait_request(waiting, "failed")["declined_by"]
    wait_for(lambda: not worker.paused_handlers and not worker.request_handlers)
    assert not worker.paused


@pytest.mark.spec("LAU-21.50; DRV-14.19")
def test_broken_node_records_disturb_nothing(bench: LauncherBench) -> None:
    bench.ready_node("fake-provider", None, "fake-label", state="hold")
    bench.ready_node("fake-provider", "main", None, state="hold")
    bench.ready_node("fake-provider", "gone", "gone", state="hold")
    for data in (b"{", b"[]", b'{"state": "flying"}', b'{"type": 5, "state": "hold"}', b""):
        bench.zuul.client.create("/nodepool/nodes/", data, sequence=True, makepath=True)
    pool = bench.start(config(provider(pool={"max-servers": 3})))
    bench.fulfilled("fake-label")
    bench.fulfilled("fake-label")
    assert pool.getPoolWorkers("fake-provider")[0].running
    # Only the empty one is removed, the broken ones are left to people.
    wait_for(lambda: len(bench.zk.getNodes()) == 9)


@pytest.mark.spec("LAU-8.1: unmanaged instances are subtracted; max-resources")
def test_unmanaged_instances_count(bench: LauncherBench) -> None:
    bench.quota(cores=8)
    pool = bench.start(config(provider()))
    cloud = bench.cloud("fake-provider")
    other = cloud.create_server(name="somebody's", flavor=cloud._flavor_list[0])
    assert other.id
    pool.getProviderManager("fake-provider").invalidateQuotaCache()
    bench.wait_request(bench.submit("fake-label", "fake-label"), "failed")
    bench.fulfilled("fake-label")


@pytest.mark.spec("LAU-2.9, DRV-14.33: max-concurrency")
def test_max_concurrency_limits_launches_at_a_time(bench: LauncherBench) -> None:
    bench.start(config(provider(**{"max-concurrency": 1})))
    cloud = bench.cloud("fake-provider")
    cloud.pause_creates = True
    ids = [bench.submit("fake-label") for _ in range(3)]
    wait_for(lambda: len(cloud._server_list) == 1)
    bench.wait_request(ids[0], "pending")
    assert [bench.zuul.request(i)["state"] for i in ids] == ["pending", "requested", "requested"]
    cloud.pause_creates = False
    cloud._server_list[0].event.set()
    for request_id in ids:
        bench.wait_request(request_id, "fulfilled")


@pytest.mark.spec("DRV-14.33: max-concurrency 0 accepts nothing")
def test_max_concurrency_zero(bench: LauncherBench) -> None:
    bench.start(
        config(provider("fake-one", **{"max-concurrency": 0}), provider("fake-two", labels=["two"]))
    )
    request_id = bench.submit("fake-label")
    bench.fulfilled("two")
    assert bench.zuul.request(request_id)["state"] == "requested"


class SlowLimits:
    """The cloud reports its limits when it is ``open``, and may fail."""

    def __init__(self, bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter = bench.adapter("fake-provider")
        self.open, self.fails, self.asked = threading.Event(), False, 0
        self.original = adapter.getQuotaLimits
        monkeypatch.setattr(adapter, "getQuotaLimits", self.ask)

    def ask(self) -> Any:
        self.asked += 1
        assert self.open.wait(20)
        if self.fails:
            raise RuntimeError("induced")
        return self.original()


@pytest.mark.spec("DRV-6.4: if fetching limits fails and an older value exists, use that")
def test_limits_that_fail_after_a_refusal_fail_no_request(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.quota(instances=2)
    pool = bench.start(config(provider()))
    bench.fulfilled("fake-label")
    limits, manager = SlowLimits(bench, monkeypatch), pool.getProviderManager("fake-provider")
    limits.open.set()
    limits.fails = True
    monkeypatch.setattr(manager, "RENEWAL_PAUSE", 0.1)
    bench.quota(instances=1)
    waiting = bench.submit("fake-label")
    wait_for(lambda: limits.asked >= 2, what="limits asked for after refusals")
    assert bench.zuul.request(waiting)["declined_by"] == []
    bench.quota(instances=2)
    bench.wait_request(waiting, "fulfilled")
    assert limits.fails


@pytest.mark.spec("LAU-8.1: limits are asked for again after a refusal, before the next launch")
def test_a_refused_request_waits_for_the_limits_without_launching(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.quota(instances=2)
    pool = bench.start(config(provider(labels=["fake-label", "other-label"])))
    first, _nodes = bench.fulfilled("fake-label")
    idle = bench.ready_node("fake-provider", "main", "other-label", resources={"instances": 0})
    cloud, (worker,) = bench.cloud("fake-provider"), pool.getPoolWorkers("fake-provider")
    limits, creations, ticks = SlowLimits(bench, monkeypatch), [], []
    create, tick = cloud.create_server, worker._tick
    monkeypatch.setattr(
        cloud, "create_server", lambda *a, **kw: (creations.append(a), create(*a, **kw))[1]
    )  # type: ignore[func-returns-value]
    monkeypatch.setattr(worker, "_tick", lambda: (ticks.append(limits.asked), tick())[1])  # type: ignore[func-returns-value]
    bench.quota(instances=1)
    second = bench.submit("fake-label")
    wait_for(lambda: limits.asked, what="limits asked for after the refusal")
    wait_for(lambda: ticks.count(1) >= 2, what="further looks at the paused request")
    assert (len(creations), limits.asked, worker.paused) == (1, 1, True)
    assert bench.zuul.request(second)["state"] == "pending"
    assert bench.node(idle.id).state == "ready", "no room is made for what may not be needed"
    bench.use_up(first)
    bench.quota(instances=2)
    limits.open.set()
    bench.wait_request(second, "fulfilled")


def test_old_limits_hold_nobody_up(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the cloud takes its time over the limits, launches continue, and ready nodes are given
    out.
    """
    pool = bench.start(config(provider(labels=["fake-label", "other-label"])))
    bench.fulfilled("fake-label")
    manager = pool.getProviderManager("fake-provider")
    limits = SlowLimits(bench, monkeypatch)
    manager._current_nodepool_quota = (-math.inf, manager._current_nodepool_quota[1])
    bench.fulfilled("fake-label")
    bench.ready_node("fake-provider", "main", "other-label")
    bench.fulfilled("other-label")
    assert limits.asked == 1
    too_big = bench.submit(*["fake-label"] * 200)
    wait_for(
        lambda: "reading the limits" in reason_for(pool.assignment, too_big),
        what="a request that waits",
    )
    bench.fulfilled("fake-label")
    bench.quota(instances=5)
    limits.open.set()
    bench.wait_request(too_big, "failed")


def test_raised_limits_are_noticed_before_a_request_is_declined(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.quota(instances=1)
    pool = bench.start(config(provider()))
    bench.wait_request(bench.submit("fake-label", "fake-label"), "failed")
    manager = pool.getProviderManager("fake-provider")
    bench.quota(instances=2)
    manager._current_nodepool_quota = (-math.inf, manager._current_nodepool_quota[1])
    bench.fulfilled("fake-label", "fake-label")


@pytest.mark.spec(
    "issue 11, users 5: limits for which a request waits are looked at every 15 to 30 s, others "
    "are not"
)
def test_limits_that_grow_while_a_request_waits(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quota shrinks behind the launcher's back, nova refuses; later it is raised, without an
    event.
    """
    bench.quota(instances=2)
    pool = bench.start(
        config(
            provider(pools=[{"name": n, "labels": [n], "max-servers": 2} for n in ("one", "two")])
        )
    )
    manager = pool.getProviderManager("fake-provider")
    assert 15 <= manager.WAITING_AGE <= 29
    bench.fulfilled("one")
    bench.quota(instances=1)
    waiting = bench.submit("one")
    reasons = lambda: {i: render(reasons) for i, _labels, _state, reasons in pool.explain()}  # noqa: E731
    wait_for(
        lambda: (
            "provider fake-provider, instances: 1 needed, 0 of 1 left" in reasons().get(waiting, "")
        )
    )  # type: ignore[no-untyped-call]
    bench.quota(instances=2)
    limits = SlowLimits(bench, monkeypatch)
    limits.open.set()
    worker, ticks = pool.getPoolWorkers("fake-provider")[0], []
    tick = worker._tick
    monkeypatch.setattr(worker, "_tick", lambda: (ticks.append(1), tick())[1])  # type: ignore[func-returns-value]
    wait_for(lambda: len(ticks) >= 2)
    assert limits.asked == 0
    bench.wait_request(waiting, "fulfilled")
    assert limits.asked == 1


def test_limits_are_unchanged_while_a_request_waits_for_its_pool(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    limits, manager, worker = (
        SlowLimits(bench, monkeypatch),
        pool.getProviderManager("fake-provider"),
        (pool.getPoolWorkers("fake-provider")[0]),
    )
    monkeypatch.setattr(manager, "WAITING_AGE", 1.0)
    ticks: list[int] = []
    tick = worker._tick
    monkeypatch.setattr(worker, "_tick", lambda: (tick(), ticks.append(1))[0])  # type: ignore[func-returns-value]
    wait_for(lambda: len(ticks) >= 2)
    assert limits.asked == 0


class Burst:
    """A pool checks each request of a burst when the nodes of those before it are recorded.

    ZooKeeper's answers reach the handlers when all requests of the burst have been checked.
    """

    def __init__(self, bench: LauncherBench, count: int) -> None:
        self.bench, self.count, self.considered = bench, count, 0
        self.held: list[tuple[PoolWorker, Any, Any]] = []
        self.post = PoolWorker.post
        real_consider = PoolWorker._consider

        def post(worker: PoolWorker, handler: Any, function: Any, *args: Any) -> None:
            if function == handler.life.answered and self.considered < self.count:
                self.held.append((worker, handler, (function, *args)))
            else:
                self.post(worker, handler, function, *args)

        def consider(worker: PoolWorker, *args: Any) -> None:
            real_consider(worker, *args)
            wait_for(
                lambda: self.answers(worker) >= self.writing(worker), what="the answer of ZooKeeper"
            )
            self.considered += 1
            if self.considered >= self.count:
                held, self.held = self.held, []
                for other, handler, task in held:
                    self.post(other, handler, *task)

        bench.monkeypatch.setattr(PoolWorker, "post", post)
        bench.monkeypatch.setattr(PoolWorker, "_consider", consider)

    def answers(self, worker: PoolWorker) -> int:
        return sum(other is worker for other, _handler, _task in self.held)

    def writing(self, worker: PoolWorker) -> int:
        return (
            sum(handler.state is State.WRITING for handler in worker.request_handlers)
            if self.considered < self.count
            else 0
        )

    def submit(self, label: str) -> list[str]:
        """All requests in one transaction."""
        txn = self.bench.zuul.client.transaction()
        for _ in range(self.count):
            record = {
                "node_types": [label],
                "requestor": "zuul",
                "state": "requested",
                "state_time": time.time(),
            }
            txn.create("/nodepool/requests/200-", json.dumps(record).encode(), sequence=True)
        return [str(path).rsplit("/", 1)[1] for path in txn.commit()]


def test_burst_that_fits_stays_at_the_provider_of_best_priority(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider("fake-good", pool={"max-servers": 8, "priority": 10}),
            provider("fake-dear", pool={"max-servers": 8, "priority": 50}),
        )
    )
    requests = Burst(bench, 8).submit("fake-label")
    nodes = [
        bench.node(i)
        for request in requests
        for i in bench.wait_request(request, "fulfilled")["nodes"]
    ]
    assert [node.provider for node in nodes] == ["fake-good"] * 8


def test_burst_that_fits_alongside_idle_nodes_deletes_none_and_does_not_pause(
    bench: LauncherBench,
) -> None:
    pool = bench.start(
        config(provider(labels=["fake-label", "idle-label"], pool={"max-servers": 10}))
    )
    idle = [
        bench.ready_node("fake-provider", "main", "idle-label", resources={"instances": 1}).id
        for _ in range(2)
    ]
    wait_for(lambda: pool.zk.node_tree.usage("fake-provider", "main").get("instances") == 2)
    paused: list[Any] = []
    real = PoolCapacity.pause_changed
    bench.monkeypatch.setattr(
        PoolCapacity,
        "pause_changed",
        lambda capacity, handler: (paused.append(handler), real(capacity, handler)),  # type: ignore[func-returns-value]
    )
    for request in Burst(bench, 8).submit("fake-label"):
        bench.wait_request(request, "fulfilled")
    assert [bench.node(i).state for i in idle] == ["ready", "ready"]
    assert not paused

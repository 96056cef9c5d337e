"""Which request first, which pool (LAU-2, LAU-4)."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.driver import NodeRequestHandler
from nodepool.reasons import Code, because
from nodepool.zk.zookeeper import NodeRequest
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider

SPEC = "LAU-21: "


def order_of_service(bench: LauncherBench, pool: Any, ids: list[str]) -> list[str]:
    """Serve waiting requests one by one (there is capacity for one node) and say in which order."""
    order: list[str] = []
    while len(order) < len(ids):
        left = [i for i in ids if i not in order]
        done = wait_for(
            lambda left=left: [  # type: ignore[misc]
                i for i in left if bench.zuul.request(i)["state"] == "fulfilled"
            ]
        )
        assert len(done) == 1, done
        order += done
        bench.zuul.give_back(*bench.zuul.accept(done[0]))
        wait_for(lambda: bench.zuul.client.exists(f"/nodepool/requests/{done[0]}") is None)  # noqa: B023
    assert not pool.assignment.waiting()
    return order


def waits_behind(pool: Any, request_id: str, first: str) -> bool:
    return any(
        request == request_id
        and any(reason.includes(because(Code.POOL_PAUSED, request=first)) for reason in reasons)
        for request, _labels, _state, reasons in pool.assignment.explain()
    )


def test_urgent_request_overtakes_a_paused_one_that_holds_nothing(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 2})))
    blockers = [bench.fulfilled("fake-label")[0] for _ in range(2)]
    low = bench.submit("fake-label", priority="300")
    bench.wait_request(low, "pending")
    also_low = bench.submit("fake-label", priority="300")
    wait_for(
        lambda: waits_behind(pool, also_low, low),
        what="the reason with the id of the request that comes first",
    )
    urgent = bench.submit("fake-label", priority="100")
    bench.wait_request(
        urgent, "pending", timeout=1
    )  # immediately, although others with its labels wait behind the first
    wait_for(lambda: waits_behind(pool, also_low, urgent))
    bench.use_up(blockers[0])
    bench.wait_request(urgent, "fulfilled")
    assert bench.zuul.request(low)["state"] == "pending"
    bench.use_up(blockers[1])
    bench.wait_request(low, "fulfilled")


def test_overtaken_request_changes_its_state_as_often_as_any_other(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    states: dict[str, list[str]] = {}
    pool.zk.request_tree.listeners.append(
        lambda i, old, new: (
            states.setdefault(i, []).append(new.state)
            if new and (old is None or old.state != new.state)
            else None
        )
    )
    used = bench.fulfilled("fake-label")[0]
    low = bench.submit("fake-label", priority="300")
    bench.wait_request(low, "pending")
    for _ in range(4):
        urgent = bench.submit("fake-label", priority="100")
        bench.wait_request(urgent, "pending")
        bench.use_up(used)
        bench.wait_request(urgent, "fulfilled")
        used = urgent
    bench.use_up(used)
    bench.wait_request(low, "fulfilled")
    assert states[low] == ["requested", "pending", "fulfilled"]


def test_request_is_not_overtaken_when_it_holds_a_node_or_is_as_urgent(
    bench: LauncherBench,
) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 2})))
    blocker = bench.fulfilled("fake-label")[0]
    holding = bench.submit("fake-label", "fake-label", priority="300")
    bench.wait_nodes(1, allocated_to=holding, state="ready")
    urgent = bench.submit("fake-label", priority="100")
    wait_for(lambda: waits_behind(pool, urgent, holding))
    bench.use_up(blocker)
    bench.wait_request(holding, "fulfilled")
    bench.wait_request(urgent, "pending")
    equal = bench.submit("fake-label", priority="100")
    wait_for(lambda: waits_behind(pool, equal, urgent))
    assert bench.zuul.request(urgent)["state"] == "pending"
    bench.use_up(holding)
    bench.wait_request(urgent, "fulfilled")
    bench.wait_request(equal, "fulfilled")


def test_min_ready_request_overtakes_nothing(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    bench.fulfilled("fake-label")
    low = bench.submit("fake-label", priority="300")
    bench.wait_request(low, "pending")
    moved: list[Any] = []
    bench.monkeypatch.setattr(
        NodeRequestHandler, "move", lambda handler, *_args: moved.append(handler)
    )
    stock = bench.submit("fake-label", priority="100", requestor="NodePool:min-ready")
    wait_for(lambda: waits_behind(pool, stock, low))
    assert not moved
    bench.monkeypatch.undo()


@pytest.mark.spec(SPEC + "request_order; DRV-8: precedence, relative priority, sequence")
def test_requests_are_served_by_precedence_priority_and_age(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    blocker, _nodes = bench.fulfilled("fake-label")
    paused = bench.submit("fake-label", priority="100")  # the one that pauses the pool
    wait_for(lambda: pool.getPoolWorkers("fake-provider")[0].paused_handlers)
    ids = {
        "low": bench.submit("fake-label", priority="300"),
        "normal-2": bench.submit("fake-label", relative_priority=2),
        "normal-1": bench.submit("fake-label", relative_priority=1),
        "normal-1-later": bench.submit("fake-label", relative_priority=1),
        "high": bench.submit("fake-label", priority="100", relative_priority=9),
        "child": bench.submit("fake-label", priority="199", relative_priority=50),
    }
    wait_for(lambda: pool.assignment.waiting() == len(ids))
    # Zuul revises one of them.
    record = bench.zuul.request(ids["normal-2"])
    assert record is not None
    bench.zuul.client.set(
        f"/nodepool/requests/{ids['normal-2']}",
        json.dumps({**record, "relative_priority": 0}).encode(),
    )
    wait_for(lambda: pool.zk.request_tree.get(ids["normal-2"]).relative_priority == 0)
    bench.use_up(blocker)
    expected = [
        paused,
        *(ids[k] for k in ("high", "child", "normal-2", "normal-1", "normal-1-later", "low")),
    ]
    assert order_of_service(bench, pool, expected) == expected


@pytest.mark.spec(SPEC + "request_order_missing_label")
def test_servable_before_unservable(bench: LauncherBench) -> None:
    bad = bench.submit("missing-label", "fake-label", relative_priority=1)
    good = bench.submit("fake-label", relative_priority=2)
    bench.start(config(provider()))
    bench.wait_request(bad, "failed")
    bench.wait_request(good, "fulfilled")


@pytest.mark.spec(SPEC + "provider_priority")
def test_provider_of_better_priority_is_used_first(bench: LauncherBench) -> None:
    """Best first; its second request pauses it; the third overflows to the next."""
    pool = bench.start(
        config(
            provider("fake-low", priority=2, pool={"max-servers": 1}),
            provider("fake-high", priority=1, pool={"max-servers": 1}),
            provider("fake-lowest", pool={"max-servers": 1}),
        )
    )
    assert {p.provider_name: p.priority for p in bench.zk.getRegisteredPools()} == {
        "fake-low": 2,
        "fake-high": 1,
        "fake-lowest": 100,
    }
    first, nodes = bench.fulfilled("fake-label")
    assert nodes[0].provider == "fake-high"
    second = bench.submit("fake-label")
    bench.wait_request(second, "pending")
    wait_for(lambda: pool.getPoolWorkers("fake-high")[0].paused)
    assert bench.fulfilled("fake-label")[1][0].provider == "fake-low"
    bench.use_up(first)
    assert bench.node(bench.wait_request(second, "fulfilled")["nodes"][0]).provider == "fake-high"
    third = bench.submit("fake-label")
    bench.wait_request(third, "pending")
    assert pool.getPoolWorkers("fake-high")[0].paused


@pytest.mark.spec("LAU-4: priority of the pool before that of the provider")
def test_priority_of_the_pool_comes_before_that_of_the_provider(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider(
                priority=5,
                pools=[
                    {"name": "a", "labels": ["fake-label"]},
                    {"name": "b", "priority": 1, "labels": ["fake-label"]},
                ],
            )
        )
    )
    for _ in range(3):
        assert bench.fulfilled("fake-label")[1][0].pool == "b"
    assert {p.name: p.priority for p in bench.zk.getRegisteredPools()} == {"a": 5, "b": 1}


@pytest.mark.spec(
    SPEC
    + "node_request_provider, node_request_invalid_provider, node_request_provider_label_mismatch"
)
def test_requested_provider_is_used_if_it_can_serve(bench: LauncherBench) -> None:
    bench.start(
        config(provider("fake-one", labels=["fake-label", "only-one"]), provider("fake-two"))
    )
    for name in ("fake-one", "fake-two", "fake-one"):
        assert bench.fulfilled("fake-label", provider=name)[1][0].provider == name
    bench.fulfilled("fake-label", provider="invalid")
    assert bench.fulfilled("only-one", provider="fake-two")[1][0].provider == "fake-one"


@pytest.mark.spec("LAU-2.4: the wish is void when the wanted provider has declined")
def test_a_declined_provider_wish(bench: LauncherBench) -> None:
    bench.start(config(provider("fake-one", pool={"max-servers": 1}), provider("fake-two")))
    assert (
        bench.fulfilled("fake-label", "fake-label", provider="fake-one")[1][0].provider
        == "fake-two"
    )


@pytest.mark.spec(
    "LAU-2.5, ZK-4: a better pool of another launcher is yielded to while it is not paused"
)
def test_yield_to_another_launcher(bench: LauncherBench) -> None:
    first = bench.start(
        config(provider("fake-one", priority=1, pool={"max-servers": 1})), name="one.yaml"
    )
    second = bench.start(config(provider("fake-two", priority=2)), name="two.yaml")
    wait_for(lambda: all(len(p.zk.getRegisteredPools()) == 2 for p in (first, second)))
    assert bench.fulfilled("fake-label")[1][0].provider == "fake-one"
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    wait_for(lambda: any(p.paused for p in second.zk.getRegisteredPools()))
    assert bench.fulfilled("fake-label")[1][0].provider == "fake-two"
    bench.stop(first)
    # What the first launcher was about continues with the second.
    assert bench.node(bench.wait_request(waiting, "fulfilled")["nodes"][0]).provider == "fake-two"


@pytest.mark.spec("LAU-2: equal pools share the work; a request is served once only")
def test_two_launchers_with_one_provider(bench: LauncherBench) -> None:
    content = config(provider(pool={"max-servers": 10}))
    bench.start(content, name="one.yaml")
    bench.start(content, name="two.yaml")
    ids = [bench.submit("fake-label") for _ in range(30)]
    nodes: list[str] = []
    for request_id in ids:
        nodes += bench.wait_request(request_id, "fulfilled")["nodes"]
        bench.zuul.give_back(*bench.zuul.accept(request_id))
    assert len(nodes) == len(set(nodes)) == 30
    bench.wait_nodes(0)


def test_pools_whose_joined_names_are_equal_both_work(bench: LauncherBench) -> None:
    one = provider("fake-cloud", pools=[{"name": "east-main", "labels": ["one"]}])
    two = provider("fake-cloud-east", pools=[{"name": "main", "labels": ["two"]}])
    bench.start(config(one, two))
    for label, name in (("one", "fake-cloud"), ("two", "fake-cloud-east")):
        _request, (node,) = bench.fulfilled(label)
        assert node.provider == name


def test_turn_to_create_nodes_goes_to_the_most_urgent_request(bench: LauncherBench) -> None:
    (worker,) = bench.start(config(provider())).getPoolWorkers("fake-provider")
    posted: list[str] = []
    bench.monkeypatch.setattr(
        worker, "post", lambda handler, _function: posted.append(handler.request.id)
    )
    ids = ["200-0000000001", "300-0000000002", "200-0000000004", "100-0000000005", "200-0000000003"]
    handlers = [SimpleNamespace(request=NodeRequest(request_id), run=None) for request_id in ids]
    assert [worker.capacity.begin_creation(handler) for handler in handlers] == [
        True,
        False,
        False,
        False,
        False,
    ]
    worker.capacity.end_creation(handlers[4])  # it waits no longer
    for handler in (handlers[0], handlers[3], handlers[2]):
        worker.capacity.end_creation(handler)
        assert worker.capacity.begin_creation(
            next(h for h in handlers if h.request.id == posted[-1])
        )
    assert posted == ["100-0000000005", "200-0000000004", "300-0000000002"]

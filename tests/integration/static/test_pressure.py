"""Static nodes under pressure: slots come free while more requests wait than there are slots."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.driver.static.provider import StaticNodeProvider
from nodepool.launcher.requests.assignment import Assignment
from nodepool.reasons import render
from nodepool.zk.locks.turn import TurnLock
from nodepool.zk.zookeeper import FULFILLED, REQUESTED
from tests.conftest import Chroot, wait_for
from tests.support.driver_scene import DriverBench
from tests.support.launcher import reason_for

SLOTS, WAITING = 30, 300


@pytest.fixture
def bench(zk_chroot: Chroot) -> Iterator[DriverBench]:
    bench = DriverBench(zk_chroot)
    yield bench
    bench.stop()


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests that the pool was given to serve."""
    offered: list[str] = []
    real = StaticNodeProvider.getRequestHandler

    def noted(self: StaticNodeProvider, poolworker: Any, request: Any) -> Any:
        offered.append(request.id)
        return real(self, poolworker, request)

    monkeypatch.setattr(StaticNodeProvider, "getRequestHandler", noted)
    return offered


def config(hosts: int, slots: int) -> dict[str, Any]:
    nodes = [
        {"name": f"fake-host-{i}", "labels": ["a"], "max-parallel-jobs": slots // hosts}
        for i in range(hosts)
    ]
    return {
        "labels": [{"name": "a"}],
        "providers": [
            {"name": "static", "driver": "static", "pools": [{"name": "main", "nodes": nodes}]}
        ],
    }


def wait_until_waiting(assignment: Assignment, count: int) -> None:
    """This many requests have been checked, and wait for a node."""
    wait_for(
        lambda: (
            [render(why) for _, _, _, why in assignment.explain()]
            == ["static-main: no free node of a"] * count
        ),
        what=f"{count} waiting requests",
    )


@pytest.mark.parametrize("hosts", [1, SLOTS])
def test_a_free_node_is_promised_to_one_request(
    bench: DriverBench, offered: list[str], hosts: int
) -> None:
    """However many wait: who is not served is not bothered, and the first in line is served
    first.
    """
    pool = bench.start(config(hosts, SLOTS))
    bench.wait_nodes("a", SLOTS)
    used = [
        node
        for request in [bench.submit("a") for _ in range(SLOTS)]
        for node in bench.accept(request)
    ]
    waiting = [bench.submit("a", priority="300") for _ in range(WAITING)]
    wait_until_waiting(pool.assignment, WAITING)
    urgent = bench.submit("a", priority="100")
    wait_until_waiting(pool.assignment, WAITING + 1)
    offered.clear()
    decisions = pool.assignment.queue.decisions
    bench.give_back(*used)
    wait_for(lambda: sum(bench.state(r) == FULFILLED for r in [urgent, *waiting]) == SLOTS)
    assert offered[0] == urgent.id
    assert set(offered) == {urgent.id, *(r.id for r in waiting[: SLOTS - 1])}, (
        "in serving order, and nobody else"
    )
    assert len(offered) <= 2 * SLOTS
    assert pool.assignment.queue.decisions - decisions <= 10 * SLOTS


def test_a_request_that_cannot_take_the_free_node_leaves_it_to_others(bench: DriverBench) -> None:
    """Two nodes are required and one is free: whoever wants one has it immediately, in another
    class or in the same.
    """
    pool = bench.start(config(1, 2))
    bench.wait_nodes("a", 2)
    (one,), (_other,) = bench.get("a"), bench.get("a")
    pairs = [
        bench.submit("a", "a", priority="100", tenant_name=tenant)
        for tenant in ("one", "two", "two")
    ]
    single = bench.submit("a", priority="200")
    wait_until_waiting(pool.assignment, 4)
    bench.give_back(one)
    bench.accept(single)
    assert {bench.state(pair) for pair in pairs} == {REQUESTED}


def test_who_finds_a_dead_node_makes_way_for_the_next(
    bench: DriverBench, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the host is checked the next request waits, with the reason; a second one of the
    same tenant is not asked.
    """
    go_on = threading.Event()
    monkeypatch.setattr(
        StaticNodeProvider, "checkNodeLiveness", lambda _self, _node: not go_on.wait(20)
    )
    pool = bench.start(config(1, 1))
    bench.wait_nodes("a")
    first = bench.submit("a", tenant_name="one")
    wait_for(lambda: offered == [first.id])
    like_first = bench.submit("a", tenant_name="one")
    second = bench.submit("a", tenant_name="two")
    taking = "static-main: all free nodes are being assigned to earlier requests: a"
    for request in (like_first, second):
        wait_for(lambda request=request: reason_for(pool.assignment, request.id) == taking)  # type: ignore[misc]
    go_on.set()
    for request in (first, like_first, second):
        wait_for(
            lambda request=request: (
                reason_for(pool.assignment, request.id) == "static-main: nothing free"
            ),  # type: ignore[misc]
            what=f"an answer to {request.id}",
        )
    # Another event meanwhile, such as the last one of the start, offers the first one again.
    assert list(dict.fromkeys(offered)) == [first.id, second.id]
    assert like_first.id not in offered


def test_hosts_are_registered_together(bench: DriverBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread has its turn the others gather; the next one writes for all of them."""
    turns: list[int] = []
    register = StaticNodeProvider._register

    def noted(self: StaticNodeProvider, batch: dict[Any, Any]) -> None:
        turns.append(len(batch))
        if len(turns) == 1:
            wait_for(
                lambda: len(batch) + len(self._to_fill) == 8,
                what="the other hosts to wait for their turn",
            )
        register(self, batch)

    monkeypatch.setattr(StaticNodeProvider, "_register", noted)
    bench.start(config(8, 24))
    nodes = bench.wait_nodes("a", 24)
    # One turn, when all came before it had begun.
    assert len(turns) <= 2 and sum(turns) == 8
    assert {(node.external_id, node.slot) for node in nodes} == {
        (f"fake-host-{i}", slot) for i in range(8) for slot in range(3)
    }


def test_hosts_wait_together_for_another_launcher(
    bench: DriverBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    take = TurnLock.take

    def noted(self: TurnLock) -> bool:
        taken.append(take(self))
        return taken[-1]

    monkeypatch.setattr(TurnLock, "take", noted)
    bench.zk.kazoo_client.create(
        "/nodepool/elections/static-static", b"another launcher", makepath=True
    )
    bench.start(config(8, 8))
    wait_for(lambda: taken, what="a first try")
    assert not any(taken) and not bench.nodes()
    bench.zk.kazoo_client.delete("/nodepool/elections/static-static")
    bench.wait_nodes("a", 8)


def test_a_record_that_cannot_be_written_keeps_back_no_other_host(
    bench: DriverBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[set[str]] = []
    register = StaticNodeProvider._register

    def noted(self: StaticNodeProvider, batch: dict[Any, Any]) -> None:
        batches.append({host.hostname for host in batch})
        register(self, batch)

    monkeypatch.setattr(StaticNodeProvider, "_register", noted)
    good = config(3, 3)
    good["labels"].append({"name": "b"})
    good["providers"][0]["pools"].append(
        {
            "name": "odd",
            "node-attributes": {"installed": datetime.date(2024, 1, 1)},  # JSON has no dates
            "nodes": [{"name": "fake-host-odd", "labels": ["b"]}],
        }
    )
    bench.start(good)
    bench.wait_nodes("a", 3)
    assert not any("fake-host-odd" in batch for batch in batches)

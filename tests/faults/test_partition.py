"""The launcher is cut off from ZooKeeper, or stands still, for shorter and longer than its
session lives.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest

from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.faults.launcher import SESSION, Bench, Proxy

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

REQUESTS = 20


@pytest.fixture
def proxy(bench: Bench) -> Iterator[Proxy]:
    made = Proxy(int(bench.settings["hosts"].rsplit(":", 1)[1]))
    try:
        yield made
    finally:
        made.stop()


def work_off(bench: Bench, ids: list[str], timeout: float = 40.0) -> None:
    """Use every request's nodes as soon as it is served."""
    zuul, open_ids = bench.zuul, list(ids)
    deadline = time.monotonic() + timeout
    while open_ids:
        records = zuul.read("requests", open_ids)
        assert len(records) == len(open_ids), "requests are lost"
        assert time.monotonic() < deadline, zuul.states(open_ids)
        ready = [i for i in open_ids if records[i]["state"] == "fulfilled"]
        zuul.use(ready)
        open_ids = [i for i in open_ids if i not in ready]
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["close", "hold"])
@pytest.mark.parametrize("seconds", [SESSION / 4, SESSION * 2.5], ids=["short", "long"])
def test_requests_are_served_once_although_the_connection_was_cut(
    bench: Bench, proxy: Proxy, how: str, seconds: float
) -> None:
    bench.cloud.set(create_delay=1.0, delete_delay=0.2)
    launcher = bench.start(bench.config(bench.provider(pool={"max-servers": 15}), hosts=proxy.host))
    bench.wait_pools(1)
    first = [bench.zuul.submit("l0") for _ in range(3)]
    bench.zuul.wait_fulfilled(first)
    ids = [bench.zuul.submit("l0") for _ in range(REQUESTS - 3)]
    bench.zuul.wait_states(ids, lambda states: states["pending"] > 5)
    bench.zuul.use(first)
    proxy.set(how)
    time.sleep(seconds)
    proxy.set("open")
    work_off(bench, ids)
    bench.wait_nothing_left(30)
    assert bench.check_counts()["requests"] == REQUESTS
    assert launcher.alive()
    bench.check_fencing()
    sessions = {line["session"] for line in bench.transactions()}
    assert len(sessions) == (1 if seconds < SESSION else 2)


@pytest.mark.parametrize("seed", [1])
def test_many_short_cuts(bench: Bench, proxy: Proxy, seed: int) -> None:
    """The session lives on, but again and again nobody knows whether the last writes were done."""
    bench.cloud.set(create_delay=0.2, delete_delay=0.1)
    launcher = bench.start(
        bench.config(
            bench.provider(pool={"max-servers": 12}),
            labels=[{"name": "l0", "min-ready": 2}],
            hosts=proxy.host,
            session=5.0,
        )
    )
    bench.wait_pools(1)
    open_ids: list[str] = []
    choose = random.Random(seed)
    cuts, submitted, began = 0, 0, time.monotonic()
    next_cut = began
    while open_ids or submitted < 80:
        assert time.monotonic() - began < limit(60), bench.zuul.states(open_ids)
        if submitted < 80 and len(open_ids) < 15:
            open_ids.append(bench.zuul.submit("l0"))
            submitted += 1
        if cuts < 30 and time.monotonic() > next_cut:
            if cuts % 3:
                proxy.set("deaf")
                time.sleep(choose.uniform(0.01, 0.1))
            proxy.set("close")
            time.sleep(choose.uniform(0, 0.05))
            proxy.set("open")
            cuts += 1
            next_cut = time.monotonic() + choose.uniform(0.05, 0.8)
        records = bench.zuul.read("requests", open_ids)
        assert len(records) == len(open_ids), "requests are lost"
        ready = [i for i in open_ids if records[i]["state"] == "fulfilled"]
        bench.zuul.use(ready)
        open_ids = [i for i in open_ids if i not in ready]
        time.sleep(0.01)
    assert cuts > 10
    unknown = sum(line["error"] is not None for line in bench.answers())
    assert unknown > 5, "the cuts hit nothing"

    # What min-ready asks for is there, and nothing else.
    def settled() -> bool:
        nodes = bench.zuul.read("nodes").values()
        return (
            len(nodes) == 2
            and all(n["state"] == "ready" and not n["allocated_to"] for n in nodes)
            and not bench.zuul.read("requests")
        )

    wait_for(settled, 20, "two idle nodes and nothing else")
    launcher.rewrite(lambda c: c.update(labels=[{"name": "l0", "max-ready-age": 1}]))
    bench.wait_nothing_left(20)
    print(
        f"{cuts} cuts, {unknown} unknown outcomes, {time.monotonic() - began:.1f} s, "
        f"{bench.check_counts()}"
    )
    assert launcher.alive()
    bench.check_fencing()
    assert len({line["session"] for line in bench.transactions()}) == 1


@pytest.mark.parametrize(
    ("how", "delay"),
    [("stop", 0.0), ("stop", 0.3), ("stop", 1.0), ("hold", 0.3), ("close", 0.3), ("hold", 1.0)],
)
def test_replaced_launcher_overwrites_nothing(
    bench: Bench, proxy: Proxy, how: str, delay: float
) -> None:
    """One launcher stands still or is cut off, the other takes its place; the first, back again,
    has lost its locks.
    """
    bench.cloud.set(create_delay=1.0, delete_delay=0.3)
    first = bench.start(bench.config(hosts=proxy.host))
    bench.wait_pools(1)
    ids = [bench.zuul.submit("l0", "l0") for _ in range(REQUESTS // 2)]
    if delay:
        bench.zuul.wait_states(ids, lambda states: states["pending"] + states["fulfilled"] > 5)
        time.sleep(delay)
    if how == "stop":
        first.send(signal.SIGSTOP)
    else:
        proxy.set(how)
    other = bench.start(bench.config())
    bench.zuul.wait_fulfilled(ids, 40)
    taken = [node for request_id in ids for node in bench.zuul.accept(request_id)]
    before = bench.zuul.read("nodes", taken)
    if how == "stop":
        first.send(signal.SIGCONT)
    else:
        proxy.set("open")
    bench.wait_pools(2)
    # It has checked everything by now, and serves again.
    more = [bench.zuul.submit("l0") for _ in range(6)]
    bench.zuul.wait_fulfilled(more)
    assert bench.zuul.read("nodes", taken) == before
    bench.zuul.give_back(*taken)
    bench.zuul.use(more)
    bench.wait_nothing_left(30)
    bench.check_counts()
    bench.check_fencing()
    assert first.alive() and other.alive()

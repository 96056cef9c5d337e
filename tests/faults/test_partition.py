"""The launcher is cut off from ZooKeeper, or stands still, for shorter and longer than its session lives."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.faults.harness import SESSION, Bench, Proxy

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
def test_connection_cut(bench: Bench, proxy: Proxy, how: str, seconds: float) -> None:
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


@pytest.mark.parametrize("delay", [0.0, 0.3, 1.0])
def test_stopped_process_has_lost_its_locks(bench: Bench, delay: float) -> None:
    """While one launcher stands still the other takes over; the first, woken up, overwrites nothing."""
    bench.cloud.set(create_delay=1.0, delete_delay=0.3)
    config = bench.config()
    sleeper = bench.start(config)
    bench.wait_pools(1)
    ids = [bench.zuul.submit("l0", "l0") for _ in range(REQUESTS // 2)]
    if delay:
        bench.zuul.wait_states(ids, lambda states: states["pending"] + states["fulfilled"] > 5)
        time.sleep(delay)
    sleeper.send(signal.SIGSTOP)
    other = bench.start(config)
    bench.zuul.wait_fulfilled(ids, 40)
    taken = [node for request_id in ids for node in bench.zuul.accept(request_id)]
    before = bench.zuul.read("nodes", taken)
    sleeper.send(signal.SIGCONT)
    bench.wait_pools(2)
    # It has looked at everything by now: serve one more request, and one more.
    more = [bench.zuul.submit("l0") for _ in range(6)]
    bench.zuul.wait_fulfilled(more)
    assert bench.zuul.read("nodes", taken) == before
    bench.zuul.give_back(*taken)
    bench.zuul.use(more)
    bench.wait_nothing_left(30)
    bench.check_counts()
    bench.check_fencing()
    assert sleeper.alive() and other.alive()

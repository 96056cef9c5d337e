"""ZooKeeper itself stops and comes back, or is not there at the start."""

from __future__ import annotations

import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.faults.launcher import SESSION, Bench, Proxy, own_server

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(120),
    # kazoo leaves the socket of a refused TLS connection to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

REQUESTS = 30


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, Any]]:
    with own_server() as settings:
        yield settings


@pytest.fixture
def own_bench(server: dict[str, Any], tmp_path: pathlib.Path) -> Iterator[Bench]:
    made = Bench(server, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    "seconds", [0.2, SESSION * 2.5], ids=["shorter than the session", "longer than the session"]
)
def test_restart_with_requests_in_flight(
    own_bench: Bench, server: dict[str, Any], seconds: float
) -> None:
    bench = own_bench
    bench.cloud.set(create_delay=1.5, delete_delay=0.2)
    launcher = bench.start(bench.config(bench.provider(pool={"max-servers": 20})))
    bench.wait_pools(1)
    zuul = bench.zuul
    first = [zuul.submit("l0") for _ in range(5)]
    zuul.wait_fulfilled(first)
    ids = [zuul.submit("l0") for _ in range(REQUESTS - 5)]
    zuul.use(first[:3])  # launches, a pause for quota and deletions are under way
    zuul.wait_states(ids, lambda states: states["pending"] > 10)
    server["stop"]()
    time.sleep(seconds)
    server["start"]()
    wait_for(lambda: zuul.connection.connected, 20)
    began = time.monotonic()
    done: set[str] = set(first[:3])
    deadline = time.monotonic() + 40
    while len(done) < REQUESTS:
        assert time.monotonic() < deadline, zuul.states([i for i in first + ids if i not in done])
        states = zuul.read("requests", [i for i in first + ids if i not in done])
        assert not [i for i in first + ids if i not in done and i not in states], (
            "requests are lost"
        )
        ready = [i for i, record in states.items() if record["state"] == "fulfilled"]
        zuul.use(ready)
        done.update(ready)
        time.sleep(0.05)
    print(f"all served {time.monotonic() - began:.1f} s after the return of the server")
    bench.wait_nothing_left(30)
    assert bench.check_counts()["requests"] == REQUESTS
    assert launcher.alive()
    bench.check_fencing()
    # The registry has each component once.
    assert len(zuul.pools()) == 1
    assert len(zuul.kazoo.get_children("/nodepool/components/launcher")) == 1


def test_not_there_at_the_start(bench: Bench) -> None:
    """A message naming the servers at least every 10 s; the work begins when it appears."""
    proxy = Proxy(int(bench.settings["hosts"].rsplit(":", 1)[1]))
    proxy.set("close")
    try:
        launcher = bench.start(bench.config(hosts=proxy.host), wait=False)
        pattern = re.compile(rf"^.*{re.escape(proxy.host)}.*$", re.MULTILINE)
        began = time.monotonic()
        wait_for(
            lambda: len(set(pattern.findall(launcher.text()))) >= 2,
            25,
            "two messages naming the server",
        )
        assert time.monotonic() - began < limit(15)
        assert launcher.alive() and not launcher.ready()
        assert "Traceback" not in launcher.text()
        proxy.set("open")
        bench.wait_ready(launcher)
        request_id = bench.zuul.submit("l0")
        bench.zuul.wait_fulfilled([request_id])
        bench.zuul.use([request_id])
        bench.wait_nothing_left()
        assert launcher.stop() < 10
    finally:
        proxy.stop()

"""Drivers written for 11.0.0's request handler: as fast as their checks allow (DRV-5)."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.driver.test.handler import TestHandler
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench

CONFIG = {
    "labels": [{"name": "test-label"}],
    "providers": [
        {"name": "tp", "driver": "test", "pools": [{"name": "main", "labels": ["test-label"]}]}
    ],
}


def hold_first(pool: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The first transaction is kept back; the list gets its arguments for ``submit``."""
    submit, held = pool.zk.writer.submit, []

    def late(*args: Any) -> None:
        if held:
            submit(*args)
        else:
            held.append(args)

    monkeypatch.setattr(pool.zk.writer, "submit", late)
    return held


@pytest.mark.spec(
    "issue 11, 8: a driver that does not count nodes itself needs no turn: its requests do not "
    "wait for each other"
)
def test_requests_do_not_wait_for_each_other(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(CONFIG)
    submit = pool.zk.writer.submit
    held = hold_first(pool, monkeypatch)
    first = bench.submit("test-label")
    wait_for(lambda: held)
    bench.fulfilled("test-label", "test-label")
    assert bench.zuul.request(first)["state"] == "requested"
    submit(*held[0])
    bench.wait_request(first, "fulfilled")


@pytest.mark.spec("DRV-5.5: one that counts recorded nodes fills one node set after the other")
def test_requests_of_a_driver_that_counts_take_turns(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_room(handler: Any, _label: str) -> bool:
        return len([n for n in handler.zk.nodeIterator() if n.provider == "tp"]) < 2

    monkeypatch.setattr(TestHandler, "hasRemainingQuota", has_room)
    pool = bench.start(CONFIG)
    submit = pool.zk.writer.submit
    held = hold_first(pool, monkeypatch)
    first = bench.submit("test-label", "test-label")
    wait_for(lambda: held)
    second = bench.submit("test-label", "test-label")
    wait_for(lambda: second in pool.state.handlers)
    wait_for(lambda: pool.getPoolWorkers("tp")[0].capacity.queue, what="it waits for its turn")
    submit(*held[0])
    bench.wait_request(first, "fulfilled")
    bench.wait_request(second, "pending")
    assert len(bench.nodes()) == 2
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")
    bench.use_up(second)


@pytest.mark.spec("issue 11, 8: a node that is deleted costs a classic driver one transaction")
def test_a_deletion_is_one_transaction(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(CONFIG)
    request_id, (node,) = bench.fulfilled("test-label")
    written: list[Any] = []
    zk = pool.zk
    monkeypatch.setattr(zk, "deleteNode", written.append)
    monkeypatch.setattr(zk, "storeNode", written.append)
    bench.use_up(request_id)
    assert node.id not in bench.zk.getNodes() and not written


@pytest.mark.spec("DRV-6.2: nor does one for whose lock somebody waits stay behind")
def test_a_deletion_while_somebody_waits_for_the_lock(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nodepool.driver.test.provider import TestProvider

    bench.start(CONFIG)
    request_id, (node,) = bench.fulfilled("test-label")
    # Another one contends when ours is held already.
    monkeypatch.setattr(
        TestProvider, "cleanupNode", lambda _provider, _id: bench.zuul.lock(node.id)
    )
    bench.zuul.give_back(*bench.zuul.accept(request_id))
    bench.wait_gone(node.id)

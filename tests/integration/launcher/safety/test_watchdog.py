"""Whichever thread of a launcher ends that must live: /ready says so, and the service manager is
notified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.faults.serve import end_thread
from tests.support.launcher import LauncherBench, config, provider

POOL_WORKER = "PoolWorker.fake-provider-main"


def wake_worker(pool: Any) -> None:
    (worker,) = pool.state.workers.values()
    worker._tasks.put((bool, ()))


def wake_assignment(pool: Any) -> None:
    with pool.assignment._condition:
        pool.assignment._condition.notify_all()


#: Threads, and what makes them run Python code soon.
THREADS: dict[str, Callable[[Any], Any]] = {
    "NodePool": lambda pool: pool._wake.set(),
    "PoolWorker-assignment": wake_assignment,
    "PoolWorker-min-ready": lambda pool: pool.min_ready.wake(),
    "CleanupWorker": lambda pool: pool.cleanup.wake(),
    "CleanupWorker-probes": lambda pool: pool.probes.check_soon("1"),
    "CleanupWorker-rotation": lambda pool: pool.rotation.queue.add("label"),
    "CleanupWorker-verification": lambda pool: pool.verification.wake(),
    "StatsWorker": lambda pool: pool.statistics.wake(),
    "DeletedNodeWorker": lambda pool: pool.node_reconciler.check_soon("1"),
    POOL_WORKER: wake_worker,
    "ThreadPoolExecutor zookeeper connection": lambda pool: None,
}


@pytest.mark.spec("issue 11: a thread that must live and has ended is noticed")
@pytest.mark.parametrize("name", sorted(THREADS))
def test_each_thread_of_the_launcher(bench: LauncherBench, name: str) -> None:
    ends = threading.Event()
    pool = bench.start(config(provider()))
    pool.watchdog.on_end = ends.set
    assert pool.getReadiness() == (True, [])
    before = {thread.name for thread in threading.enumerate()}
    assert name in before
    sessions = [pool.zk.client.client]
    for thread in threading.enumerate():
        # The bench has connections, too.
        if thread.name == name and (
            thread is sessions[0]._connection._connection_routine or "connection" not in name
        ):
            end_thread(thread)

    def ended() -> bool:
        THREADS[name](pool)
        return ends.is_set()

    wait_for(ended, what=f"the end of {name} is noticed")
    ready, lines = pool.getReadiness()
    assert not ready
    assert any(line.startswith("thread ") and "Unforeseen" in line for line in lines), lines


@pytest.mark.spec("issue 11: what ends in order is not taken for an accident")
def test_pools_that_go_and_come_are_no_accident(bench: LauncherBench) -> None:
    pool = bench.start(config(provider("one"), provider("two")))
    bench.config(config(provider("two"), provider("three")))
    wait_for(
        lambda: sorted(w.provider_name for w in pool.state.workers.values()) == ["three", "two"]
    )
    wait_for(lambda: "PoolWorker.one-main" not in {thread.name for thread in threading.enumerate()})
    assert pool.watchdog.ended == []
    bench.stop(pool)
    assert pool.watchdog.ended == []


@pytest.mark.spec("issue 11: /ready never says OK while requests cannot be served")
def test_not_ready_while_the_mirror_is_read(bench: LauncherBench) -> None:
    pool = bench.start(config(provider()))
    pool.zk.node_tree.synced.clear()
    assert pool.getReadiness() == (False, ["ZooKeeper: its content is being read"])
    pool.zk.node_tree.synced.set()
    assert pool.getReadiness() == (True, [])

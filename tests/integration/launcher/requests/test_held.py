"""A ready node that somebody locks at the last moment is kept, and holds nobody up
(LAU-5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nodepool.launcher.cleanup import LostRequests
from nodepool.zk import paths
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider

HELD = "issue 11, users 5: a node that somebody holds is given away"


def just_before(
    pool: Any, monkeypatch: pytest.MonkeyPatch, path: str, act: Callable[[], Any]
) -> None:
    """``act`` happens after the launcher's decision to write ``path`` and before its
    transaction.
    """
    submit, done = pool.zk.writer.submit, []

    def late(txn: Any, *args: Any) -> None:
        if not done and any(
            getattr(operation, "path", "").endswith(path) for operation in txn.operations
        ):
            done.append(1)
            act()
        submit(txn, *args)

    monkeypatch.setattr(pool.zk.writer, "submit", late)


@pytest.mark.spec(HELD)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("labels", [1, 2])
def test_a_node_that_is_locked_at_the_last_moment(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, before: bool, labels: int
) -> None:
    """One that was never locked, or was; a request that is served by ready nodes only, or by a
    new one, too.
    """
    pool = bench.start(config(provider()))
    idle = bench.ready_node("fake-provider", "main", "fake-label")
    wait_for(lambda: pool.zk.getCachedNode(idle.id))
    if before:
        bench.zuul.lock(idle.id)
        bench.zuul.unlock(idle.id)
        wait_for(
            lambda: (
                idle.id in pool.zk.node_tree.lock_dirs and not pool.zk.node_tree.is_locked(idle.id)
            )
        )
    just_before(pool, monkeypatch, paths.node(idle.id), lambda: bench.zuul.lock(idle.id))
    _request, nodes = bench.fulfilled(*["fake-label"] * labels)
    assert bench.zuul.locks, "locked in time"
    assert idle.id not in [node.id for node in nodes] and len(nodes) == labels
    assert bench.node(idle.id).allocated_to is None


@pytest.mark.spec(
    HELD + "; one whose lock directory we do not know yet, but which is free, is taken all the same"
)
@pytest.mark.parametrize("labels", [1, 2])
def test_a_lock_directory_that_our_copy_does_not_know(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, labels: int
) -> None:
    pool = bench.start(config(provider()))
    idle = bench.ready_node("fake-provider", "main", "fake-label")
    wait_for(lambda: pool.zk.getCachedNode(idle.id))

    def was_locked() -> None:
        bench.zuul.lock(idle.id)
        bench.zuul.unlock(idle.id)

    just_before(pool, monkeypatch, paths.node(idle.id), was_locked)
    _request, nodes = bench.fulfilled(*["fake-label"] * labels)
    assert idle.id in [node.id for node in nodes]


@pytest.mark.spec(HELD + "; the same for one that is too old: it is deleted when nobody holds it")
@pytest.mark.parametrize("held", [False, True])
def test_a_node_that_is_locked_before_it_expires(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    pool = bench.start(config(provider(), labels={"fake-label": {"max-ready-age": 3600}}))

    def lock() -> None:
        bench.zuul.lock(old.id)
        if not held:
            bench.zuul.unlock(old.id)

    old = bench.ready_node("fake-provider", "main", "fake-label")
    wait_for(lambda: pool.zk.getCachedNode(old.id))
    just_before(pool, monkeypatch, paths.node(old.id), lock)
    bench.zuul.write_node(old.id, state_time=1.0)
    if held:
        wait_for(lambda: bench.zuul.locks)
        wait_for(lambda: pool.zk.node_tree.is_locked(old.id))
        assert bench.node(old.id).state == "ready"
        bench.zuul.unlock(old.id)
    bench.wait_gone(old.id)


@pytest.mark.spec(HELD + "; the same when the oldest idle node is to make room")
@pytest.mark.parametrize("held", [False, True])
def test_a_node_that_is_locked_before_it_is_deleted_for_capacity(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    pool = bench.start(config(provider()))
    idle = bench.ready_node("fake-provider", "main", "fake-label")
    wait_for(lambda: pool.zk.getCachedNode(idle.id))

    def lock() -> None:
        bench.zuul.lock(idle.id)
        if not held:
            bench.zuul.unlock(idle.id)

    just_before(pool, monkeypatch, paths.node(idle.id), lock)
    assert pool.zk.deleteOldestUnusedNode("fake-provider", "main") == (not held)
    if held:
        assert bench.node(idle.id).state == "ready"
    else:
        bench.wait_gone(idle.id)


@pytest.mark.spec(
    HELD + "; the same for nodes of a request that nobody holds any more; the request goes on"
)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_node_that_is_locked_before_its_lost_request_is_reset(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, held: bool, before: bool
) -> None:
    with (
        monkeypatch.context() as early
    ):  # the first pass of a launcher checks all pending requests, and may come at any time
        early.setattr(LostRequests, "run", lambda *_args: None)
        pool = bench.start(config(provider()), cleanup_interval=1000)
        lost = bench.submit("fake-label", "fake-label", state="pending")
        ours, theirs = (
            bench.ready_node("fake-provider", "main", "fake-label", allocated_to=lost)
            for _ in range(2)
        )
        if before:
            bench.zuul.lock(theirs.id)
            bench.zuul.unlock(theirs.id)
            wait_for(
                lambda: (
                    theirs.id in pool.zk.node_tree.lock_dirs
                    and not pool.zk.node_tree.is_locked(theirs.id)
                )
            )
        wait_for(lambda: pool.zk.getCachedNode(ours.id) and pool.zk.getCachedNode(theirs.id))

        def lock() -> None:
            bench.zuul.lock(theirs.id)
            if not held:
                bench.zuul.unlock(theirs.id)

        just_before(pool, monkeypatch, paths.node(theirs.id), lock)
    pool.cleanup.wake()
    nodes = bench.wait_request(lost, "fulfilled")["nodes"]
    assert ours.id in nodes
    assert (theirs.id in nodes) == (not held)
    if held:
        assert bench.node(theirs.id).stat.version == 0, "not written"

"""Drains: nothing new there, running nodes finish, idle ones are deleted."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nodepool.zk.drains import Drain
from nodepool.zk.mirror import notes
from tests.conftest import wait_for
from tests.support.deadline import limit
from tests.support.launcher import LauncherBench, config, provider, reason_for
from tests.world.directed.test_metastatic import end, get, setup


def drain(bench: LauncherBench, kind: str, target: str, **values: Any) -> Drain:
    found = Drain(kind, target, time.time(), **values)
    notes.write(bench.zk.kazoo_client, found)
    return found


def undrain(bench: LauncherBench, found: Drain) -> None:
    assert notes.remove(bench.zk.kazoo_client, found)


def wait_reason(bench: LauncherBench, request: str, text: str) -> None:
    wait_for(lambda: text in reason_for(bench.pools[0].assignment, request), what=text)


PLACES = [("provider", "fake-provider"), ("pool", "fake-provider-main"), ("label", "fake-label")]


@pytest.mark.parametrize(("kind", "target"), PLACES)
def test_drained_place_loses_idle_nodes_only_and_gets_no_new_ones(
    bench: LauncherBench, kind: str, target: str
) -> None:
    launcher = bench.start(
        config(
            provider(), provider("fake-other", labels=["other-label"]), labels={"fake-label": {}}
        )
    )
    request, _nodes = bench.fulfilled("fake-label")
    (used,) = bench.zuul.accept(request)
    idle = bench.ready_node("fake-provider", "main", "fake-label")
    found = drain(bench, kind, target, reason="new disks")
    bench.wait_gone(idle.id)
    assert bench.node(used).state == "in-use"
    waiting = bench.submit("fake-label")
    wait_reason(bench, waiting, f"{kind} {target} is drained: new disks")
    bench.fulfilled("other-label")
    assert [node.state for node in bench.nodes(provider="fake-provider")] == ["in-use"]
    undrain(bench, found)
    bench.wait_request(waiting, "fulfilled")
    assert launcher.zk.note_tree.of(Drain) == []


def test_drained_launcher_leaves_its_idle_nodes_to_others(bench: LauncherBench) -> None:
    from nodepool.base import hostnames

    bench.start(config(provider()))
    idle = bench.ready_node("fake-provider", "main", "fake-label")
    drain(bench, "launcher", hostnames.short())
    wait_reason(bench, bench.submit("fake-label"), "is drained")
    assert bench.node(idle.id).state == "ready"


def test_request_goes_to_a_pool_that_is_not_drained(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider("fake-first", priority=1), provider("fake-second"), labels={"fake-label": {}}
        )
    )
    found = drain(bench, "provider", "fake-first")
    wait_for(
        lambda: all(
            p.paused for p in bench.zk.getRegisteredPools() if p.provider_name == "fake-first"
        ),
        what="paused for launchers of 11.0.0",
    )
    _request, (node,) = bench.fulfilled("fake-label")
    assert node.provider == "fake-second"
    undrain(bench, found)
    wait_for(lambda: not any(p.paused for p in bench.zk.getRegisteredPools()))
    _request, (node,) = bench.fulfilled("fake-label")
    assert node.provider == "fake-first"


def test_kept_idle_node_is_assigned_after_the_drain_only(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    idle = bench.ready_node("fake-provider", "main", "fake-label")
    found = drain(bench, "provider", "fake-provider", keep_idle=True)
    waiting = bench.submit("fake-label")
    wait_reason(bench, waiting, "is drained")
    assert bench.node(idle.id).allocated_to is None
    undrain(bench, found)
    assert bench.wait_request(waiting, "fulfilled")["nodes"] == [idle.id]


def test_drain_ends_at_its_time(bench: LauncherBench) -> None:
    launcher = bench.start(config(provider()), cleanup_interval=None)
    began = time.time()
    drain(bench, "provider", "fake-provider", until=began + 90)
    waiting = bench.submit("fake-label")
    wait_reason(bench, waiting, "is drained until ")
    bench.wait_request(waiting, "fulfilled", timeout=120)
    assert 90 <= time.time() - began < limit(10) + 90
    assert launcher.zk.note_tree.of(Drain) == []


def test_request_that_waits_for_quota_is_released(bench: LauncherBench) -> None:
    bench.quota(instances=1)
    bench.start(config(provider()))
    bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    drain(bench, "provider", "fake-provider")
    bench.wait_request(waiting, "requested")
    wait_reason(bench, waiting, "provider fake-provider is drained")


def test_min_ready_nodes_are_not_launched_again(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider("fake-first", priority=1),
            provider("fake-second"),
            labels={"fake-label": {"min-ready": 2}},
        )
    )
    bench.wait_nodes(2, state="ready", provider="fake-first")
    found = drain(bench, "provider", "fake-first")
    bench.wait_nodes(2, state="ready", provider="fake-second")
    wait_for(lambda: not bench.nodes(provider="fake-first"))
    drain(bench, "provider", "fake-second")
    wait_for(lambda: not bench.nodes())
    assert bench.zk.getNodeRequests() == []
    undrain(bench, found)
    bench.wait_nodes(2, state="ready", provider="fake-first")


def test_nodes_of_a_drained_host_are_neither_assigned_nor_kept(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    kept = drain(bench, "host", "rack-1", keep_idle=True)
    idle = bench.ready_node("fake-provider", "main", "fake-label", host_id="rack-1")
    _request, (node,) = bench.fulfilled("fake-label")
    assert node.id != idle.id
    assert bench.node(idle.id).state == "ready"
    undrain(bench, kept)
    drain(bench, "host", "rack-1")
    bench.wait_gone(idle.id)


def test_backing_node_of_a_drained_provider_gets_no_more_slots(bench: LauncherBench) -> None:
    bench.start(setup())
    used = get(bench)
    (backing,) = bench.nodes(provider="fake-provider")
    found = drain(bench, "provider", "fake-provider")
    waiting = bench.submit("user-label")
    wait_for(lambda: [r for r in bench.zk.nodeRequestIterator() if r.node_types != ["user-label"]])
    end(bench, used)
    bench.wait_gone(backing.id)
    undrain(bench, found)
    bench.wait_request(waiting, "fulfilled")

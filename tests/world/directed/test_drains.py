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
from tests.world.directed.test_metastatic import end, get, setup, slot


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
    wait_reason(bench, waiting, "meta-provider-main: provider fake-provider is drained")
    end(bench, used)
    bench.wait_gone(backing.id)
    undrain(bench, found)
    bench.wait_request(waiting, "fulfilled")


def static(*hosts: dict[str, Any], **options: Any) -> dict[str, Any]:
    pools = [{"name": "main", "nodes": list(hosts)}]
    return {"name": "static", "driver": "static", "pools": pools, **options}


def test_pool_of_another_launcher_serves_what_a_drained_host_does_not(bench: LauncherBench) -> None:
    """That launcher does not know the hosts of this one."""
    hosts = static({"name": "fake-host-1", "labels": ["both"]}, priority=10)
    cloud = provider("fake-cloud", labels=["both"], priority=20)
    bench.start({"labels": [{"name": "both"}], "providers": [hosts]}, name="one.yaml")
    bench.start(config(cloud), name="two.yaml")
    wait_for(lambda: all(len(each.zk.getRegisteredPools()) == 2 for each in bench.pools))
    (idle,) = bench.wait_nodes(1, state="ready")
    found = drain(bench, "host", "fake-host-1")
    wait_for(lambda: all(each.state.drains.all() for each in bench.pools))
    _request, (node,) = bench.fulfilled("both")
    assert node.provider == "fake-cloud"
    assert bench.node(idle.id).state == "ready", "the machine remains"
    undrain(bench, found)
    wait_for(lambda: not any(each.state.drains.all() for each in bench.pools))
    wait_for(lambda: not any(each.full_labels for each in bench.zk.getRegisteredPools()))
    request, _nodes = bench.fulfilled("both")
    assert bench.zuul.request(request)["nodes"] == [idle.id]


def test_one_of_two_entries_of_a_static_host_is_drained(bench: LauncherBench) -> None:
    entries = [
        {"name": "fake-host-1", "labels": ["a"], "username": name} for name in ("one", "two")
    ]
    launcher = bench.start({"labels": [{"name": "a"}], "providers": [static(*entries)]})
    bench.wait_nodes(2, state="ready")
    drain(bench, "host", "one@fake-host-1 port 22")
    wait_for(lambda: launcher.state.drains.all())
    _request, (node,) = bench.fulfilled("a")
    assert node.username == "two"
    waiting = bench.submit("a")
    wait_reason(bench, waiting, "no free node of a")


def test_drained_image_reaches_slots_of_its_backing_nodes(bench: LauncherBench) -> None:
    bench.start(setup())
    used = get(bench)
    (backing,) = bench.nodes(provider="fake-provider")
    path = "/nodepool/images/noble/builds/b/providers/fake-provider/images/0"
    bench.zuul.write_node(backing.id, image_id=path)
    drain(bench, "image", "noble")
    end(bench, used)
    bench.wait_gone(backing.id)


def test_kept_idle_nodes_do_not_count_as_min_ready(bench: LauncherBench) -> None:
    options = {"min-ready": 1, "shrink-ready": False}
    bench.start(config(provider(), labels={"fake-label": options}))
    (kept,) = bench.wait_nodes(1, state="ready")
    bench.zuul.write_node(kept.id, host_id="rack-1")
    found = drain(bench, "host", "rack-1", keep_idle=True)
    bench.wait_nodes(2, state="ready", allocated_to=None)
    undrain(bench, found)
    time.sleep(60)
    assert len(bench.nodes(state="ready")) == 2


def test_request_that_waits_is_released_when_all_hosts_are_drained(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.quota(instances=1)
    launcher = bench.start(config(provider()))
    bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    manager = launcher.getProviderManager("fake-provider")
    monkeypatch.setattr(manager, "describeHosts", lambda: [{"name": "h0"}, {"name": "h1"}])
    drain(bench, "host", "h0")
    drain(bench, "host", "h1")
    bench.wait_request(waiting, "requested")
    wait_reason(bench, waiting, "host h0 is drained")


def test_driver_that_cannot_describe_its_hosts_is_not_affected(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = bench.start(config(provider()))

    def fail() -> Any:
        raise ValueError("bad driver")

    monkeypatch.setattr(launcher.getProviderManager("fake-provider"), "describeHosts", fail)
    drain(bench, "host", "elsewhere")
    wait_for(lambda: launcher.state.drains.all())
    bench.fulfilled("fake-label")


def test_idle_backing_node_is_kept_for_its_grace_time(bench: LauncherBench) -> None:
    bench.start(setup(slot(**{"grace-time": 600})))
    used = get(bench)
    (backing,) = bench.nodes(provider="fake-provider")
    drain(bench, "provider", "fake-provider", keep_idle=True)
    end(bench, used)
    time.sleep(60)
    assert bench.node(backing.id).state == "in-use"

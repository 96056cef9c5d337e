"""Tenant limits: deferred, never declined; other tenants pass by (LAU-8.4)."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.launcher.requests.tenants import tenant_shortage
from nodepool.reasons import Code, because
from nodepool.zk.zookeeper import NodeRequest
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, StatsdReceiver, config, provider, reason_for

VOLUME = {"boot-from-volume": True, "volume-size": 40}
SPEC = "LAU-21: "


def waits(bench: LauncherBench, pool: Any, request_id: str) -> None:
    """The request has been checked and is waiting for its tenant."""
    wait_for(
        lambda: "tenant" in reason_for(pool.assignment, request_id), what="waiting for the tenant"
    )
    record = bench.zuul.request(request_id)
    assert record is not None and record["state"] == "requested" and not record.get("declined_by")


@pytest.mark.spec(SPEC + "{cores,instances,ram,volumes,volume_gb}; OST-3.13")
@pytest.mark.parametrize(
    ("limit", "label", "gauge"),
    [
        ({"max-cores": 8}, {}, "cores:8"),
        ({"max-servers": 2}, {}, "instances:2"),
        ({"max-ram": 16384}, {}, "ram:16384"),
        ({"max-volumes": 2}, VOLUME, "volumes:2"),
        ({"max-volume-gb": 80}, VOLUME, "volume-gb:80"),
    ],
)
def test_request_waits_for_limits_of_its_tenant(
    bench: LauncherBench,
    statsd: StatsdReceiver,
    limit: dict[str, int],
    label: dict[str, Any],
    gauge: str,
) -> None:
    pool = bench.start(
        config(
            provider(label=label),
            **{"tenant-resource-limits": [{"tenant-name": "tenant-1", **limit}]},
        )
    )
    first = bench.submit("fake-label", "fake-label", tenant_name="tenant-1")
    bench.wait_request(first, "fulfilled")
    second = bench.submit("fake-label", "fake-label", tenant_name="tenant-1")
    waits(bench, pool, second)
    bench.fulfilled(*["fake-label"] * 4, tenant_name="tenant-2")
    waits(bench, pool, second)
    assert not bench.nodes(allocated_to=second)
    name, value = gauge.split(":")
    statsd.wait(f"nodepool.tenant_limits.tenant-1.{name}", f"{value}|g")
    node_ids = bench.zuul.accept(first)
    bench.zuul.give_back(node_ids[0])
    bench.wait_gone(node_ids[0])
    assert bench.zuul.request(second)["state"] == "requested"
    bench.zuul.give_back(node_ids[1])
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec(SPEC + "min_ready")
def test_idle_nodes_do_not_lift_the_limit(bench: LauncherBench) -> None:
    pool = bench.start(
        config(
            provider(),
            labels={"fake-label": {"min-ready": 2}},
            **{"tenant-resource-limits": [{"tenant-name": "tenant-1", "max-cores": 8}]},
        )
    )
    bench.wait_nodes(2, state="ready", allocated_to=None)
    first, _nodes = bench.fulfilled("fake-label", "fake-label", tenant_name="tenant-1")
    bench.wait_nodes(2, state="ready", allocated_to=None)
    second = bench.submit("fake-label", "fake-label", tenant_name="tenant-1")
    waits(bench, pool, second)
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec("LAU-8.4: an idle node counts for no tenant, whoever had it before")
def test_nodes_of_a_withdrawn_request_do_not_count(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider(labels=["one", "two"]),
            **{"tenant-resource-limits": [{"tenant-name": "tenant-1", "max-servers": 1}]},
        )
    )
    withdrawn = bench.submit("one", tenant_name="tenant-1")
    bench.wait_nodes(1, state="building")
    bench.zuul.cancel(withdrawn)
    (idle,) = bench.wait_nodes(1, state="ready", allocated_to=None)
    assert idle.tenant_name == "tenant-1", "as with release 11.0.0"
    bench.fulfilled("two", tenant_name="tenant-1")
    waiting = bench.submit("one", tenant_name="tenant-1")
    waits(bench, bench.pools[0], waiting)


@pytest.mark.spec(
    "LAU-8.4: over all providers; accepted but unrecorded nodes count; others pass by"
)
def test_the_limit_holds_over_providers_and_under_load(bench: LauncherBench) -> None:
    pool = bench.start(
        config(
            provider("fake-one"),
            provider("fake-two"),
            **{"tenant-resource-limits": [{"tenant-name": "tenant-1", "max-servers": 3}]},
        )
    )
    ids = [bench.submit("fake-label", tenant_name="tenant-1") for _ in range(12)]
    free = [bench.submit("fake-label") for _ in range(3)]
    served: set[str] = set()
    while len(served) < len(ids):
        done = [i for i in ids if i not in served and bench.zuul.request(i)["state"] == "fulfilled"]
        assert len(bench.nodes(tenant_name="tenant-1")) <= 3
        if not done:
            left = [i for i in ids if i not in served]
            wait_for(
                lambda left=left: any(  # type: ignore[misc]
                    bench.zuul.request(i)["state"] == "fulfilled" for i in left
                )
            )
            continue
        bench.use_up(*done)
        served |= set(done)
    for request_id in free:
        bench.wait_request(request_id, "fulfilled")
    assert not pool.zk.reservations.tenant("tenant-1").get("instances")


@pytest.mark.spec(
    "LAU-8.4: deferred even when it can never fit; the limit follows the configuration"
)
def test_a_raised_limit_lets_waiting_requests_go(bench: LauncherBench) -> None:
    limited = {"tenant-resource-limits": [{"tenant-name": "t", "max-servers": 1, "something": 7}]}
    pool = bench.start(config(provider(), **limited))
    request_id = bench.submit("fake-label", "fake-label", tenant_name="t")
    waits(bench, pool, request_id)
    limited["tenant-resource-limits"][0]["max-servers"] = 2
    bench.config(config(provider(), **limited))
    bench.wait_request(request_id, "fulfilled")


@pytest.mark.spec("LAU-8.4: a node that another launcher gives to another tenant makes room")
def test_a_node_goes_to_another_tenant(bench: LauncherBench) -> None:
    pool = bench.start(
        config(
            provider(),
            **{"tenant-resource-limits": [{"tenant-name": "tenant-1", "max-servers": 1}]},
        )
    )
    _first, (node,) = bench.fulfilled("fake-label", tenant_name="tenant-1")
    second = bench.submit("fake-label", tenant_name="tenant-1")
    waits(bench, pool, second)
    other = bench.submit("fake-label", tenant_name="tenant-2", state="fulfilled", nodes=[node.id])
    taken = bench.node(node.id)
    taken.tenant_name, taken.allocated_to = "tenant-2", other
    bench.zk.storeNode(taken)
    bench.wait_request(second, "fulfilled")


def test_static_nodes_count_for_launchers_without_their_provider(bench: LauncherBench) -> None:
    limited = {"tenant-resource-limits": [{"tenant-name": "t", "max-servers": 3}]}
    host = {
        "name": "fake-host",
        "labels": ["host"],
        "max-parallel-jobs": 2,
        "host-key-checking": False,
        "connection-type": "winrm",
    }
    static = {"name": "static", "driver": "static", "pools": [{"name": "main", "nodes": [host]}]}
    bench.start({"labels": [{"name": "host"}], "providers": [static], **limited}, name="one.yaml")
    cloud = bench.start(config(provider(), **limited), name="two.yaml")
    bench.wait_nodes(2, state="ready")
    hosts = [bench.fulfilled("host", tenant_name="t")[0] for _ in range(2)]
    wait_for(lambda: sum(cloud.zk.node_tree.unmeasured.tenants["t"].values()) == 2)
    bench.fulfilled("fake-label", tenant_name="t")
    last = bench.submit("fake-label", tenant_name="t")
    expected = "tenant t is limited to 3 instances, 3 in use"
    wait_for(lambda: expected in reason_for(cloud.assignment, last), what="the reason")
    for pool in bench.pools:
        shown = pool.reporter.compose()["tenants"]["t"]
        assert (shown["limits"], shown["used"]["instances"]) == ({"instances": 3}, 3), (
            "what the page of tenants shows"
        )
    bench.use_up(hosts[0])
    bench.wait_request(last, "fulfilled")


def test_node_recorded_during_the_check_counts(bench: LauncherBench) -> None:
    pool = bench.start(
        config(provider(), **{"tenant-resource-limits": [{"tenant-name": "t", "max-servers": 1}]})
    )
    reservations, tree = pool.zk.reservations, pool.zk.node_tree
    reservations.reserve("promise", None, None, "t", {"instances": 1})
    real = reservations.tenant

    def recorded_meanwhile(tenant: str) -> Any:
        bench.ready_node(
            "fake-provider",
            "main",
            "fake-label",
            tenant_name="t",
            state="hold",
            resources={"instances": 1},
        )
        wait_for(lambda: tree.measured.tenants["t"]["instances"] == 1)
        reservations.release("promise")
        return real(tenant)

    bench.monkeypatch.setattr(reservations, "tenant", recorded_meanwhile)
    worker = pool.getPoolWorkers("fake-provider")[0]
    request = NodeRequest("200-0000000001")
    request.node_types, request.tenant_name = ["fake-label"], "t"
    limits = pool.config.tenant_resource_limits["t"]
    short = tenant_shortage(
        pool.state, request, limits, worker.getPoolConfig(), worker.getProviderManager(), "key"
    )
    assert short is not None and short.includes(because(Code.TENANT_LIMIT, used=1))

"""Limits, refusals and failures of creations in a real OpenStack (OST-3.11 to OST-3.17)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.fault_proxy import Forward, Reply, html, reply
from tests.support.fault_proxy import Request as ProxiedRequest
from tests.support.launcher import LauncherBench, StatsdReceiver, reason_for
from tests.support.openstack.cloud import OpenStackCloud
from tests.support.openstack.scene import (
    cleanup,
    failed,
    is_call,
    label,
    manager,
    one,
    provider,
    start,
    use_up,
)

pytestmark = [pytest.mark.openstack, pytest.mark.slow, pytest.mark.timeout(400)]
VOLUME = {"boot_from_volume": True, "volume_size": 2}


@pytest.fixture(autouse=True)
def fresh_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the cloud are asked for again soon."""
    monkeypatch.setattr("nodepool.driver.utils.MAX_QUOTA_AGE", 0.5)


def count_invalidations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the providers whose knowledge of quota was dropped."""
    from nodepool.driver.statemachine import StateMachineProvider

    seen: list[str] = []
    original: Callable[[Any], None] = StateMachineProvider.invalidateQuotaCache
    monkeypatch.setattr(
        StateMachineProvider,
        "invalidateQuotaCache",
        lambda self: (seen.append(self.provider.name), original(self))[1],
    )
    return seen


def two_then_two(bench: LauncherBench, cloud: OpenStackCloud) -> None:
    """Two nodes fit: the second request for two waits, and gets its nodes one by one."""
    (worker,) = bench.pools[0].state.workers.values()
    first = bench.submit("small", "small")
    bench.wait_request(first, "fulfilled", timeout=90)
    second = bench.submit("small", "small")
    wait_for(lambda: worker.paused_handlers, 60, "the pool is paused")
    nodes = bench.zuul.accept(first)
    assert {server["id"] for server in cloud.servers()} == {
        bench.node(node).external_id for node in nodes
    }
    bench.zuul.give_back(nodes[0])
    bench.wait_gone(nodes[0], timeout=60)
    wait_for(
        lambda: bench.nodes(allocated_to=second, state="ready"),
        60,
        "the first node of the second request",
    )
    assert bench.zuul.request(second)["state"] == "pending"
    assert worker.paused_handlers
    bench.zuul.give_back(nodes[1])
    record = bench.wait_request(second, "fulfilled", timeout=90)
    assert len(set(record["nodes"])) == 2
    assert cloud.calls()["compute POST /servers"] == 4
    wait_for(lambda: not worker.paused_handlers, 60, "the pool goes on")


@pytest.mark.spec(
    "OST-3.11: limits of the pool for cores, servers, RAM, volumes, volume GB, node by node"
)
@pytest.mark.parametrize(
    ("limit", "options"),
    [
        ({"max-cores": 2}, {}),
        ({"max-servers": 2}, {}),
        ({"max-ram": 1024}, {}),
        ({"max-volumes": 2}, VOLUME),
        ({"max-volume-gb": 4}, VOLUME),
    ],
    ids=["cores", "servers", "ram", "volumes", "gigabytes"],
)
def test_request_waits_for_limits_of_the_pool(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    limit: dict[str, int],
    options: dict[str, Any],
) -> None:
    start(bench, openstack_cloud, provider(label(**options), pool=limit))
    two_then_two(bench, openstack_cloud)


@pytest.mark.spec("OST-3.12: limits of the cloud, two nodes at a time")
@pytest.mark.parametrize(
    ("limit", "options"),
    [
        ({"cores": 2}, {}),
        ({"instances": 2}, {}),
        ({"ram": 1024}, {}),
        ({"volumes": 2}, VOLUME),
        ({"gigabytes": 4}, VOLUME),
    ],
    ids=["cores", "instances", "ram", "volumes", "gigabytes"],
)
def test_request_waits_for_limits_of_the_cloud(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    limit: dict[str, int],
    options: dict[str, Any],
) -> None:
    with openstack_cloud.quota(**limit):
        start(bench, openstack_cloud, provider(label(**options)))
        two_then_two(bench, openstack_cloud)


@pytest.mark.spec(
    "OST-3.13: tenant limits for cores, instances, ram, volumes, volume-gb defer only that tenant"
)
@pytest.mark.parametrize(
    ("limit", "options", "gauge"),
    [
        ({"max-cores": 2}, {}, "cores:2"),
        ({"max-servers": 2}, {}, "instances:2"),
        ({"max-ram": 1024}, {}, "ram:1024"),
        ({"max-volumes": 2}, VOLUME, "volumes:2"),
        ({"max-volume-gb": 4}, VOLUME, "volume-gb:4"),
    ],
    ids=["cores", "servers", "ram", "volumes", "gigabytes"],
)
def test_tenant_limits_defer_only_that_tenant(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    statsd: StatsdReceiver,
    limit: dict[str, int],
    options: dict[str, Any],
    gauge: str,
) -> None:
    pool = start(
        bench,
        openstack_cloud,
        provider(label(**options)),
        top={"tenant-resource-limits": [{"tenant-name": "tenant-1", **limit}]},
    )

    def waits(request_id: str) -> None:
        wait_for(
            lambda: "tenant" in reason_for(pool.assignment, request_id),
            60,
            "waiting for the tenant",
        )
        record = bench.zuul.request(request_id)
        assert (record["state"], record.get("declined_by") or []) == ("requested", [])

    first = bench.submit("small", "small", tenant_name="tenant-1")
    bench.wait_request(first, "fulfilled", timeout=90)
    second = bench.submit("small", "small", tenant_name="tenant-1")
    waits(second)
    others = bench.submit("small", "small", tenant_name="tenant-2")
    bench.wait_request(others, "fulfilled", timeout=90)
    waits(second)
    assert not bench.nodes(allocated_to=second)
    name, value = gauge.split(":")
    statsd.wait(f"nodepool.tenant_limits.tenant-1.{name}", f"{value}|g", timeout=60)
    use_up(bench, first)
    bench.wait_request(second, "fulfilled", timeout=90)


@pytest.mark.spec(
    "OST-3.15: a server that fails for the quota of volumes is no failed attempt; the quota is "
    "asked for again"
)
@pytest.mark.parametrize("limit", [{"gigabytes": 3}, {"volumes": 1}], ids=["gigabytes", "volumes"])
def test_quota_of_volumes_met_by_the_server(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    statsd: StatsdReceiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: dict[str, int],
) -> None:
    """The compute service finds out while it builds the server: its fault shows it."""
    invalidated = count_invalidations(monkeypatch)
    caplog.set_level(logging.ERROR, "nodepool")
    with openstack_cloud.quota(**limit):
        start(
            bench,
            openstack_cloud,
            provider(label(**VOLUME), pool={"ignore-provider-quota": True}, launch_retries=1),
        )
        first, node = one(bench)
        second = bench.submit("small")
        statsd.wait_any("nodepool.launch.error.quota", 60)
        assert "in error state" in caplog.text
        assert invalidated
        record = bench.zuul.request(second)
        assert (record["state"], record["declined_by"]) == ("pending", [])
        use_up(bench, first)
        bench.wait_request(second, "fulfilled", timeout=120)
    wait_for(lambda: len(openstack_cloud.servers()) == 1, 60, "the failed servers are gone")
    assert node.external_id not in {server["id"] for server in openstack_cloud.servers()}


def in_error(message: str) -> Callable[[ProxiedRequest, Forward], Reply]:
    """The server's record as if it had failed."""

    def act(request: ProxiedRequest, forward: Forward) -> Reply:
        answer = forward(request)
        if answer.status == 200:
            content = json.loads(answer.body)
            content["server"].update(
                status="ERROR",
                fault={"code": 403, "created": "2026-01-01T00:00:00Z", "message": message},
            )
            answer.body = json.dumps(content).encode()
        return answer

    return act


@pytest.mark.spec(
    "OST-3.15: a creation that fails at once with a fault about quota pauses the pool"
)
@pytest.mark.parametrize(
    "message",
    [
        "Quota exceeded for cores: Requested 4, but already used 8 of 8 cores",
        "Claim exceeds available quota",
        "Maximum number of ports exceeded",
    ],
)
def test_creation_that_fails_for_quota_pauses_the_pool(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    statsd: StatsdReceiver,
    monkeypatch: pytest.MonkeyPatch,
    message: str,
) -> None:
    invalidated = count_invalidations(monkeypatch)
    start(bench, openstack_cloud, provider(launch_retries=1))
    openstack_cloud.compute.fail(
        is_call("GET /servers/{id}"), in_error(message), times=float("inf")
    )
    (worker,) = bench.pools[0].state.workers.values()
    request_id = bench.submit("small")
    statsd.wait_any("nodepool.launch.provider.cloud-1.error.quota", 60)
    wait_for(lambda: worker.paused_handlers, 60, "the pool is paused")
    record = bench.zuul.request(request_id)
    assert (record["state"], record["declined_by"]) == ("pending", [])
    assert set(invalidated) == {"cloud-1"}
    openstack_cloud.compute.heal()
    bench.wait_request(request_id, "fulfilled", timeout=90)
    wait_for(lambda: len(openstack_cloud.servers()) == 1, 90, "the failed servers are gone")


@pytest.mark.spec(
    "OST-3.16: two failing creations with launch-retries 2 fail the request, not the next one"
)
@pytest.mark.parametrize(
    "fault",
    [
        reply(
            500,
            '{"computeFault": {"code": 500, "message": "Unexpected API Error."}}',
            "application/json",
        ),
        html(503),
        reply(400, '{"badRequest": {"code": 400, "message": "made up"}}', "application/json"),
    ],
    ids=["500", "503", "400"],
)
def test_failing_creations_fail_one_request_only(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, fault: Any
) -> None:
    pool = start(bench, openstack_cloud, provider(launch_retries=2))
    refused = openstack_cloud.compute.fail(is_call("POST /servers"), fault, times=2)
    assert failed(bench)["declined_by"] == list(pool.state.workers)
    assert (refused.used, openstack_cloud.servers()) == (2, [])
    bench.wait_nodes(0, timeout=60)
    one(bench)
    openstack_cloud.compute.fail(is_call("POST /servers"), fault, times=1)
    one(bench)


@pytest.mark.spec(
    "OST-3.16: failures after the server got an id are cleaned up, the next request is served"
)
def test_failures_with_an_id(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    start(bench, openstack_cloud, provider(launch_retries=2), delete_interval=1000)
    broken = openstack_cloud.compute.fail(
        is_call("GET /servers/{id}"), in_error("made up"), times=float("inf")
    )
    failed(bench)
    openstack_cloud.compute.heal()
    assert openstack_cloud.calls()["compute POST /servers"] == 2
    assert broken.used
    one(bench)
    wait_for(lambda: len(openstack_cloud.servers()) == 1, 60, "the failed servers are gone")
    statsd.wait_any("nodepool.launch.error.status")
    assert statsd.last("nodepool.launch.error.unknown") is None


@pytest.mark.spec("OST-3.17: servers stuck in BUILD beyond launch-timeout fail the request")
def test_stuck_in_build(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    """The hypervisor does nothing for a while."""
    start(bench, openstack_cloud, provider(launch_retries=1, launch_timeout=4))
    with openstack_cloud.stopped("nova-compute"):
        failed(bench)
        (server,) = openstack_cloud.servers()
        assert server["status"] == "BUILD"
        statsd.wait_any("nodepool.launch.error.servercreatetimeout")
    wait_for(lambda: not openstack_cloud.servers(), 90, "the stuck server is gone")
    bench.wait_nodes(0, timeout=90)
    manager(bench).provider.launch_timeout = 120
    one(bench)
    cleanup(bench, 2)
    assert len(openstack_cloud.servers()) == 1

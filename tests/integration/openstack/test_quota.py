"""Quotas and capacity of a real OpenStack (OST-2.5 and OST-3.11 to OST-3.15)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, StatsdReceiver
from tests.support.openstack.cloud import OpenStackCloud
from tests.support.openstack.scene import failed, label, manager, one, provider, start, use_up

pytestmark = pytest.mark.openstack
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the cloud are asked for again soon."""
    monkeypatch.setattr("nodepool.driver.utils.MAX_QUOTA_AGE", 0.5)


def wait_paused(bench: LauncherBench) -> None:
    (worker,) = bench.pools[0].state.workers.values()
    wait_for(lambda: worker.paused_handlers, 20, "the pool is paused")


@pytest.mark.spec("OST-3.12: limits of the cloud make a request wait, node by node")
@pytest.mark.parametrize(
    "limits",
    [
        {"instances": 1},
        pytest.param({"cores": 1}, marks=slow),
        pytest.param({"ram": 1000}, marks=slow),
    ],
)
def test_limits_of_the_cloud_make_a_request_wait(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, limits: dict[str, int]
) -> None:
    with openstack_cloud.quota(**limits):
        start(bench, openstack_cloud)
        first, _ = one(bench)
        second = bench.submit("small")
        wait_paused(bench)
        assert len(openstack_cloud.servers()) == 1
        assert openstack_cloud.calls()["compute POST /servers"] == 1
        use_up(bench, first)
        bench.wait_request(second, "fulfilled", timeout=40)


@slow
@pytest.mark.spec("OST-3.12: limits of the cloud for volumes")
@pytest.mark.parametrize("limits", [{"volumes": 1}, {"gigabytes": 3}])
def test_volume_limits_of_the_cloud_make_a_request_wait(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, limits: dict[str, int]
) -> None:
    with openstack_cloud.quota(**limits):
        start(bench, openstack_cloud, provider(label(boot_from_volume=True, volume_size=2)))
        first, _ = one(bench)
        second = bench.submit("small")
        wait_paused(bench)
        use_up(bench, first)
        bench.wait_request(second, "fulfilled", timeout=60)


@slow
@pytest.mark.spec("OST-3.12: -1 means unlimited")
def test_limit_of_minus_one_means_unlimited(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    with openstack_cloud.quota(instances=-1, cores=-1, ram=-1):
        start(bench, openstack_cloud)
        one(bench)
        limits = manager(bench).getProviderLimits()
        assert {limits.get_resources()[name] for name in ("cores", "instances", "ram")} == {
            float("inf")
        }


@slow
@pytest.mark.spec(
    "OST-3.14: an over-quota error aborts, pauses, retries, also with ignore-provider-quota"
)
def test_over_quota_error_pauses_and_is_retried(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    with openstack_cloud.quota(instances=1):
        start(bench, openstack_cloud, provider(pool={"ignore-provider-quota": True}))
        first, _ = one(bench)
        second = bench.submit("small")
        statsd.wait_any("nodepool.launch.error.quota", 20)
        assert bench.zuul.request(second)["state"] == "pending"
        use_up(bench, first)
        bench.wait_request(second, "fulfilled", timeout=40)


@slow
@pytest.mark.spec("OST-2.3.2: number of ports exceeded is a matter of quota")
def test_exceeded_number_of_ports_counts_as_quota(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    admin, project = openstack_cloud.admin.network, openstack_cloud.sdk.session.get_project_id()
    start(bench, openstack_cloud)
    used = len(list(openstack_cloud.sdk.network.ports(project_id=project)))
    admin.update_quota(project, ports=used)
    try:
        request = bench.submit("small")
        statsd.wait_any("nodepool.launch.error.quota", 20)
    finally:
        admin.update_quota(project, ports=500)
    bench.wait_request(request, "fulfilled", timeout=60)


@slow
def test_request_is_declined_while_the_project_has_no_quota(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    """Requests are declined while the project may have nothing, and served when it may."""
    with openstack_cloud.quota(instances=0):
        start(bench, openstack_cloud)
        failed(bench)
        assert openstack_cloud.calls()["compute POST /servers"] == 0
    wait_for(
        lambda: manager(bench).estimatedNodepoolQuota().get_resources()["instances"] > 0,
        10,
        "quota seen",
    )
    one(bench)


@slow
@pytest.mark.spec("OST-2.5: a server of a deleted flavor counts as far as it is known")
def test_foreign_server_of_deleted_flavor(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    admin, sdk = openstack_cloud.admin, openstack_cloud.sdk
    flavor = admin.compute.create_flavor(name="gone", vcpus=3, ram=128, disk=1)
    foreign = sdk.compute.create_server(
        name="foreign",
        flavor_id=flavor.id,
        image_id=sdk.image.find_image("base").id,
        networks=[{"uuid": openstack_cloud.network_id("private")}],
    )
    sdk.compute.wait_for_server(foreign, interval=0.5, wait=60)
    admin.compute.delete_flavor(flavor)
    with caplog.at_level(logging.WARNING, "nodepool"):
        start(bench, openstack_cloud)
        one(bench)
        manager(bench).invalidateQuotaCache()
        used = manager(bench).unmanagedQuotaUsed().get_resources()
    assert used["instances"] == 1
    assert caplog.text.count("is unknown; its cores and RAM are not counted") == 1


@slow
def test_flavor_that_fits_on_no_machine_is_a_capacity_failure(
    bench: LauncherBench,
    openstack_cloud: OpenStackCloud,
    statsd: StatsdReceiver,
    huge: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A flavor that fits on no host: capacity, not quota; the failed server is removed."""
    with caplog.at_level(logging.ERROR, "nodepool"), openstack_cloud.quota(cores=-1, ram=-1):
        start(
            bench,
            openstack_cloud,
            provider(label("huge", flavor_name=huge), label(), launch_retries=2),
        )
        failed(bench, "huge")
        one(bench)
    statsd.wait_any("nodepool.launch.error.capacity")
    assert "No valid host" in caplog.text
    wait_for(lambda: len(openstack_cloud.servers()) == 1, 30, "the failed servers are gone")


@pytest.fixture
def huge(openstack_cloud: OpenStackCloud) -> Iterator[str]:
    flavor = openstack_cloud.admin.compute.create_flavor(name="huge", vcpus=50000, ram=512, disk=1)
    yield "huge"
    openstack_cloud.admin.compute.delete_flavor(flavor)

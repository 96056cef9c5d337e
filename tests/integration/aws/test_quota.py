"""Quota of the aws driver (AWS-2.7 and AWS-3.3 to AWS-3.6)."""

from __future__ import annotations

import pytest

from tests.conftest import wait_for
from tests.support.aws.cloud import AwsCloud
from tests.support.aws.scene import adapter, failed, one, start
from tests.support.fault_proxy import ec2_error
from tests.support.launcher import LauncherBench


def waits(bench: LauncherBench, label: str, **fields: object) -> str:
    """A request that is paused."""
    request_id = bench.submit(label, **fields)
    wait_for(
        lambda: any(
            handler.paused and handler.request.id == request_id
            for worker in bench.pools[0].getPoolWorkers("ec2-us")
            for handler in worker.request_handlers
        ),
        15,
        f"{label} is paused",
    )
    wait_for(lambda: bench.zuul.request(request_id)["state"] == "pending", 5, f"{label} is pending")
    return request_id


@pytest.mark.spec(
    "AWS-3.3: high-memory quota exhausted: the second waits, is served when the first is freed"
)
def test_request_waits_for_high_memory_quota(bench: LauncherBench, aws: AwsCloud) -> None:
    aws.like.quotas["ec2"] = {"L-1216C47A": 100, "L-43DA4232": 224}
    start(bench, aws, aws.label("high", instance_type="u-6tb1.56xlarge"), aws.label())
    first, _ = one(bench, "high")
    second = waits(bench, "high")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")
    assert len(aws.instances()) == 1


@pytest.mark.spec("AWS-3.3: a standard request is served although the high-memory quota is used up")
def test_high_memory_used_up(bench: LauncherBench, aws: AwsCloud) -> None:
    aws.like.quotas["ec2"] = {"L-1216C47A": 100, "L-43DA4232": 224}
    start(bench, aws, aws.label("high", instance_type="u-6tb1.56xlarge"), aws.label())
    one(bench, "high")
    one(bench, "small")
    assert len(aws.instances()) == 2


@pytest.mark.spec("AWS-3.4: spot and on-demand quotas are separate")
def test_spot_and_on_demand_quotas_are_separate(bench: LauncherBench, aws: AwsCloud) -> None:
    aws.like.quotas["ec2"] = {"L-1216C47A": 2, "L-34B43A08": 2}
    start(bench, aws, aws.label("normal"), aws.label("spot", use_spot=True))
    one(bench, "normal")
    spot, _ = one(bench, "spot")
    second = waits(bench, "spot")
    bench.use_up(spot)
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec("AWS-3.5: pool max-resources pauses")
def test_request_waits_for_max_resources_of_the_pool(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label(), pool={"max-resources": {"L-1216C47A": 2}})
    first, _ = one(bench)
    second = waits(bench, "small")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec(
    "AWS-3.5: tenant limits with a quota code defer that tenant's matching requests only"
)
def test_tenant_limit_defers_only_requests_of_that_tenant(
    bench: LauncherBench, aws: AwsCloud
) -> None:
    start(
        bench,
        aws,
        aws.label(),
        aws.label("spot", use_spot=True),
        top={"tenant-resource-limits": [{"tenant-name": "tenant-1", "L-1216C47A": 2}]},
    )
    first, _ = one(bench, tenant_name="tenant-1")
    second = bench.submit("small", tenant_name="tenant-1")
    one(bench, tenant_name="tenant-2")
    one(bench, "spot", tenant_name="tenant-1")
    assert bench.zuul.request(second)["state"] == "requested"
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec("AWS-3.6: volume storage (TB limit, GB use) pauses gp2 while gp3 still works")
def test_volume_quota_pauses_only_its_volume_type(bench: LauncherBench, aws: AwsCloud) -> None:
    aws.like.quotas["ebs"] = {"L-D18FCD1D": 1, "L-7A658B76": 1}
    start(
        bench,
        aws,
        aws.label("gp2", volume_type="gp2", volume_size=600),
        aws.label("gp3", volume_type="gp3", volume_size=600),
    )
    first, node = one(bench, "gp2")
    assert node.resources["L-D18FCD1D"] == 600
    second = waits(bench, "gp2")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec("AWS-3.6: gp3 still works when gp2 is full")
def test_volume_quota_of_another_type(bench: LauncherBench, aws: AwsCloud) -> None:
    aws.like.quotas["ebs"] = {"L-D18FCD1D": 1, "L-7A658B76": 1}
    start(
        bench,
        aws,
        aws.label("gp2", volume_type="gp2", volume_size=600),
        aws.label("gp3", volume_type="gp3", volume_size=600),
    )
    one(bench, "gp2")
    one(bench, "gp3")


@pytest.mark.spec("AWS-2.7: foreign instances use quota too")
def test_instances_of_others_use_quota(bench: LauncherBench, aws: AwsCloud) -> None:
    aws.like.quotas["ec2"] = {"L-1216C47A": 4}
    aws.ec2.run_instances(
        ImageId=aws.ami, MinCount=1, MaxCount=1, InstanceType="t3.medium", SubnetId=aws.subnet
    )
    start(bench, aws, aws.label())
    one(bench)
    waits(bench, "small")


def unmanaged(bench: LauncherBench) -> float:
    quota = bench.pools[0].getProviderManager("ec2-us").unmanagedQuotaUsed()
    return float(quota.get_resources().get("L-1216C47A", 0))


def test_what_others_use_is_requested_again(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer before may be hours old: it shows what is deleted meanwhile."""
    monkeypatch.setattr("nodepool.driver.aws.api.lookups.CACHE_TTL", 0)
    start(bench, aws)
    assert unmanaged(bench) == 0
    made = aws.ec2.run_instances(
        ImageId=aws.ami, MinCount=2, MaxCount=2, InstanceType="t3.medium", SubnetId=aws.subnet
    )
    assert unmanaged(bench) == 4
    aws.ec2.terminate_instances(InstanceIds=[each["InstanceId"] for each in made["Instances"]])
    assert unmanaged(bench) == 0


def test_deleted_nodes_are_not_what_others_use(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of a moment ago has them still, their records no longer exist."""
    monkeypatch.setattr("nodepool.driver.aws.api.lookups.CACHE_TTL", 600)
    start(bench, aws)
    request_id, _ = one(bench)
    adapter(bench).cloud._memo.forget(("instances",))
    assert unmanaged(bench) == 0
    bench.use_up(request_id)
    wait_for(lambda: not bench.pools[0].zk.getProviderNodes("ec2-us"), 10, "mirrored")
    assert [each["State"]["Name"] for each in adapter(bench).cloud.instances()] == ["running"], (
        "as it was"
    )
    assert unmanaged(bench) == 0


@pytest.mark.spec("AWS-2.6: quota errors of the launch abort the node and pause the request")
@pytest.mark.parametrize("code", ["VolumeLimitExceeded", "VcpuLimitExceeded"])
def test_quota_error_of_a_launch_pauses_the_request(
    bench: LauncherBench, aws: AwsCloud, code: str
) -> None:
    start(bench, aws, aws.label())
    fault = aws.proxy.fail("RunInstances", ec2_error(code))
    one(bench)
    assert fault.used == 1
    wait_for(lambda: len(bench.nodes()) == 1, 15, "the aborted node is removed")


@pytest.mark.spec("AWS-2.6: capacity errors are failed attempts")
def test_capacity_error_is_a_failed_attempt(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label(), launch_retries=2)
    aws.proxy.fail("RunInstances", ec2_error("InsufficientInstanceCapacity", 500), times=2)
    failed(bench)
    one(bench)


@pytest.mark.spec("AWS-2.6: no quota for dedicated hosts pauses")
def test_request_waits_for_quota_of_dedicated_hosts(bench: LauncherBench, aws: AwsCloud) -> None:
    aws.like.quotas["ec2"] = {"L-81657574": 1}
    start(
        bench,
        aws,
        aws.label(instance_type="c5.large", dedicated_host=True),
        pool={"availability-zone": "us-east-1a"},
    )
    first, node = one(bench)
    assert node.resources == {"cores": 0, "instances": 1, "ram": 0, "L-81657574": 1}
    second = waits(bench, "small")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")


@pytest.mark.spec(
    "AWS-3.4: an instance type of a family without known code is launched, with a warning"
)
def test_instance_type_of_an_unknown_family_is_launched(
    bench: LauncherBench,
    aws: AwsCloud,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from nodepool.driver.aws.quota_codes import INSTANCE_QUOTA_CODES

    monkeypatch.delitem(INSTANCE_QUOTA_CODES, "t")
    aws.like.quotas["ec2"] = {"L-1216C47A": 0}
    start(bench, aws, aws.label())
    _, node = one(bench)
    assert node.resources == {"cores": 1, "instances": 1, "ram": 4096}
    assert "Unknown quota code for instance type: t3.medium" in caplog.text


@pytest.mark.spec("AWS-3.22: use of a fleet's instance counts against the quota after the launch")
def test_instance_of_a_fleet_uses_quota_after_its_launch(
    bench: LauncherBench, aws: AwsCloud
) -> None:
    aws.like.quotas["ec2"] = {"L-1216C47A": 2}
    fleet = {"instance-types": ["t3.medium"], "allocation-strategy": "diversified"}
    start(bench, aws, aws.label("fleet", fleet=fleet), aws.label())
    first, node = one(bench, "fleet")
    assert node.resources["L-1216C47A"] == 2
    second = waits(bench, "small")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled")

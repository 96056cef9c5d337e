"""Nodes of the aws driver in a whole launcher (AWS-2 and AWS-3), against moto over HTTP."""

from __future__ import annotations

import base64
import threading
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.aws.cloud import REGION, AwsCloud
from tests.support.aws.scene import (
    adapter,
    all_gone,
    failed,
    instance,
    one,
    run_params,
    start,
    tags,
)
from tests.support.fault_proxy import ec2_error, hang, lose_answer
from tests.support.launcher import LauncherBench
from tests.support.node_ids import spend_node_ids


@pytest.mark.spec("AWS-3.7: fields of a node; deletion removes the instance")
def test_launched_node_has_its_fields_and_is_deleted(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label(), pool={"node-attributes": {"key1": "value1"}})
    request_id, node = one(bench)
    there = instance(aws, node)
    assert there["State"]["Name"] == "running"
    assert (node.state, node.cloud, node.region, node.az) == ("ready", "AWS", REGION, f"{REGION}a")
    assert (node.python_path, node.shell_type, node.username) == ("auto", None, "ubuntu")
    assert (node.connection_type, node.connection_port) == ("ssh", 22)
    assert node.interface_ip == node.public_ipv4 == there["PublicIpAddress"]
    assert node.private_ipv4 == there["PrivateIpAddress"]
    assert node.private_ipv4.startswith("10.0.1.")
    assert node.public_ipv6 is None
    assert node.host_keys == []
    assert node.image_id == "base"
    assert node.attributes == {"key1": "value1"}
    assert node.external_id == {"instance": there["InstanceId"]}
    assert node.node_properties == {"spot": False, "fleet": False}
    assert node.resources == {"cores": 1, "instances": 1, "ram": 4096, "L-1216C47A": 2}
    (params,) = run_params(aws)
    assert not [key for key in params if key.startswith("MetadataOptions")]
    assert params["NetworkInterface.1.SecurityGroupId.1"] == aws.group
    assert params["EbsOptimized"] == "false"
    bench.use_up(request_id)
    assert aws.instances() == []
    assert instance(aws, node)["State"]["Name"] == "terminated"


@pytest.mark.spec("AWS-3.2: four parallel requests succeed and are deleted")
def test_four_launches_run_concurrently(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label())
    requests = [bench.submit("small") for _ in range(4)]
    for request in requests:
        bench.wait_request(request, "fulfilled")
    assert len(aws.instances()) == 4
    bench.use_up(*requests)
    all_gone(aws)


@pytest.mark.spec("AWS-3.8: image filters in either capitalisation, the newest match")
def test_image_filters_choose_the_newest_match(bench: LauncherBench, aws: AwsCloud) -> None:
    newest = aws.ec2.register_image(Name="wanted", Architecture="x86_64", VirtualizationType="hvm")[
        "ImageId"
    ]
    start(
        bench,
        aws,
        aws.label("lower", cloud_image="lower"),
        aws.label("upper", cloud_image="upper"),
        aws.label("none", cloud_image="none"),
        cloud_images=[
            {
                "name": "lower",
                "username": "u",
                "image-filters": [{"name": "name", "values": ["wanted"]}],
            },
            {
                "name": "upper",
                "username": "u",
                "image-filters": [{"Name": "name", "Values": ["wan*"]}],
            },
            {
                "name": "none",
                "username": "u",
                "image-filters": [{"name": "name", "values": ["nothing"]}],
            },
        ],
    )
    for label in ("lower", "upper"):
        _, node = one(bench, label)
        assert instance(aws, node)["ImageId"] == newest
    failed(bench, "none")


@pytest.mark.spec("AWS-3.8: a bad AMI id fails the request")
def test_unknown_image_id_fails_the_request(bench: LauncherBench, aws: AwsCloud) -> None:
    start(
        bench,
        aws,
        aws.label(cloud_image="bad"),
        launch_retries=2,
        cloud_images=[{"name": "bad", "username": "u", "image-id": "ami-00000000000000bad"}],
    )
    failed(bench)


@pytest.mark.spec(
    "AWS-3.9: public-ip-address false gives a private address only, which is the interface address"
)
@pytest.mark.parametrize("key", ["public-ip-address", "public-ipv4"])
def test_node_without_public_address_uses_its_private_one(
    bench: LauncherBench, aws: AwsCloud, key: str
) -> None:
    start(bench, aws, aws.label(), pool={key: False})
    _, node = one(bench)
    assert node.public_ipv4 is None
    assert node.interface_ip == node.private_ipv4
    assert node.private_ipv4.startswith("10.0.1.")


@pytest.mark.spec("AWS-3.10: IPv6 asks for one address")
def test_ipv6_option_requests_one_address(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label(), pool={"public-ipv6": True})
    one(bench)
    assert run_params(aws)[0]["NetworkInterface.1.Ipv6AddressCount"] == "1"


def test_use_internal_ip(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label(), pool={"use-internal-ip": True})
    _, node = one(bench)
    assert node.public_ipv4
    assert node.interface_ip == node.private_ipv4


@pytest.mark.spec(
    "AWS-3.11: tags; values as text, Name is the hostname, dynamic tags, tenant None for min-ready"
)
def test_instances_have_static_and_dynamic_tags(bench: LauncherBench, aws: AwsCloud) -> None:
    label = aws.label(
        tags={"has-tags": True, "number": 3, "Name": "ignored", "nodepool_node_id": "ignored"},
        dynamic_tags={
            "dynamic-tenant": "Tenant is {request.tenant_name}",
            "bad": "{request.nothing_like_this}",
        },
    )
    start(bench, aws, label)
    request_id, node = one(bench, tenant_name="tenant-1")
    found = tags(instance(aws, node))
    assert found.pop("nodepool_cluster_id") and found.pop("nodepool_node_created").isdecimal()
    assert found == {
        "has-tags": "True",
        "number": "3",
        "Name": f"np{node.id}",
        "dynamic-tenant": "Tenant is tenant-1",
        "nodepool_node_id": node.id,
        "nodepool_pool_name": "main",
        "nodepool_provider_name": "ec2-us",
    }
    volumes = aws.ec2.describe_volumes(
        Filters=[{"Name": "attachment.instance-id", "Values": [node.external_id["instance"]]}]
    )
    assert {tags(volume)["nodepool_node_id"] for volume in volumes["Volumes"]} == {node.id}
    bench.use_up(request_id)


@pytest.mark.spec("AWS-3.11: dynamic tags of min-ready nodes have tenant None")
def test_min_ready_tags(bench: LauncherBench, aws: AwsCloud) -> None:
    content = aws.config(
        aws.provider(aws.label(dynamic_tags={"dynamic-tenant": "Tenant is {request.tenant_name}"}))
    )
    content["labels"] = [{"name": "small", "min-ready": 1}]
    bench.start(content, cleanup_interval=600)
    (node,) = bench.wait_nodes(1, state="ready")
    assert tags(instance(aws, node))["dynamic-tenant"] == "Tenant is None"


@pytest.mark.spec(
    "AWS-3.12: IAM profile by name and by ARN, ebs-optimized, userdata, shell type, IMDSv2 required"
)
def test_instance_gets_the_options_of_its_label(bench: LauncherBench, aws: AwsCloud) -> None:
    profile = aws.iam.create_instance_profile(InstanceProfileName="profile")["InstanceProfile"]
    try:
        start(
            bench,
            aws,
            aws.label("by-name", iam_instance_profile={"name": "profile"}),
            aws.label("by-arn", iam_instance_profile={"arn": profile["Arn"]}),
            aws.label(
                "rest",
                ebs_optimized=True,
                userdata="#!/bin/true",
                imdsv2="required",
                cloud_image="shell",
            ),
            cloud_images=[
                {"name": "base", "image-id": aws.ami, "username": "ubuntu"},
                {"name": "shell", "image-id": aws.ami, "username": "ubuntu", "shell-type": "csh"},
            ],
        )
        for label in ("by-name", "by-arn"):
            _, node = one(bench, label)
            assert instance(aws, node)["IamInstanceProfile"]["Arn"] == profile["Arn"]
        _, node = one(bench, "rest")
        there = instance(aws, node)
        assert there["EbsOptimized"] is True
        assert node.shell_type == "csh"
        assert there["MetadataOptions"]["HttpTokens"] == "required"
        data = aws.ec2.describe_instance_attribute(
            InstanceId=there["InstanceId"], Attribute="userData"
        )
        assert base64.b64decode(data["UserData"]["Value"]) == b"#!/bin/true"
    finally:
        aws.iam.delete_instance_profile(InstanceProfileName="profile")


def test_volume_groups_and_reservation(bench: LauncherBench, aws: AwsCloud) -> None:
    second = aws.new_group("second")
    start(
        bench,
        aws,
        aws.label(
            volume_type="gp3",
            volume_size=33,
            iops=3500,
            throughput=200,
            encrypted=True,
            kms_key_id="key-1",
            capacity_reservation={"id": "cr-1"},
        ),
        pool={"security-group-ids": [second]},
    )
    one(bench)
    (params,) = run_params(aws)
    device = {
        key.rpartition(".")[2]: value
        for key, value in params.items()
        if key.startswith("BlockDeviceMapping.1.Ebs.")
    }
    device.pop("SnapshotId")
    assert device == {
        "DeleteOnTermination": "true",
        "VolumeSize": "33",
        "VolumeType": "gp3",
        "Iops": "3500",
        "Throughput": "200",
        "Encrypted": "true",
        "KmsKeyId": "key-1",
    }
    assert [
        params["NetworkInterface.1.SecurityGroupId.1"],
        params["NetworkInterface.1.SecurityGroupId.2"],
    ] == [aws.group, second]
    assert (
        params["CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"]
        == "cr-1"
    )


@pytest.mark.spec("AWS-3.13: an invalid instance type fails only requests for that label")
def test_invalid_instance_type(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws, aws.label("bad", instance_type="nosuch.large"), aws.label())
    failed(bench, "bad")
    one(bench)
    assert bench.pools[0].getProviderManager("ec2-us").errorLabels() == {"bad"}


@pytest.mark.spec(
    "AWS-3.4, AWS-3.19: spot instances; an instance type without known code is launched"
)
def test_spot_instances_are_launched(bench: LauncherBench, aws: AwsCloud) -> None:
    start(
        bench,
        aws,
        aws.label("spot", use_spot=True),
        aws.label("odd", instance_type="u-6tb1.56xlarge", use_spot=True),
    )
    _, node = one(bench, "spot")
    assert node.node_properties == {"spot": True, "fleet": False}
    assert node.resources["L-34B43A08"] == 2
    assert "L-1216C47A" not in node.resources
    (params,) = run_params(aws)
    assert params["InstanceMarketOptions.MarketType"] == "spot"
    assert params["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    one(bench, "odd")


@pytest.mark.spec(
    "AWS-3.20: a dedicated host comes and goes with its instance; node list can be rendered"
)
def test_dedicated_host_is_released_with_its_instance(bench: LauncherBench, aws: AwsCloud) -> None:
    start(
        bench,
        aws,
        aws.label(instance_type="c5.large", dedicated_host=True),
        pool={"availability-zone": f"{REGION}a"},
    )
    request_id, node = one(bench)
    (host,) = aws.hosts()
    assert node.external_id == {
        "host": host["HostId"],
        "instance": aws.instances()[0]["InstanceId"],
    }
    assert tags(host)["nodepool_node_id"] == node.id
    assert tags(host)["Name"] == f"np{node.id}"
    params = run_params(aws)[0]
    assert (params["Placement.Tenancy"], params["Placement.HostId"]) == ("host", host["HostId"])
    from nodepool import status

    assert host["HostId"] in str(status.output(status.node_list(bench.zk), "pretty"))
    bench.use_up(request_id)
    assert aws.hosts() == []
    all_gone(aws)


@pytest.mark.spec("AWS-3.20: both gone after an instance failure or a failed allocation")
@pytest.mark.parametrize("operation", ["RunInstances", "AllocateHosts"])
def test_dedicated_host_failure(bench: LauncherBench, aws: AwsCloud, operation: str) -> None:
    start(
        bench,
        aws,
        aws.label(instance_type="c5.large", dedicated_host=True),
        pool={"availability-zone": f"{REGION}a"},
        launch_retries=1,
    )
    aws.proxy.fail(operation, ec2_error("InsufficientInstanceCapacity", 500))
    failed(bench)
    wait_for(lambda: not aws.hosts() and not aws.instances(), 15, "host and instance gone")


def test_dedicated_host_of_an_unclear_launch(
    bench: LauncherBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance is there and no record has its id: the host could never be released."""
    monkeypatch.setattr("nodepool.driver.aws.adapter.DEADLINE", 0.2)
    start(
        bench,
        aws,
        aws.label(instance_type="c5.large", dedicated_host=True),
        pool={"availability-zone": f"{REGION}a"},
        launch_retries=1,
    )
    lost = aws.proxy.fail("RunInstances", lose_answer(), times=float("inf"))
    failed(bench)
    assert lost.used
    wait_for(
        lambda: not aws.hosts() and not aws.instances() and not bench.nodes(),
        15,
        "instance, host and record gone",
    )
    assert aws.instances("terminated"), "there was one"


def test_others_on_a_host_are_unchanged(bench: LauncherBench, aws: AwsCloud) -> None:
    spend_node_ids(bench.zk)
    start(bench, aws)

    def named(provider: str, node: str) -> list[dict[str, str]]:
        return [
            {"Key": "nodepool_provider_name", "Value": provider},
            {"Key": "nodepool_node_id", "Value": node},
        ]

    def host(with_tags: list[dict[str, str]]) -> str:
        return str(
            aws.ec2.allocate_hosts(
                AvailabilityZone=f"{REGION}a",
                InstanceType="c5.large",
                Quantity=1,
                TagSpecifications=[{"ResourceType": "dedicated-host", "Tags": with_tags}],
            )["HostIds"][0]
        )

    def instance_on(host_id: str, with_tags: list[dict[str, str]]) -> str:
        made = aws.ec2.run_instances(
            ImageId=aws.ami,
            MinCount=1,
            MaxCount=1,
            InstanceType="c5.large",
            Placement={"Tenancy": "host", "HostId": host_id},
            TagSpecifications=[{"ResourceType": "instance", "Tags": with_tags}],
        )
        return str(made["Instances"][0]["InstanceId"])

    ours, other, untagged = (
        host(named("ec2-us", "1")),
        host(named("other", "1")),
        host([{"Key": "a", "Value": "b"}]),
    )
    mine = instance_on(ours, named("ec2-us", "1"))
    for each in (named("ec2-us", "2"), named("other", "1"), [{"Key": "a", "Value": "b"}]):
        instance_on(ours, each)
    instance_on(other, named("other", "1"))
    instance_on(untagged, [{"Key": "c", "Value": "d"}])
    cloud = adapter(bench).cloud
    assert cloud.left_on_host(ours) == [mine]
    assert [
        cloud.left_on_host(one_host) for one_host in (other, untagged, "h-0123456789abcdef0")
    ] == [[], [], []]


def templates(aws: AwsCloud) -> dict[str, str]:
    found = aws.ec2.describe_launch_templates()["LaunchTemplates"]
    return {each["LaunchTemplateName"]: each["LaunchTemplateId"] for each in found}


def fleet(*types: str, strategy: str = "price-capacity-optimized") -> dict[str, Any]:
    return {"instance-types": list(types), "allocation-strategy": strategy}


@pytest.mark.spec(
    "AWS-3.21: a template per settings; a restart keeps them; those of a former configuration go"
)
def test_each_set_of_settings_has_one_launch_template(bench: LauncherBench, aws: AwsCloud) -> None:
    labels = [
        aws.label("one", fleet=fleet("t3.medium")),
        aws.label("two", fleet=fleet("t3.medium"), volume_size=40),
        aws.label("same", fleet=fleet("t3.large")),
    ]
    foreign = aws.ec2.create_launch_template(
        LaunchTemplateName="nodepool-launch-template-of-others",
        LaunchTemplateData={"KeyName": "zuul"},
        TagSpecifications=[
            {
                "ResourceType": "launch-template",
                "Tags": [
                    {"Key": "nodepool_managed", "Value": "True"},
                    {"Key": "nodepool_provider_name", "Value": "other"},
                ],
            }
        ],
    )
    pool = start(bench, aws, *labels)
    first = templates(aws)
    assert len(first) == 3
    assert (
        len([name for name in first if name.startswith(adapter(bench).LAUNCH_TEMPLATE_PREFIX)]) == 3
    )
    bench.stop(pool)
    pool = start(bench, aws, *labels)
    assert templates(aws) == first
    bench.stop(pool)
    start(bench, aws, aws.label("one", fleet=fleet("t3.medium"), volume_size=50))
    now = templates(aws)
    assert len(now) == 2
    assert foreign["LaunchTemplate"]["LaunchTemplateName"] in now
    assert len(set(now) & set(first)) == 1


def reload(bench: LauncherBench, aws: AwsCloud, *labels: dict[str, Any]) -> None:
    """Change the labels of the running launcher; returns when the new configuration is in force."""
    before = adapter(bench)
    bench.config(aws.config(aws.provider(*labels)))
    wait_for(lambda: adapter(bench) is not before, 10, "reloaded")


@pytest.mark.spec("AWS-2.4: a reload does not take the templates of launches under way away")
@pytest.mark.parametrize("after", ["fleet", "none"])
def test_templates_of_launches_under_way(bench: LauncherBench, aws: AwsCloud, after: str) -> None:
    start(bench, aws, aws.label(fleet=fleet("t3.medium")), launch_retries=2)
    old = templates(aws)
    gate = threading.Event()
    fault = aws.proxy.fail("CreateFleet", hang(gate, ec2_error("InternalFailure", 400)))
    request = bench.submit("small")
    wait_for(lambda: fault.used == 1, 10, "the launch is under way")
    fleet_again = {"fleet": fleet("t3.medium"), "volume_size": 50}
    reload(bench, aws, aws.label(**(fleet_again if after == "fleet" else {})))
    new = {name: each for name, each in templates(aws).items() if name not in old}
    assert len(new) == (1 if after == "fleet" else 0)
    assert set(templates(aws)) == {*old, *new}, "the old one is needed by the launch under way"
    # It makes its template again when somebody else has removed it, and leaves the new one alone.
    aws.proxy.fail("CreateFleet", ec2_error("InvalidLaunchTemplateName.NotFoundException"))
    gate.set()
    bench.wait_request(request, "fulfilled", timeout=20)
    wait_for(lambda: templates(aws) == new, 20, "the old one is removed after its last launch")
    assert len(aws.proxy.seen("DeleteLaunchTemplate")) == 1


@pytest.mark.spec("AWS-2.4: existing templates are reused")
def test_reloads_make_no_template_twice(bench: LauncherBench, aws: AwsCloud) -> None:
    labels = [
        aws.label(fleet=fleet("t3.medium")),
        aws.label(fleet=fleet("t3.medium"), volume_size=50),
    ]
    start(bench, aws, labels[0])
    reload(bench, aws, labels[1])
    reload(bench, aws, labels[0])
    reload(bench, aws, labels[0], aws.label("more", fleet=fleet("t3.large")))
    wait_for(lambda: len(templates(aws)) == 1, 20, "only the one that is needed")
    one(bench)
    one(bench, "more")
    assert len(templates(aws)) == 1
    made, removed = aws.proxy.seen("CreateLaunchTemplate"), aws.proxy.seen("DeleteLaunchTemplate")
    assert len(made) - len(removed) == 1
    assert 2 <= len(made) <= 3


@pytest.mark.spec("AWS-3.22: what fleet calls carry; use is counted after the launch")
@pytest.mark.parametrize("spot", [False, True])
def test_fleet_calls_have_the_labels_settings(
    bench: LauncherBench, aws: AwsCloud, spot: bool
) -> None:
    start(
        bench,
        aws,
        aws.label(fleet=fleet("t3.large", "t3.medium", strategy="prioritized"), use_spot=spot),
    )
    request_id, node = one(bench)
    (params,) = run_params(aws, "CreateFleet")
    options = "SpotOptions" if spot else "OnDemandOptions"
    assert params[f"{options}.AllocationStrategy"] == "prioritized"
    assert params["TargetCapacitySpecification.DefaultTargetCapacityType"] == (
        "spot" if spot else "on-demand"
    )
    (name,) = templates(aws)
    assert params["LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName"] == name
    assert params["LaunchTemplateConfigs.1.Overrides.2.InstanceType"] == "t3.medium"
    assert params["LaunchTemplateConfigs.1.Overrides.2.SubnetId"] == aws.subnet
    assert [
        params["TagSpecification.1.ResourceType"],
        params["TagSpecification.2.ResourceType"],
    ] == ["instance", "volume"]
    assert params["TagSpecification.1.Tag.2.Key"] == "nodepool_pool_name"
    assert node.node_properties == {"spot": spot, "fleet": True}
    assert node.resources["cores"] > 0
    assert tags(instance(aws, node))["nodepool_node_id"] == node.id
    bench.use_up(request_id)
    all_gone(aws)


def test_builders_leave_templates_alone(bench: LauncherBench, aws: AwsCloud) -> None:
    from nodepool.config import loadConfig
    from nodepool.driver.lifecycle import ProviderManager

    content = aws.config(aws.provider(aws.label(fleet=fleet("t3.medium"))))
    loaded = loadConfig(bench.config(content))
    ProviderManager.reconfigure(None, loaded, None, only_image_manager=True)
    try:
        assert templates(aws) == {}
        assert aws.proxy.requests == []
    finally:
        ProviderManager.stopProviders(loaded)


def test_fleet_without_capacity(bench: LauncherBench, aws: AwsCloud) -> None:
    from tests.support.fault_proxy import reply

    start(bench, aws, aws.label(fleet=fleet("t3.medium")), launch_retries=1)
    aws.proxy.fail(
        "CreateFleet",
        reply(
            200,
            (
                "<CreateFleetResponse "
                'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId><fleetId>'
                "f</fleetId>"
                "<errorSet><item><errorCode>InsufficientInstanceCapacity</errorCode><errorMessage>"
                "none left</errorMessage></item>"
                "</errorSet><fleetInstanceSet/></CreateFleetResponse>"
            ),
        ),
    )
    failed(bench)
    one(bench)

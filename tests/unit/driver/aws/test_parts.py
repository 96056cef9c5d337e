"""Parts of the aws driver that need no cloud (AWS-2.2, AWS-2.6, AWS-2.7)."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.cloud import CallsStopped, CallTimeout, ErrorKind
from nodepool.cloud.polling import Observation
from nodepool.driver.aws import quota
from nodepool.driver.aws.adapter import (
    HOST_QUOTA_CODES,
    INSTANCE_QUOTA_CODES,
    VOLUME_QUOTA_CODES,
    AwsInstance,
    tag_dict_to_list,
    tag_list_to_dict,
)
from nodepool.driver.aws.api import errors
from nodepool.driver.aws.api.lookups import all_pages
from nodepool.driver.aws.launch import parameters
from nodepool.driver.aws.launch.machines import AwsCreateStateMachine
from nodepool.driver.aws.launch.offers import Offer

PROVIDER = SimpleNamespace(region_name="us-east-1")


@pytest.mark.spec(
    "AWS-3.10, AWS-2.2: addresses of an instance, constructed with host, quota, label None"
)
@pytest.mark.parametrize("public_v4", ["192.0.2.1", None])
@pytest.mark.parametrize("v6", ["2001:db8::1", None])
def test_instance_has_its_addresses_host_and_quota(public_v4: str | None, v6: str | None) -> None:
    data: dict[str, Any] = {
        "InstanceId": "i-1",
        "PrivateIpAddress": "10.0.0.1",
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "Tags": [{"Key": "nodepool_node_id", "Value": "1"}],
        "NetworkInterfaces": [{"Ipv6Addresses": []}],
    }
    if public_v4:
        data["PublicIpAddress"] = public_v4
    if v6:
        data["NetworkInterfaces"] = [
            {"Ipv6Addresses": [{"Ipv6Address": v6}, {"Ipv6Address": "2001:db8::2"}]}
        ]
    found = AwsInstance(PROVIDER, data, None, None, None)
    assert (found.external_id, found.cloud, found.region, found.az) == (
        {"instance": "i-1"},
        "AWS",
        "us-east-1",
        "us-east-1a",
    )
    assert (found.private_ipv4, found.public_ipv4, found.public_ipv6, found.private_ipv6) == (
        "10.0.0.1",
        public_v4,
        v6,
        None,
    )
    assert found.interface_ip == (public_v4 or v6 or "10.0.0.1")
    assert found.metadata == {"nodepool_node_id": "1"}
    assert found.node_properties == {}
    with pytest.raises(NotImplementedError):
        found.getQuotaInformation()


def test_tags_both_ways() -> None:
    assert tag_dict_to_list({"a": True, "b": 2}) == [
        {"Key": "a", "Value": "True"},
        {"Key": "b", "Value": "2"},
    ]
    assert tag_list_to_dict([{"Key": "a", "Value": "b"}]) == {"a": "b"}
    assert tag_list_to_dict(None) == {}


@pytest.mark.spec("AWS-2.7: quota codes")
def test_instance_types_have_their_quota_codes() -> None:
    assert len(HOST_QUOTA_CODES) == 110
    assert len(VOLUME_QUOTA_CODES) == 7
    assert quota.instance_code("t3.medium", False) == "L-1216C47A"
    assert quota.instance_code("t3.medium", True) == "L-34B43A08"
    assert quota.instance_code("u-6tb1.56xlarge", False) == "L-43DA4232"
    assert quota.instance_code("u-6tb1.56xlarge", True) is None
    assert quota.instance_code("inf2.xlarge", False) == "L-1945791B"
    assert quota.instance_code("unheard9.large", False) is None
    assert quota.host_code("mac2-m2pro.metal") == "L-14F120D1"
    assert quota.host_code("x") is None
    assert set(INSTANCE_QUOTA_CODES) == {
        "a",
        "c",
        "d",
        "h",
        "i",
        "m",
        "r",
        "t",
        "z",
        "dl",
        "f",
        "g",
        "vt",
        "u-",
        "inf",
        "p",
        "x",
        "trn",
        "hpc",
    }
    assert quota.volume_use("io1", 10, 500) == {"L-FD252861": 10, "L-B3A130E6": 500}
    assert quota.volume_use("gp3", 10, 500) == {"L-7A658B76": 10}
    assert quota.volume_use("unheard", 10, 1) == {}
    assert quota.volume_use(None, 10, 1) == {}


class ClientError(Exception):
    def __init__(self, code: str, status: int = 400) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class ReadTimeoutError(Exception):
    pass


class ResponseParserError(Exception):
    pass


class NoCredentialsError(Exception):
    pass


@pytest.mark.spec("AWS-2.6: error codes, and the additions")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ClientError("VolumeLimitExceeded"), ErrorKind.QUOTA),
        (ClientError("HostLimitExceeded"), ErrorKind.QUOTA),
        (ClientError("VcpuLimitExceeded"), ErrorKind.QUOTA),
        (ClientError("InstanceLimitExceeded"), ErrorKind.QUOTA),
        (ClientError("MaxSpotInstanceCountExceeded"), ErrorKind.QUOTA),
        (ClientError("InsufficientInstanceCapacity", 500), ErrorKind.CAPACITY),
        (ClientError("InsufficientHostCapacity", 500), ErrorKind.CAPACITY),
        (ClientError("SpotMaxPriceTooLow"), ErrorKind.CAPACITY),
        (ClientError("UnfulfillableCapacity"), ErrorKind.CAPACITY),
        (ClientError("InsufficientFreeAddressesInSubnet"), ErrorKind.CAPACITY),
        (ClientError("RequestLimitExceeded", 503), ErrorKind.THROTTLED),
        (ClientError("Throttling"), ErrorKind.THROTTLED),
        (ClientError("ThrottlingException"), ErrorKind.THROTTLED),
        (ClientError("SlowDown", 503), ErrorKind.THROTTLED),
        (ClientError("Whatever", 429), ErrorKind.THROTTLED),
        (ClientError("InternalError", 500), ErrorKind.TRANSIENT),
        (ClientError("Whatever", 503), ErrorKind.TRANSIENT),
        (ClientError("InvalidInstanceID.NotFound"), ErrorKind.NOT_FOUND),
        (ClientError("NoSuchKey", 404), ErrorKind.NOT_FOUND),
        (ClientError("InvalidConversionTaskId.Malformed"), ErrorKind.NOT_FOUND),
        (ClientError("AuthFailure", 401), ErrorKind.CONFIGURATION),
        (ClientError("InvalidInstanceType"), ErrorKind.CONFIGURATION),
        (ClientError("InvalidAMIID.Malformed"), ErrorKind.OTHER),
        (ReadTimeoutError(), ErrorKind.TRANSIENT),
        (ResponseParserError(), ErrorKind.TRANSIENT),
        (ConnectionResetError(), ErrorKind.TRANSIENT),
        (NoCredentialsError(), ErrorKind.CONFIGURATION),
        (ValueError(), ErrorKind.OTHER),
    ],
)
def test_kinds_of_errors(error: Exception, kind: ErrorKind) -> None:
    assert errors.classify(error) is kind


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ClientError("RequestLimitExceeded", 503), True),
        (ClientError("InternalError", 500), True),
        (ClientError("ExpiredToken"), True),
        (ConnectionResetError(), True),
        (CallTimeout("no answer", ErrorKind.TRANSIENT), True),
        (NoCredentialsError(), True),
        (ClientError("UnauthorizedOperation", 403), False),
        (ClientError("InvalidParameterValue"), False),
        (CallsStopped(), False),
    ],
)
def test_transient_errors_pass_and_others_do_not(error: Exception, passing: bool) -> None:
    assert errors.passes(error) is passing


def label(**values: Any) -> Any:
    pool = SimpleNamespace(public_ipv4=True, public_ipv6=False, subnet_ids=[], az=None, name="main")
    options = {
        "name": "l",
        "pool": pool,
        "key_name": "k",
        "ebs_optimized": False,
        "security_group_ids": [],
        "userdata": None,
        "iam_instance_profile": None,
        "imdsv2": None,
        "volume_size": None,
        "volume_type": None,
        "iops": None,
        "throughput": None,
        "encrypted": False,
        "kms_key_id": None,
        "fleet": None,
        "use_spot": False,
        "offers": (Offer("t", None, None, False),),
        **values,
    }
    return SimpleNamespace(**options)


@pytest.mark.spec(
    "AWS-2.3: the root volume is the AMI's first mapping with the label's settings laid over it"
)
def test_root_volume_combines_image_and_label() -> None:
    image = {
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/xvda",
                "Ebs": {
                    "SnapshotId": "s",
                    "VolumeSize": 8,
                    "Encrypted": False,
                    "VolumeType": "gp2",
                },
            },
            {"DeviceName": "/dev/xvdb", "VirtualName": "ephemeral0"},
        ]
    }
    assert parameters.root_device(image, label(volume_size=20, iops=3)) == {
        "DeviceName": "/dev/xvda",
        "Ebs": {
            "SnapshotId": "s",
            "VolumeSize": 20,
            "VolumeType": "gp2",
            "Iops": 3,
            "DeleteOnTermination": True,
        },
    }
    assert image["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is False, (
        "the remembered image is not changed"
    )
    assert (
        parameters.root_device(
            {"BlockDeviceMappings": [{"DeviceName": "x", "VirtualName": "ephemeral0"}]}, label()
        )
        is None
    )
    assert parameters.root_device({}, label()) is None


@pytest.mark.spec(
    "AWS-2.4: the name of a template is a digest of its contents; all settings are honoured"
)
def test_launch_template_name_is_a_digest_of_its_content() -> None:
    plain = parameters.template_data(label())
    name = parameters.template_name(plain)
    assert name.startswith("nodepool-launch-template-")
    assert len(name.rpartition("-")[2]) == 64
    assert name == parameters.template_name(dict(reversed(list(plain.items()))))
    data = parameters.template_data(
        label(
            security_group_ids=["sg"],
            iam_instance_profile={"arn": "a"},
            ebs_optimized=True,
            imdsv2="required",
            userdata="x",
            pool=SimpleNamespace(public_ipv4=False, public_ipv6=True),
        )
    )
    assert data["NetworkInterfaces"] == [
        {
            "AssociatePublicIpAddress": False,
            "DeviceIndex": 0,
            "Groups": ["sg"],
            "Ipv6AddressCount": 1,
        }
    ]
    assert (data["IamInstanceProfile"], data["EbsOptimized"], data["UserData"]) == (
        {"Arn": "a"},
        True,
        "eA==",
    )
    assert data["MetadataOptions"] == {"HttpTokens": "required", "HttpEndpoint": "enabled"}
    assert parameters.template_name(data) != name


def test_fleet_has_an_override_for_each_instance_type_and_subnet() -> None:
    fleet = {"instance-types": ["a", "b"], "allocation-strategy": "lowest-price"}
    args = parameters.create_fleet(label(fleet=fleet), "template", "ami", {})
    assert args["LaunchTemplateConfigs"][0]["Overrides"] == [
        {"ImageId": "ami", "InstanceType": "a"},
        {"ImageId": "ami", "InstanceType": "b"},
    ]
    pool = SimpleNamespace(subnet_ids=["s-1", "s-2"], az="z")
    args = parameters.create_fleet(label(fleet=fleet, pool=pool), "template", "ami", {})
    assert [each.get("SubnetId") for each in args["LaunchTemplateConfigs"][0]["Overrides"]] == [
        "s-1",
        "s-2",
    ] * 2


class Types:
    """Instance types as describe_instance_types shows them."""

    def instance_type(self, name: str) -> dict[str, Any]:
        size = 4 if name.endswith("large") else 2
        return {
            "VCpuInfo": {"DefaultCores": size // 2, "DefaultVCpus": size},
            "MemoryInfo": {"SizeInMiB": 1024 * size},
        }


@pytest.mark.spec("AWS-2.7: what labels need")
def test_label_needs_are_those_of_its_instance_type() -> None:
    part = quota.AwsQuota(Types(), warn_once=pytest.fail)

    def needs(**values: Any) -> dict[str, Any]:
        return dict(
            part.of_label(
                label(dedicated_host=False, instance_type="t3.medium", **values)
            ).get_resources()
        )

    medium = Offer("t3.medium", None, None, False)
    assert needs(offers=(medium,)) == {"cores": 1, "ram": 2048, "instances": 1, "L-1216C47A": 2}
    assert needs(offers=(medium,), volume_type="gp2", volume_size=30)["L-D18FCD1D"] == 30
    assert needs(offers=(medium, medium._replace(instance_type="t3.large")))["L-1216C47A"] == 2
    # With spot as the other way neither quota alone decides.
    assert needs(offers=(medium, medium._replace(spot=True))) == {
        "cores": 1,
        "ram": 2048,
        "instances": 1,
    }
    assert needs(fleet={"instance-types": ["t3.medium"]}) == {"cores": 0, "ram": 0, "instances": 1}


def test_all_pages_of_an_answer_are_read() -> None:
    """S3 may name a marker although there is nothing more."""
    asked: list[dict[str, str]] = []
    pages: list[dict[str, object]] = [
        {"Things": [1], "NextA": "a", "NextB": "b", "IsTruncated": True},
        {"NextA": "c", "NextB": ""},
        {"Things": [2], "NextA": "d"},
        {"Things": [3], "NextA": "e", "IsTruncated": False},
    ]

    def ask(**token: str) -> dict[str, object]:
        asked.append(token)
        return pages[len(asked) - 1]

    assert all_pages(ask, "Things", {"A": "NextA", "B": "NextB"}) == [1, 2, 3]
    assert asked == [{}, {"A": "a", "B": "b"}, {"A": "c"}, {"A": "d"}]
    asked.clear()
    pages[:] = [{"Things": [1], "NextToken": "x"}, {"Things": [2]}]
    assert all_pages(ask, "Things") == [1, 2]
    assert asked == [{}, {"NextToken": "x"}]


@pytest.mark.parametrize(
    ("dedicated", "result", "deleted"),
    [(True, "h-1", ("host", "h-1")), (False, ({"InstanceId": "i-1"}, None), ("instance", "i-1"))],
)
def test_what_an_abandoned_launch_has_created_is_deleted(
    dedicated: bool, result: Any, deleted: tuple[str, str]
) -> None:
    started: list[Future[Any]] = []
    deletions: list[tuple[str, str]] = []

    def run(_call: Any, lane: str) -> Future[Any]:
        started.append(Future())
        started[-1].set_running_or_notify_cancel()
        return started[-1]

    deletes = SimpleNamespace(delete=lambda kind, key: deletions.append((kind, key)))
    adapter: Any = SimpleNamespace(calls=SimpleNamespace(run=run), launching=None, deletes=deletes)
    wanted: Any = SimpleNamespace(name="small", dedicated_host=dedicated, tags={}, dynamic_tags={})
    request: Any = None
    for created in (True, False):
        log: Any = logging.getLogger("test")
        machine = AwsCreateStateMachine(adapter, "np1", wanted, "ami", {}, request, log)
        machine.advance()
        machine.abandon()
        if created:
            started[-1].set_result(result)
        else:
            started[-1].set_exception(RuntimeError("refused"))
    assert deletions == [deleted]


def test_instance_that_is_not_shown_after_its_launch_is_waited_for() -> None:
    wanted: Any = SimpleNamespace(name="small", tags={}, dynamic_tags={})
    nothing: Any = None
    log: Any = logging.getLogger("test")
    machine = AwsCreateStateMachine(nothing, "np1", wanted, "ami", {}, nothing, log)
    running = {"InstanceId": "i-1", "State": {"Name": "running"}}
    watch: Any = SimpleNamespace(latest=None, end=lambda: None)
    steps = machine._reached(watch, "running", ("terminated",))
    next(steps)
    watch.latest = Observation(None, asked=1.0)
    next(steps)  # it still waits
    watch.latest = Observation(running, asked=2.0)
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert ended.value.value is running

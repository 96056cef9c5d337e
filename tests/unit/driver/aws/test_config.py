"""Options of AWS providers (AWS-1 and AWS-3.1)."""

from __future__ import annotations

import copy
import math
import pathlib
from typing import Any

import pytest
import voluptuous as v
import yaml

from nodepool.cloud.sold_out import SoldOut
from nodepool.config import loadConfig
from nodepool.config.checks.validation import Validation
from nodepool.config.source import Source
from nodepool.driver.aws.config import (
    AwsLabel,
    AwsPool,
    AwsProviderCloudImage,
    AwsProviderDiskImage,
)
from nodepool.driver.aws.launch.offers import Offer, build
from nodepool.exceptions import ConfigError

BASE: dict[str, Any] = {
    "labels": [{"name": "small"}],
    "diskimages": [
        {"name": "image", "username": "zuul", "python-path": "/python", "shell-type": "sh"}
    ],
    "providers": [
        {
            "name": "ec2",
            "driver": "aws",
            "region-name": "us-east-1",
            "cloud-images": [{"name": "base", "image-id": "ami-1", "username": "ubuntu"}],
            "pools": [
                {
                    "name": "main",
                    "labels": [
                        {
                            "name": "small",
                            "cloud-image": "base",
                            "instance-type": "t3.medium",
                            "key-name": "zuul",
                        }
                    ],
                }
            ],
        }
    ],
}


class Conf:
    """A configuration that tests change."""

    def __init__(self, tmp_path: pathlib.Path) -> None:
        self.path = tmp_path / "nodepool.yaml"
        self.data = copy.deepcopy(BASE)
        self.provider: dict[str, Any] = self.data["providers"][0]
        self.pool: dict[str, Any] = self.provider["pools"][0]
        self.label: dict[str, Any] = self.pool["labels"][0]
        self.image: dict[str, Any] = self.provider["cloud-images"][0]

    def load(self) -> Any:
        self.path.write_text(yaml.safe_dump(self.data))
        return loadConfig(str(self.path)).providers["ec2"]

    def load_label(self) -> Any:
        return self.load().pools["main"].labels["small"]

    def valid(self) -> bool:
        self.path.write_text(yaml.safe_dump(self.data))
        return not [
            problem for problem in Validation(Source(str(self.path))).run() if problem.error
        ]


@pytest.fixture
def conf(tmp_path: pathlib.Path) -> Conf:
    return Conf(tmp_path)


@pytest.mark.spec("AWS-3.1: two equal loads compare equal")
def test_equal_configurations_are_equal(conf: Conf) -> None:
    conf.label.pop("instance-type")
    conf.label["fleet"] = {"instance-types": ["a.b"], "allocation-strategy": "prioritized"}
    first, second = conf.load(), conf.load()
    assert first == second
    assert hash(first) == hash(second)
    conf.label["volume-size"] = 9
    assert conf.load() != first


@pytest.mark.spec("AWS-1.1, AWS-1.4, AWS-1.6: defaults")
def test_omitted_options_have_the_defaults_of_the_contract(conf: Conf) -> None:
    provider = conf.load()
    assert (provider.region_name, provider.profile_name, provider.rate, provider.boot_timeout) == (
        "us-east-1",
        None,
        2,
        180,
    )
    assert (provider.launch_timeout, provider.launch_retries, provider.image_type) == (
        3600,
        3,
        "raw",
    )
    assert (provider.image_name_format, provider.object_storage) == (
        "{image_name}-{timestamp}",
        None,
    )
    assert (provider.image_import_timeout, provider.post_upload_hook, provider.manage_images) == (
        None,
        None,
        True,
    )
    assert (provider.max_servers, provider.max_cores, provider.max_ram, provider.max_resources) == (
        math.inf,
    ) * 3 + ({},)
    pool = provider.pools["main"]
    assert (pool.public_ipv4, pool.public_ipv6, pool.host_key_checking, pool.use_internal_ip) == (
        True,
        False,
        True,
        False,
    )
    assert (pool.az, pool.azs, pool.subnet_id, pool.security_group_id) == (None,) * 4
    assert pool.ignore_provider_quota is False
    assert pool.provider is provider
    label = pool.labels["small"]
    assert (label.ebs_optimized, label.use_spot, label.dedicated_host) == (False, False, False)
    assert (label.imdsv2, label.fleet) == (None, None)
    assert (label.volume_type, label.volume_size, label.iops, label.throughput, label.userdata) == (
        None,
    ) * 5
    assert (label.tags, label.dynamic_tags, label.iam_instance_profile) == ({}, {}, None)
    assert label.offers == (Offer("t3.medium", None, None, False),)
    assert (label.cloud_image.connection_type, label.cloud_image.connection_port) == ("ssh", 22)
    assert provider.getSupportedLabels() == provider.getSupportedLabels("main") == {"small"}
    assert provider.getSupportedLabels("other") == set()
    assert conf.valid()


@pytest.mark.spec(
    "AWS-1.1: keys that 11.0.0 read but refused are accepted; they are the pools' defaults"
)
def test_provider_level_defaults(conf: Conf) -> None:
    conf.provider.update(
        {
            "use-internal-ip": True,
            "host-key-checking": False,
            "public-ipv4": False,
            "public-ipv6": True,
            "max-servers": 3,
            "max-cores": 4,
            "max-ram": 5,
            "max-resources": {"A": 1, "B": 2},
        }
    )
    conf.pool["max-resources"] = {"B": 3}
    assert conf.valid()
    pool = conf.load().pools["main"]
    assert (pool.use_internal_ip, pool.host_key_checking, pool.public_ipv4, pool.public_ipv6) == (
        True,
        False,
        False,
        True,
    )
    assert (pool.max_servers, pool.max_cores, pool.max_ram, pool.max_resources) == (
        3,
        4,
        5,
        {"A": 1, "B": 3},
    )
    assert pool.labels["small"].host_key_checking is False


@pytest.mark.spec("AWS-1.4: public-ip-address wins over public-ipv4")
def test_old_name_of_public_ipv4(conf: Conf) -> None:
    conf.pool.update({"public-ip-address": False, "public-ipv4": True})
    assert conf.load().pools["main"].public_ipv4 is False


@pytest.mark.spec("AWS-1.3: a provider's disk image inherits from the top level")
def test_provider_disk_image_options_have_defaults(conf: Conf) -> None:
    conf.provider["diskimages"] = [{"name": "image", "tags": {"a": "b"}}]
    conf.label["diskimage"] = "image"
    del conf.label["cloud-image"]
    image = conf.load().diskimages["image"]
    assert (image.username, image.python_path, image.shell_type) == ("zuul", "/python", "sh")
    assert (image.architecture, image.ena_support, image.volume_type, image.import_method) == (
        "x86_64",
        True,
        "gp3",
        "snapshot",
    )
    assert (image.volume_size, image.iops, image.throughput, image.imds_support, image.meta) == (
        None,
    ) * 4 + ({"a": "b"},)
    assert conf.load_label().diskimage.name == "image"
    assert conf.valid()


@pytest.mark.spec(
    "AWS-3.1: a cloud image with both id and filters, or with neither, fails validation"
)
def test_cloud_image_needs_either_id_or_filters(conf: Conf) -> None:
    conf.image["image-filters"] = [{"name": "name", "values": ["x"]}]
    assert not conf.valid()
    del conf.image["image-id"]
    assert conf.valid()
    del conf.image["image-filters"]
    assert not conf.valid()
    with pytest.raises(v.Invalid, match='Provide either "image-filters", or "image-id" keys'):
        v.Schema(AwsProviderCloudImage.getSchema())({"name": "n", "username": "u"})


@pytest.mark.spec("AWS-1.2: filters in either capitalisation; values become text")
def test_image_filters_accept_either_capitalization(conf: Conf) -> None:
    del conf.image["image-id"]
    conf.image["image-filters"] = [
        {"name": "a", "values": ["x", 1, True]},
        {"Name": "b", "Values": ["y"]},
    ]
    assert conf.load().cloud_images["base"].image_filters == [
        {"Name": "a", "Values": ["x", "1", "true"]},
        {"Name": "b", "Values": ["y"]},
    ]


@pytest.mark.spec("AWS-3.1: fleets")
def test_fleet_options_are_validated(conf: Conf) -> None:
    conf.label["fleet"] = {"instance-types": ["t3.medium"], "allocation-strategy": "prioritized"}
    assert not conf.valid(), "beside instance-type"
    with pytest.raises(ConfigError, match="one of instance-type and fleet"):
        conf.load()
    del conf.label["instance-type"]
    assert conf.valid()
    assert conf.load_label().fleet["instance-types"] == ["t3.medium"]
    conf.label["fleet"]["allocation-strategy"] = "cheapest"
    assert not conf.valid()
    conf.label["fleet"] = {
        "instance-types": ["t3.medium"],
        "allocation-strategy": "prioritized",
        "other": 1,
    }
    assert not conf.valid()
    del conf.label["fleet"]
    assert not conf.valid()


@pytest.mark.spec("AWS-1.5: an unknown image is a ValueError naming image, provider and label")
@pytest.mark.parametrize("kind", ["cloud-image", "diskimage"])
def test_unknown_image_is_refused_with_image_provider_and_label(conf: Conf, kind: str) -> None:
    conf.label.pop("cloud-image")
    conf.label[kind] = "nothing"
    with pytest.raises(ValueError, match=r"nothing.* ec2 .*small"):
        conf.load()


@pytest.mark.spec("AWS-1.5: dedicated hosts need a zone and no spot")
def test_dedicated_host_needs_a_zone_and_no_spot(conf: Conf) -> None:
    conf.label["dedicated-host"] = True
    with pytest.raises(ConfigError, match="Availability-zone is required for dedicated hosts"):
        conf.load()
    conf.pool["availability-zone"] = "us-east-1a"
    assert conf.load_label().dedicated_host is True
    conf.label["use-spot"] = True
    with pytest.raises(ConfigError, match="Spot instances can not be used on dedicated hosts"):
        conf.load()


@pytest.mark.spec("AWS-3.15, AWS-1.3: import-method image with IMDSv2 raises IMDSv2 requires...")
def test_imdsv2_and_image_import(conf: Conf) -> None:
    conf.provider["diskimages"] = [
        {"name": "image", "import-method": "image", "imds-support": "v2.0"}
    ]
    with pytest.raises(Exception, match=r"\AIMDSv2 requires"):
        conf.load()


ARN = "arn:aws-us-gov:kms:us-gov-west-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"


@pytest.mark.parametrize(
    "key",
    [
        "1234abcd-12ab-34cd-56ef-1234567890ab",
        "alias/images",
        "arn:aws:kms:us-east-1:123456789012:alias/images",
    ],
)
def test_blocks_are_encrypted_with_a_key_that_is_named_by_its_arn(conf: Conf, key: str) -> None:
    """Each upload would fail otherwise."""
    image = {"name": "image", "kms-key-id": key}
    conf.provider["diskimages"] = [image]
    for image["import-method"] in ("snapshot", "image"):
        assert conf.load().diskimages["image"].kms_key_id == key
        assert conf.valid()
    image["import-method"] = "ebs-direct"
    with pytest.raises(
        ConfigError,
        match=r"diskimage image: kms-key-id must be the ARN of a key .*arn:aws:kms:.*" + key,
    ):
        conf.load()
    assert not conf.valid()
    image["kms-key-id"] = ARN
    assert conf.load().diskimages["image"].kms_key_id == ARN
    assert conf.valid()


def test_missing_region_names_the_provider(conf: Conf) -> None:
    del conf.provider["region-name"]
    assert not conf.valid()
    with pytest.raises(ConfigError, match="region-name"):
        conf.load()


@pytest.mark.spec("AWS-1.5, AWS-1.6: every option of a label")
def test_every_option_of_a_label_is_read(conf: Conf) -> None:
    conf.label.update(
        {
            "ebs-optimized": True,
            "volume-type": "gp3",
            "volume-size": 10,
            "iops": 1,
            "throughput": 2,
            "userdata": "x",
            "iam-instance-profile": {"name": "p"},
            "tags": {"a": 1},
            "dynamic-tags": {"b": "{request.id}"},
            "use-spot": True,
            "imdsv2": "required",
            "console-log": True,
            "encrypted": True,
            "kms-key-id": "k",
            "capacity-reservation": {"preference": "open"},
            "security-group-ids": ["sg-9"],
            "alternatives": [{"instance-type": "t3.large"}, {"use-spot": False}],
        }
    )
    conf.pool.update(
        {
            "security-group-id": "sg-1",
            "security-group-ids": ["sg-2"],
            "subnet-id": "s-1",
            "subnet-ids": ["s-2"],
            "node-attributes": {"k": "v"},
            "priority": 7,
        }
    )
    conf.provider.update(
        {
            "profile-name": "p",
            "rate": 0.5,
            "object-storage": {"bucket-name": "b"},
            "image-format": "vmdk",
            "image-import-timeout": 5,
            "post-upload-hook": "/bin/true",
            "max-concurrency": 3,
            "priority": 4,
        }
    )
    assert conf.valid()
    label = conf.load_label()
    assert label.tags == {"a": "1"}
    assert label.security_group_ids == ["sg-9"]
    assert label.pool.security_group_ids == ["sg-1", "sg-2"]
    assert [offer.describe() for offer in label.offers] == [
        "t3.medium (spot, s-1)",
        "t3.medium (spot, s-2)",
        "t3.large (spot, s-1)",
        "t3.large (spot, s-2)",
        "t3.medium (on-demand, s-1)",
        "t3.medium (on-demand, s-2)",
    ]


def test_schemas_are_available_without_a_provider() -> None:
    for cls in (AwsLabel, AwsPool, AwsProviderCloudImage, AwsProviderDiskImage):
        assert v.Schema(cls.getSchema())  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", ["fleet", "dedicated-host"])
def test_alternatives_are_for_plain_instances(conf: Conf, other: str) -> None:
    conf.pool["availability-zone"] = "us-east-1a"
    conf.label["alternatives"] = [{"use-spot": False}]
    if other == "fleet":
        del conf.label["instance-type"]
        conf.label["fleet"] = {
            "instance-types": ["t3.medium"],
            "allocation-strategy": "prioritized",
        }
    else:
        conf.label["dedicated-host"] = True
    with pytest.raises(ConfigError, match="alternatives of label small"):
        conf.load()


def test_boto3_is_not_imported_for_configuration() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from nodepool.driver.aws import AwsDriver;"
        "AwsDriver().getProviderConfig({'name': 'x', 'driver': 'aws'}); import nodepool.cloud;"
        "assert not {'boto3', 'botocore', 'openstack'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- the offers


def test_the_option_of_a_label_replaces_the_inherited_one() -> None:
    offers = build(
        "t",
        ["s-1"],
        "z-a",
        False,
        None,
        [{"availability-zone": "z-b"}, {"subnet-id": "s-2"}, {"use-spot": True}],
    )
    assert offers == (
        Offer("t", "s-1", "z-a", False),
        Offer("t", None, "z-b", False),
        Offer("t", "s-2", None, False),
        Offer("t", "s-1", "z-a", True),
    )


def test_memory_of_what_was_sold_out() -> None:
    now = [0.0]
    memory = SoldOut(100, lambda: now[0])
    one, two = Offer("t", None, None, True), Offer("t", None, None, False)
    assert memory.order((one, two)) == [one, two]
    memory.refused(one)
    assert memory.order((one, two)) == [two]
    now[0] = 10
    memory.refused(two)
    assert memory.order((one, two)) == [one], "the one refused longest ago"
    now[0] = 105
    assert memory.order((one, two)) == [one]
    memory.worked(two)
    assert memory.order((one, two)) == [one, two]

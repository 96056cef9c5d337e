"""Options of an AWS provider (AWS-1)."""

from __future__ import annotations

import re
from typing import Any

import voluptuous as v

from nodepool.base.option import REQUIRED, changed, exclusive, option, schema
from nodepool.config.diskimages import DiskImage
from nodepool.driver.aws.launch import offers
from nodepool.driver.common.options import (
    PROVIDER,
    CloudImage,
    MachineLabel,
    MachinePool,
    MachineProviderConfig,
    ProviderDiskImage,
)
from nodepool.exceptions import ConfigError

IMAGE_FORMATS = ("ova", "vhd", "vhdx", "vmdk", "raw")
STRATEGIES = (
    "prioritized",
    "price-capacity-optimized",
    "capacity-optimized",
    "diversified",
    "lowest-price",
)

#: Format of keys in the EBS API, which differs from EC2's.
_KEY_ARN = re.compile(r"arn:aws[a-z-]*:kms:[^:]+:[0-9]{12}:key/.+")


_VALUE = v.Any(str, int, float, bool)
_RESERVATION = v.All(
    {
        "id": option(str, None, "a reservation; one of the three", key=exclusive("reservation")),
        "resource-group-arn": option(
            str, None, "a group of reservations; one of the three", key=exclusive("reservation")
        ),
        "preference": option(
            v.Any("open", "none", "capacity-reservations-only"),
            None,
            "whether to use matching reservations; one of the three",
            key=exclusive("reservation"),
        ),
    },
    v.Length(min=1),
)


class _Schema:
    @classmethod
    def getSchema(cls) -> Any:
        return schema(cls, AwsProviderConfig)


def _one_way(image: dict[str, Any]) -> dict[str, Any]:
    if not (image.get("image-id") or image.get("image-filters")):
        raise v.Invalid('Provide either "image-filters", or "image-id" keys')
    return image


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _filters(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return filters as EC2 names them; it supports values that are strings only."""
    return [
        {
            "Name": each.get("name", each.get("Name")),
            "Values": [_text(value) for value in each.get("values", each.get("Values")) or []],
        }
        for each in given or ()
    ] or None


class AwsProviderCloudImage(CloudImage, _Schema):
    """An existing AMI, by id or by filters."""

    checks = (_one_way,)
    image_id: str | None = option(
        str, None, "AMI; or ``image-filters``", key=exclusive("image-id-or-filters")
    )
    image_filters: list[dict[str, Any]] | None = option(
        [
            v.Any(
                {
                    "name": option(
                        str,
                        None,
                        "as in EC2's DescribeImages, for example ``tag:os`` or ``name``",
                        key=v.Required,
                    ),
                    "values": option(
                        [_VALUE], None, "any of them; ``*`` and ``?`` are wildcards", key=v.Required
                    ),
                },
                {
                    "Name": option(str, None, "as ``name``", key=v.Required),
                    "Values": option([_VALUE], None, "as ``values``", key=v.Required),
                },
            )
        ],
        None,
        "selects the newest AMI that matches all; cached for 5 min",
        key=exclusive("image-id-or-filters"),
        convert=_filters,
    )

    @property
    def external_name(self) -> str:
        return self.image_id or self.name


def key_trouble(image: dict[str, Any]) -> str | None:
    """Return why the image's key cannot work, which otherwise only the upload would show."""
    key = image.get("kms-key-id")
    if image.get("import-method") != "ebs-direct" or not key or _KEY_ARN.fullmatch(str(key)):
        return None
    return (
        "kms-key-id must be the ARN of a key (arn:aws:kms:REGION:ACCOUNT:key/ID) when "
        "import-method is ebs-direct, "
        f"which supports neither key ids nor aliases: {key}"
    )


def _valid_key(image: dict[str, Any]) -> dict[str, Any]:
    if trouble := key_trouble(image):
        raise v.Invalid(trouble, path=["kms-key-id"])
    return image


class AwsProviderDiskImage(ProviderDiskImage, _Schema):
    """An image that we upload."""

    checks = (_valid_key,)
    import_method: str = option(
        v.Any("snapshot", "ebs-direct", "image"),
        "snapshot",
        "``snapshot``: through the bucket; ``ebs-direct``: blocks of a snapshot, without a bucket "
        "and without blank blocks;"
        " ``image``: AWS also inspects the image, slow",
    )
    architecture: str = option(str, "x86_64", "of the image")
    ena_support: bool = option(bool, True, "enhanced networking")
    volume_size: int | None = option(int, None, "GiB of the image's volume", shown="the snapshot's")
    volume_type: str = option(str, "gp3", "of the image's volume")
    iops: int | None = option(int, None, "of the image's volume")
    throughput: int | None = option(int, None, "MiB/s of the image's volume")
    imds_support: str | None = option(
        v.Any("v2.0", None),
        None,
        "``v2.0``: instances use only version 2 of the metadata service. Not with ``import-method: "
        "image``",
    )
    encrypted: bool = option(bool, False, "*new*: encrypt the snapshot")
    kms_key_id: str | None = option(
        str,
        None,
        "*new*: key for it: id, alias or ARN; with ``import-method: ebs-direct`` the ARN of a key",
        shown="the account's",
    )
    meta: dict[str, Any] = changed(ProviderDiskImage.meta, doc="override the image's ``metadata``")

    def __init__(self, image_type: str, image: dict[str, Any], diskimage: DiskImage) -> None:
        super().__init__(image_type, image, diskimage)
        self.encrypted = self.encrypted or bool(self.kms_key_id)
        if self.imds_support == "v2.0" and self.import_method == "image":
            raise ConfigError(
                "IMDSv2 requires 'snapshot' or 'ebs-direct' as import-method of diskimage "
                f"{self.name}"
            )
        if trouble := key_trouble(image):
            raise ConfigError(f"diskimage {self.name}: {trouble}", where=("kms-key-id",))


def _one_size(label: dict[str, Any]) -> dict[str, Any]:
    if "instance-type" not in label and "fleet" not in label:
        raise v.Invalid("one of instance-type and fleet is required")
    return label


class AwsLabel(MachineLabel, _Schema):
    pool: AwsPool
    checks = (_one_size,)
    cloud_image = changed(MachineLabel.cloud_image, key=exclusive("label-image"))
    diskimage = changed(MachineLabel.diskimage, key=exclusive("label-image"))
    instance_type: str | None = option(str, None, "or ``fleet``", key=exclusive("label-size"))
    fleet: dict[str, Any] | None = option(
        {
            "instance-types": option([str], None, "the types", key=v.Required),
            "allocation-strategy": option(
                v.Any(*STRATEGIES), None, "how AWS chooses among them", key=v.Required
            ),
        },
        None,
        "several types from which AWS chooses; or ``instance-type``",
        key=exclusive("label-size"),
    )
    key_name: str | None = option(str, None, "key pair", key=v.Required)
    use_spot: bool = option(bool, False, "spot instances")
    alternatives: object = option(
        [
            {
                "instance-type": option(
                    str, None, "as of the label", key=exclusive("types"), shown="the label's"
                ),
                "instance-types": option(
                    [str], None, "several: an offer for each", key=exclusive("types")
                ),
                "subnet-id": option(
                    str, None, "as of the pool", key=exclusive("subnets"), shown="the pool's"
                ),
                "subnet-ids": option(
                    [str], None, "several: an offer for each", key=exclusive("subnets")
                ),
                "availability-zone": option(str, None, "as of the pool", shown="the pool's"),
                "use-spot": option(bool, None, "as of the label", shown="the label's"),
                "capacity-reservation": option(
                    _RESERVATION, None, "as of the label", shown="the label's"
                ),
            }
        ],
        None,
        "*new*: further offers. Each inherits what it does not name",
        stored=False,
    )
    volume_size: int | None = option(int, None, "GiB of the root volume", shown="the image's")
    volume_type: str | None = option(str, None, "of the root volume", shown="the image's")
    iops: int | None = option(int, None, "of the root volume", shown="the image's")
    throughput: int | None = option(int, None, "MiB/s of the root volume", shown="the image's")
    encrypted: bool = option(bool, False, "*new*: encrypt the root volume", shown="the image's")
    kms_key_id: str | None = option(str, None, "*new*: key for it", shown="the account's")
    ebs_optimized: bool = option(bool, False, "optimize the instance for EBS")
    userdata: str | None = option(str, None, "for cloud-init")
    iam_instance_profile: dict[str, str] | None = option(
        {
            "name": option(str, None, "name; or ``arn``", key=exclusive("iam_instance_profile_id")),
            "arn": option(str, None, "ARN; or ``name``", key=exclusive("iam_instance_profile_id")),
        },
        None,
        "role of the instance",
    )
    imdsv2: str | None = option(
        v.Any(None, "required", "optional"),
        None,
        "version 2 of the metadata service",
        shown="the image's",
    )
    tags: dict[str, str] = option(
        dict,
        {},
        "of instance and volumes",
        convert=lambda given: {str(key): str(value) for key, value in given.items()},
    )
    dynamic_tags: dict[str, str] = option(
        dict,
        {},
        'the same, with ``{request...}`` replaced, for example ``"{request.tenant_name}"``',
    )
    dedicated_host: bool = option(
        bool, False, "allocate a dedicated host for each node; not with spot"
    )
    capacity_reservation: dict[str, str] | None = option(
        _RESERVATION, None, "*new*: use reserved capacity"
    )
    security_group_ids: list[str] = option(
        [str], [], "*new*: replaces the pool's", shown="the pool's"
    )
    console_log: bool = option(
        bool, False, "*new*: log the console if the host keys cannot be read"
    )

    def __init__(
        self, label: dict[str, Any], provider_config: AwsProviderConfig, provider_pool: AwsPool
    ) -> None:
        super().__init__(label, provider_config, provider_pool)
        self.encrypted = self.encrypted or bool(self.kms_key_id)
        self.security_group_ids = self.security_group_ids or provider_pool.security_group_ids
        self.offers = offers.build(
            self.instance_type,
            provider_pool.subnet_ids,
            provider_pool.az,
            self.use_spot,
            self.capacity_reservation,
            label.get("alternatives") or [],
        )
        if bool(self.fleet) == bool(self.instance_type):
            raise ConfigError(
                f"label {self.name} needs one of instance-type and fleet", where=("instance-type",)
            )
        if self.dedicated_host and any(offer.spot for offer in self.offers):
            raise ConfigError(
                "Spot instances can not be used on dedicated hosts", where=("dedicated-host",)
            )
        if self.dedicated_host and not self.pool.az:
            raise ConfigError(
                "Availability-zone is required for dedicated hosts", where=("dedicated-host",)
            )
        if label.get("alternatives") and (self.fleet or self.dedicated_host):
            raise ConfigError(
                f"alternatives of label {self.name} cannot be used together with fleet or "
                "dedicated-host",
                where=("alternatives",),
            )


class AwsPool(MachinePool, _Schema):
    provider: AwsProviderConfig
    subnet_id: str | None = option(str, None, "subnet of the instances", shown="the default VPC's")
    subnet_ids: list[str] = option([str], [], "*new*: several offers, tried in order")
    security_group_id: str | None = option(str, None, "of the instances", shown="the VPC's default")
    security_group_ids: list[str] = option([str], [], "*new*: several")
    az: str | None = option(str, None, "required for dedicated hosts", name="availability-zone")
    public_ipv4: bool = option(bool, PROVIDER, "assign a public address")
    public_ip_address: object = option(bool, None, "old name of ``public-ipv4``", stored=False)
    public_ipv6: bool = option(bool, PROVIDER, "assign an IPv6 address")

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        self.security_group_ids = _joined(self.security_group_id, self.security_group_ids)
        self.subnet_ids = _joined(self.subnet_id, self.subnet_ids)
        self.public_ipv4 = bool(pool_config.get("public-ip-address", self.public_ipv4))


def _joined(one: str | None, more: list[str]) -> list[str]:
    return list(dict.fromkeys(([one] if one else []) + list(more)))


class AwsProviderConfig(MachineProviderConfig):
    cloud_image_class = AwsProviderCloudImage
    diskimage_class = AwsProviderDiskImage
    label_class = AwsLabel
    pool_class = AwsPool

    region_name: str | None = option(str, REQUIRED, "for example ``eu-central-1``")
    profile_name: str | None = option(str, None, "profile of the AWS configuration")
    rate = changed(MachineProviderConfig.rate, default=2)
    boot_timeout = changed(MachineProviderConfig.boot_timeout, default=180)
    public_ipv4: bool = option(bool, True, "default of the pools")
    public_ipv6: bool = option(bool, False, "default of the pools")
    object_storage: dict[str, Any] | None = option(
        {"bucket-name": option(str, REQUIRED, "bucket; must exist")},
        None,
        "for imports; not used by ``ebs-direct``",
    )
    image_type: str = option(
        v.Any(*IMAGE_FORMATS), "raw", "format that the builder creates", name="image-format"
    )
    image_import_timeout: int | None = option(
        int,
        None,
        "seconds to retry while AWS has too many imports; limit of an ``ebs-direct`` upload",
        shown="no limit",
    )

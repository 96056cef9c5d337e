"""Options of an AWS provider (AWS-1)."""

from __future__ import annotations

from typing import Any

import voluptuous as v

from nodepool.config.diskimages import DiskImage
from nodepool.config.errors import ConfigError
from nodepool.driver.aws import schema
from nodepool.driver.aws.launch import alternatives
from nodepool.driver.common.options import (
    CloudImage,
    MachineLabel,
    MachinePool,
    MachineProviderConfig,
    ProviderDiskImage,
    required,
)
from nodepool.driver.provider import Driver


class AwsProviderCloudImage(CloudImage):
    """An existing AMI, by id or by filters."""

    def __init__(self, image: dict[str, Any]) -> None:
        super().__init__(image)
        self.image_id: str | None = image.get("image-id")
        self.image_filters: list[dict[str, Any]] | None = None
        if image.get("image-filters"):
            # Values that are not strings are accepted for compatibility; EC2 supports strings only.
            self.image_filters = [
                {"Name": each.get("name", each.get("Name")),
                 "Values": [_text(value) for value in each.get("values", each.get("Values")) or []]}
                for each in image["image-filters"]
            ]  # fmt: skip

    @property
    def external_name(self) -> str:
        return self.image_id or self.name

    @staticmethod
    def getSchema() -> Any:
        return schema.cloud_image()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class AwsProviderDiskImage(ProviderDiskImage):
    """An image that we upload."""

    def __init__(self, image_type: str, image: dict[str, Any], diskimage: DiskImage) -> None:
        super().__init__(image_type, image, diskimage)
        self.architecture: str = image.get("architecture", "x86_64")
        self.ena_support = bool(image.get("ena-support", True))
        self.volume_size: int | None = image.get("volume-size")
        self.volume_type: str = image.get("volume-type", "gp3")
        self.import_method: str = image.get("import-method", "snapshot")
        self.imds_support: str | None = image.get("imds-support")
        self.iops: int | None = image.get("iops")
        self.throughput: int | None = image.get("throughput")
        self.encrypted = bool(image.get("encrypted", False) or image.get("kms-key-id"))
        self.kms_key_id: str | None = image.get("kms-key-id")
        if self.imds_support == "v2.0" and self.import_method == "image":
            raise ConfigError(f"IMDSv2 requires 'snapshot' or 'ebs-direct' as import-method of diskimage {self.name}")
        if trouble := schema.key_trouble(image):
            raise ConfigError(f"diskimage {self.name}: {trouble}", where=("kms-key-id",))

    @staticmethod
    def getSchema() -> Any:
        return schema.diskimage()


class AwsLabel(MachineLabel):
    pool: AwsPool

    def __init__(self, label: dict[str, Any], provider_config: AwsProviderConfig, provider_pool: AwsPool) -> None:
        super().__init__(label, provider_config, provider_pool)
        self.ebs_optimized = bool(label.get("ebs-optimized", False))
        self.instance_type: str | None = label.get("instance-type")
        self.fleet: dict[str, Any] | None = label.get("fleet")
        self.key_name: str | None = label.get("key-name")
        self.volume_type: str | None = label.get("volume-type")
        self.volume_size: int | None = label.get("volume-size")
        self.iops: int | None = label.get("iops")
        self.throughput: int | None = label.get("throughput")
        self.encrypted = bool(label.get("encrypted", False) or label.get("kms-key-id"))
        self.kms_key_id: str | None = label.get("kms-key-id")
        self.userdata: str | None = label.get("userdata")
        self.iam_instance_profile: dict[str, str] | None = label.get("iam-instance-profile")
        self.tags = {str(key): str(value) for key, value in (label.get("tags") or {}).items()}
        self.dynamic_tags: dict[str, str] = label.get("dynamic-tags") or {}
        self.use_spot = bool(label.get("use-spot", False))
        self.imdsv2: str | None = label.get("imdsv2")
        self.dedicated_host = bool(label.get("dedicated-host", False))
        self.console_log = bool(label.get("console-log", False))
        self.security_group_ids: list[str] = label.get("security-group-ids") or provider_pool.security_group_ids
        self.capacity_reservation: dict[str, str] | None = label.get("capacity-reservation")
        self.ladder = alternatives.build(
            self.instance_type,
            provider_pool.subnet_ids,
            provider_pool.az,
            self.use_spot,
            self.capacity_reservation,
            label.get("alternatives") or [],
        )
        self._check(label)

    def _check(self, label: dict[str, Any]) -> None:
        if bool(self.fleet) == bool(self.instance_type):
            raise ConfigError(f"label {self.name} needs one of instance-type and fleet", where=("instance-type",))
        if self.dedicated_host and any(rung.spot for rung in self.ladder):
            raise ConfigError("Spot instances can not be used on dedicated hosts", where=("dedicated-host",))
        if self.dedicated_host and not self.pool.az:
            raise ConfigError("Availability-zone is required for dedicated hosts", where=("dedicated-host",))
        if label.get("alternatives") and (self.fleet or self.dedicated_host):
            raise ConfigError(
                f"alternatives of label {self.name} cannot be used together with fleet or dedicated-host", where=("alternatives",)
            )

    @staticmethod
    def getSchema() -> Any:
        return schema.label()


class AwsPool(MachinePool):
    provider: AwsProviderConfig

    def __init__(self, provider_config: AwsProviderConfig | None = None, pool_config: dict[str, Any] | None = None) -> None:
        self.security_group_id: str | None = None
        self.security_group_ids: list[str] = []
        self.subnet_id: str | None = None
        self.subnet_ids: list[str] = []
        self.az: str | None = None
        self.public_ipv4 = True
        self.public_ipv6 = False
        super().__init__(provider_config, pool_config)

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        provider = self.provider
        self.security_group_id = pool_config.get("security-group-id")
        self.security_group_ids = _joined(self.security_group_id, pool_config.get("security-group-ids"))
        self.subnet_id = pool_config.get("subnet-id")
        self.subnet_ids = _joined(self.subnet_id, pool_config.get("subnet-ids"))
        self.az = pool_config.get("availability-zone")
        public = pool_config.get("public-ipv4", provider.public_ipv4)
        self.public_ipv4 = bool(pool_config.get("public-ip-address", public))
        self.public_ipv6 = bool(pool_config.get("public-ipv6", provider.public_ipv6))

    @staticmethod
    def getSchema() -> Any:
        return schema.pool()


def _joined(one: str | None, more: list[str] | None) -> list[str]:
    return list(dict.fromkeys(([one] if one else []) + list(more or [])))


class AwsProviderConfig(MachineProviderConfig):
    cloud_image_class = AwsProviderCloudImage
    diskimage_class = AwsProviderDiskImage
    label_class = AwsLabel
    pool_class = AwsPool
    default_boot_timeout = 180
    default_rate = 2

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(driver, provider)
        self.profile_name: str | None = None
        self.region_name: str | None = None
        self.public_ipv4 = True
        self.public_ipv6 = False
        self.object_storage: dict[str, Any] | None = None
        self.image_import_timeout: int | None = None

    def load_own(self, options: dict[str, Any]) -> None:
        self.profile_name = options.get("profile-name")
        self.region_name = required(options, "region-name")
        self.public_ipv4 = bool(options.get("public-ipv4", True))
        self.public_ipv6 = bool(options.get("public-ipv6", False))
        self.object_storage = options.get("object-storage")
        if self.object_storage is not None:
            required(self.object_storage, "bucket-name", ("object-storage",))
        self.image_type = options.get("image-format", "raw")
        self.image_import_timeout = options.get("image-import-timeout")

    def getSchema(self) -> v.Schema:
        return v.Schema(schema.provider())

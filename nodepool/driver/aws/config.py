"""Options of an AWS provider (AWS-1)."""

from __future__ import annotations

import math
from typing import Any

import voluptuous as v

from nodepool.config.diskimages import DiskImage
from nodepool.config.errors import ConfigError, PathItem
from nodepool.config.model import Config, ConfigPool, ProviderConfig
from nodepool.config.value import ConfigValue
from nodepool.driver.aws import schema
from nodepool.driver.aws.launch import alternatives
from nodepool.driver.provider import Driver

DEFAULT_PORTS = {"ssh": 22, "winrm": 5986}

Where = tuple[PathItem, ...]


class UnknownImage(ConfigError, ValueError):
    """A label refers to an image that the provider does not have."""

    __str__ = ConfigError.__str__


def _connection(target: Any, options: dict[str, Any]) -> None:
    target.connection_type = options.get("connection-type", "ssh")
    target.connection_port = options.get("connection-port", DEFAULT_PORTS.get(target.connection_type, 22))


def _required(options: dict[str, Any], key: str, where: Where) -> Any:
    if not isinstance(options, dict) or options.get(key) is None:
        raise ConfigError(f"required key '{key}' is missing", where=where)
    return options[key]


class AwsProviderCloudImage(ConfigValue):
    """An AMI that exists, by id or by filters."""

    def __init__(self, image: dict[str, Any]) -> None:
        self.name: str = image["name"]
        self.username: str | None = image.get("username")
        self.image_id: str | None = image.get("image-id")
        self.image_filters: list[dict[str, Any]] | None = None
        if image.get("image-filters"):
            # Values that are no strings are accepted, as before; EC2 knows strings only.
            self.image_filters = [
                {"Name": each.get("name", each.get("Name")),
                 "Values": [_text(value) for value in each.get("values", each.get("Values")) or []]}
                for each in image["image-filters"]
            ]  # fmt: skip
        self.python_path: str | None = image.get("python-path", "auto")
        self.shell_type: str | None = image.get("shell-type")
        self.connection_type = "ssh"
        self.connection_port = 22
        _connection(self, image)

    @property
    def external_name(self) -> str:
        return self.image_id or self.name

    @staticmethod
    def getSchema() -> Any:
        return schema.cloud_image()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class AwsProviderDiskImage(ConfigValue):
    """An image that we upload."""

    # What it takes from the top level is compared by name there.
    ignore_equality = ["diskimage"]

    def __init__(self, image_type: str, image: dict[str, Any], diskimage: DiskImage) -> None:
        self.name: str = image["name"]
        self.diskimage = diskimage
        diskimage.image_types.add(image_type)
        self.pause = bool(image.get("pause", False))
        self.username: str = image.get("username", diskimage.username)
        self.python_path: str | None = image.get("python-path", diskimage.python_path)
        self.shell_type: str | None = image.get("shell-type", diskimage.shell_type)
        self.connection_type = "ssh"
        self.connection_port = 22
        _connection(self, image)
        self.meta: dict[str, Any] = image.get("tags") or {}
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

    @property
    def external_name(self) -> str:
        """The name of the image in the whole configuration."""
        return self.name

    @staticmethod
    def getSchema() -> Any:
        return schema.diskimage()


class AwsLabel(ConfigValue):
    # The image is compared by name: what else matters of it to AWS is in the provider's own entry.
    ignore_equality = ["pool", "diskimage"]

    def __init__(self, label: dict[str, Any], provider_config: AwsProviderConfig, provider_pool: AwsPool) -> None:
        self.name: str = label["name"]
        self.pool = provider_pool
        self.cloud_image: AwsProviderCloudImage | None = None
        self.diskimage: DiskImage | None = None
        self.diskimage_name: str | None = label.get("diskimage")
        self._load_image(label, provider_config)
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
        self.host_key_checking = provider_pool.host_key_checking
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

    def _load_image(self, label: dict[str, Any], provider: AwsProviderConfig) -> None:
        for key, images in (("cloud-image", provider.cloud_images), ("diskimage", provider.diskimages)):
            name = label.get(key)
            if name is None:
                continue
            if name not in images:
                raise UnknownImage(
                    f"{key} {name} does not exist in provider {provider.name} but is referenced in label {self.name}",
                    where=(key,),
                )
            if key == "cloud-image":
                self.cloud_image = provider.cloud_images[name]
            else:
                self.diskimage = provider.diskimages[name].diskimage

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


class AwsPool(ConfigPool):
    ignore_equality = ["provider"]

    def __init__(self, provider_config: AwsProviderConfig | None = None, pool_config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.provider = provider_config
        self.name: str | None = None
        self.max_cores: float = math.inf
        self.max_ram: float = math.inf
        self.max_resources: dict[str, float] = {}
        self.security_group_id: str | None = None
        self.security_group_ids: list[str] = []
        self.subnet_id: str | None = None
        self.subnet_ids: list[str] = []
        self.az: str | None = None
        self.public_ipv4 = True
        self.public_ipv6 = False
        self.use_internal_ip = False
        self.host_key_checking = True
        if provider_config is not None and pool_config is not None:
            self.load(pool_config)

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        provider = self.provider
        assert provider is not None
        self.name = pool_config["name"]
        self.max_servers = pool_config.get("max-servers", provider.max_servers)
        self.max_cores = pool_config.get("max-cores", provider.max_cores)
        self.max_ram = pool_config.get("max-ram", provider.max_ram)
        self.max_resources = {**provider.max_resources, **(pool_config.get("max-resources") or {})}
        self.security_group_id = pool_config.get("security-group-id")
        self.security_group_ids = _joined(self.security_group_id, pool_config.get("security-group-ids"))
        self.subnet_id = pool_config.get("subnet-id")
        self.subnet_ids = _joined(self.subnet_id, pool_config.get("subnet-ids"))
        self.az = pool_config.get("availability-zone")
        public = pool_config.get("public-ipv4", provider.public_ipv4)
        self.public_ipv4 = bool(pool_config.get("public-ip-address", public))
        self.public_ipv6 = bool(pool_config.get("public-ipv6", provider.public_ipv6))
        self.use_internal_ip = bool(pool_config.get("use-internal-ip", provider.use_internal_ip))
        self.host_key_checking = bool(pool_config.get("host-key-checking", provider.host_key_checking))

    @staticmethod
    def getSchema() -> Any:
        return schema.pool()


def _joined(one: str | None, more: list[str] | None) -> list[str]:
    return list(dict.fromkeys(([one] if one else []) + list(more or [])))


class AwsProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(provider)
        self.driver_object = driver
        self._pools: dict[str, AwsPool] = {}
        self.profile_name: str | None = None
        self.region_name: str | None = None
        self.rate: float = 2
        self.launch_retries = 3
        self.launch_timeout = 3600
        self.boot_timeout = 180
        self.use_internal_ip = False
        self.host_key_checking = True
        self.public_ipv4 = True
        self.public_ipv6 = False
        self.object_storage: dict[str, Any] | None = None
        self.image_type = "raw"
        self.image_name_format = "{image_name}-{timestamp}"
        self.image_import_timeout: int | None = None
        self.post_upload_hook: str | None = None
        self.max_servers: float = math.inf
        self.max_cores: float = math.inf
        self.max_ram: float = math.inf
        self.max_resources: dict[str, float] = {}
        self.cloud_images: dict[str, AwsProviderCloudImage] = {}
        self.diskimages: dict[str, AwsProviderDiskImage] = {}

    @property
    def pools(self) -> dict[str, AwsPool]:  # type: ignore[override]
        return self._pools

    @property
    def manage_images(self) -> bool:
        return True

    def load(self, newconfig: Config) -> None:
        options = self.provider
        self.profile_name = options.get("profile-name")
        self.region_name = _required(options, "region-name", ())
        self.rate = options.get("rate", 2)
        self.launch_retries = options.get("launch-retries", 3)
        self.launch_timeout = options.get("launch-timeout", 3600)
        self.boot_timeout = options.get("boot-timeout", 180)
        self.use_internal_ip = bool(options.get("use-internal-ip", False))
        self.host_key_checking = bool(options.get("host-key-checking", True))
        self.public_ipv4 = bool(options.get("public-ipv4", True))
        self.public_ipv6 = bool(options.get("public-ipv6", False))
        self.object_storage = options.get("object-storage")
        if self.object_storage is not None:
            _required(self.object_storage, "bucket-name", ("object-storage",))
        self.image_type = options.get("image-format", "raw")
        self.image_import_timeout = options.get("image-import-timeout")
        self.post_upload_hook = options.get("post-upload-hook")
        self.max_servers = options.get("max-servers", math.inf)
        self.max_cores = options.get("max-cores", math.inf)
        self.max_ram = options.get("max-ram", math.inf)
        self.max_resources = dict(options.get("max-resources") or {})
        for index, image in enumerate(options.get("cloud-images") or []):
            name = _required(image, "name", ("cloud-images", index))
            self.cloud_images[name] = AwsProviderCloudImage(image)
        for index, image in enumerate(options.get("diskimages") or []):
            where: Where = ("diskimages", index)
            name = _required(image, "name", where)
            with _at(where):
                self.diskimages[name] = AwsProviderDiskImage(self.image_type, image, newconfig.diskimages[name])
        for index, pool_options in enumerate(options.get("pools") or []):
            self._load_pool(pool_options, ("pools", index), newconfig)

    def _load_pool(self, options: dict[str, Any], where: Where, newconfig: Config) -> None:
        name = _required(options, "name", where)
        pool = AwsPool(self, options)
        for index, label_options in enumerate(options.get("labels") or []):
            place: Where = (*where, "labels", index)
            label_name = _required(label_options, "name", place)
            with _at(place, f"pool {name}, label {label_name}"):
                pool.labels[label_name] = AwsLabel(label_options, self, pool)
            newconfig.labels[label_name].pools.append(pool)
        self._pools[name] = pool

    def getSchema(self) -> v.Schema:
        return v.Schema(schema.provider())

    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        return {label for name, pool in self._pools.items() if not pool_name or name == pool_name for label in pool.labels}


class _at:
    """Says where in the provider an error was."""

    def __init__(self, where: Where, context: str | None = None) -> None:
        self.where = where
        self.context = context

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ConfigError):
            error.where = (*self.where, *error.where)
            if self.context:
                error.context.append(self.context)

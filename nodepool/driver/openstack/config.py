"""Options of an OpenStack provider (OST-1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import voluptuous as v

from nodepool.config.diskimages import DiskImage
from nodepool.config.errors import ConfigError, PathItem, ProviderUnavailable
from nodepool.config.model import Config, ConfigPool, ProviderConfig
from nodepool.config.value import ConfigValue
from nodepool.driver.common.options import connection_port


def _name(options: dict[str, Any], where: tuple[PathItem, ...]) -> str:
    if not isinstance(options, dict) or not options.get("name"):
        raise ConfigError(f"required key 'name' is missing in {where[-2]}", where=where)
    return str(options["name"])


class ProviderDiskImage(ConfigValue):
    """An image that we upload to this cloud."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.pause = False
        self.config_drive: bool | None = None
        self.connection_type: str | None = None
        self.connection_port: int | None = None
        self.username: str | None = None
        self.python_path: str | None = None
        self.shell_type: str | None = None
        self.meta: dict[str, Any] = {}


class ProviderCloudImage(ConfigValue):
    """An existing image in the cloud."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.config_drive: bool | None = None
        self.image_id: str | None = None
        self.image_name: str | None = None
        self.username: str | None = None
        self.python_path: str | None = None
        self.shell_type: str | None = None
        self.connection_type: str | None = None
        self.connection_port: int | None = None

    @property
    def external_name(self) -> str | None:
        """Name or id of the image in the cloud."""
        return self.image_id or self.image_name or self.name


class ProviderLabel(ConfigValue):
    """Launch settings of a label."""

    # The image is compared by name: its other relevant settings are in the provider's own entry.
    ignore_equality = ["pool", "diskimage"]

    def __init__(self) -> None:
        self.name: str | None = None
        self.diskimage: DiskImage | None = None
        self.diskimage_name: str | None = None
        self.cloud_image: ProviderCloudImage | None = None
        self.min_ram = 0
        self.flavor_name: str | None = None
        self.key_name: str | None = None
        self.console_log = False
        self.boot_from_volume = False
        self.volume_size = 50
        self.instance_properties: dict[str, Any] = {}
        self.dynamic_instance_properties: dict[str, str] = {}
        self.userdata: str | None = None
        self.networks: list[str] = []
        self.host_key_checking = True
        # Not in 11.0.0.
        self.volume_type: str | None = None
        self.azs: list[str] | None = None
        self.security_groups: list[str] = []
        self.server_group: str | None = None
        self.scheduler_hints: dict[str, Any] = {}
        self.pool: ProviderPool | None = None


class ProviderPool(ConfigPool):
    ignore_equality = ["provider"]

    def __init__(self) -> None:
        self.name = ""
        self.max_cores: float | None = None
        self.max_ram: float | None = None
        self.max_volumes: float | None = None
        self.max_volume_gb: float | None = None
        self.networks: list[str] = []
        self.security_groups: list[str] = []
        self.auto_floating_ip = True
        self.host_key_checking = True
        self.use_internal_ip = False
        self.provider: OpenStackProviderConfig | None = None
        super().__init__()

    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: object) -> None:
        """Read the options. *args*: the whole configuration and the provider configuration."""
        full_config, provider = args
        super().load(pool_config)
        self.provider = provider
        self.name = pool_config["name"]
        self.max_cores = pool_config.get("max-cores", math.inf)
        self.max_ram = pool_config.get("max-ram", math.inf)
        self.max_volumes = pool_config.get("max-volumes", math.inf)
        self.max_volume_gb = pool_config.get("max-volume-gb", math.inf)
        self.ignore_provider_quota = pool_config.get("ignore-provider-quota", False)
        self.azs = pool_config.get("availability-zones")
        self.networks = pool_config.get("networks") or []
        self.security_groups = pool_config.get("security-groups") or []
        self.auto_floating_ip = bool(pool_config.get("auto-floating-ip", True))
        self.host_key_checking = bool(pool_config.get("host-key-checking", True))
        self.use_internal_ip = bool(pool_config.get("use-internal-ip", False))
        for index, options in enumerate(pool_config.get("labels") or []):
            label = self._load_label(options, ("labels", index), full_config, provider)
            self.labels[label.name] = label
            full_config.labels[label.name].pools.append(self)

    def _load_label(
        self, options: dict[str, Any], where: tuple[PathItem, ...], full_config: Config, provider: OpenStackProviderConfig
    ) -> ProviderLabel:
        label = ProviderLabel()
        label.name = _name(options, where)
        label.pool = self
        diskimage, cloud_image = options.get("diskimage"), options.get("cloud-image")
        if diskimage:
            label.diskimage = full_config.diskimages[diskimage]
            label.diskimage_name = diskimage
        elif cloud_image:
            label.cloud_image = provider.cloud_images.get(cloud_image)
            if label.cloud_image is None:
                raise ConfigError(
                    f"cloud-image {cloud_image} does not exist in provider {provider.name}"
                    f" but is referenced in label {label.name}",
                    where=(*where, "cloud-image"),
                )
        label.min_ram = options.get("min-ram", 0)
        label.flavor_name = options.get("flavor-name")
        label.key_name = options.get("key-name")
        label.console_log = options.get("console-log", False)
        label.boot_from_volume = bool(options.get("boot-from-volume", False))
        label.volume_size = options.get("volume-size", 50)
        label.instance_properties = options.get("instance-properties") or {}
        label.dynamic_instance_properties = options.get("dynamic-instance-properties") or {}
        label.userdata = options.get("userdata")
        label.networks = options.get("networks") or self.networks
        label.host_key_checking = options.get("host-key-checking", self.host_key_checking)
        label.volume_type = options.get("volume-type")
        if label.volume_type and not label.boot_from_volume:
            raise ConfigError(f"volume-type of label {label.name} needs boot-from-volume: true", where=(*where, "volume-type"))
        label.azs = options.get("availability-zones")
        label.security_groups = options.get("security-groups") or []
        label.server_group = options.get("server-group")
        label.scheduler_hints = options.get("scheduler-hints") or {}
        return label


class OpenStackProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]

    def __init__(self, driver: Any, provider: dict[str, Any]) -> None:
        self.driver_object = driver
        self._pools: dict[str, ProviderPool] = {}
        self.cloud_config: Any = None
        self.image_type: str | None = None
        self.region_name: str | None = None
        self.rate: float = 1.0
        self.boot_timeout: int = 60
        self.launch_timeout: int = 3600
        self.launch_retries: int = 3
        self.image_upload_timeout: int = 3600
        self.clean_floating_ips: bool | None = None
        self.port_cleanup_interval: int = 600
        self.image_name_format = "{image_name}-{timestamp}"
        self.post_upload_hook: str | None = None
        self.diskimages: dict[str, ProviderDiskImage] = {}
        self.cloud_images: dict[str, ProviderCloudImage] = {}
        super().__init__(provider)

    @property
    def pools(self) -> dict[str, ProviderPool]:  # type: ignore[override]
        return self._pools

    @property
    def manage_images(self) -> bool:
        return True

    def _cloudKwargs(self) -> dict[str, Any]:
        """Return the arguments of the SDK's cloud lookup."""
        return {key: self.provider[key] for key in ("region-name", "cloud") if key in self.provider}

    def _lookupCloud(self) -> Any:
        try:
            clouds = self.driver_object.openstack_config
            return clouds.get_one(**self._cloudKwargs())
        except (ConfigError, ImportError):
            raise
        except Exception as exc:
            cloud = self.provider.get("cloud")
            raise ProviderUnavailable(
                f"cloud {cloud!r} of provider {self.name} cannot be used, see its entry in clouds.yaml: {exc}", where=("cloud",)
            ) from exc

    def load(self, newconfig: Config) -> None:
        options = self.provider
        self.cloud_config = self._lookupCloud()
        self.image_type = self.cloud_config.config["image_format"]
        self.region_name = options.get("region-name")
        self.rate = float(options.get("rate", 1.0))
        self.boot_timeout = options.get("boot-timeout", 60)
        self.launch_timeout = options.get("launch-timeout", 3600)
        self.launch_retries = options.get("launch-retries", 3)
        self.image_upload_timeout = options.get("image-upload-timeout", 3600)
        self.clean_floating_ips = options.get("clean-floating-ips")
        self.port_cleanup_interval = options.get("port-cleanup-interval", 600)
        self.image_name_format = options.get("image-name-format", "{image_name}-{timestamp}")
        self.post_upload_hook = options.get("post-upload-hook")
        for index, image in enumerate(options.get("diskimages") or []):
            self._load_diskimage(image, ("diskimages", index), newconfig)
        for index, image in enumerate(options.get("cloud-images") or []):
            self._load_cloud_image(image, ("cloud-images", index))
        for index, pool_options in enumerate(options.get("pools") or []):
            where: tuple[PathItem, ...] = ("pools", index)
            name = _name(pool_options, where)
            pool = ProviderPool()
            try:
                pool.load(pool_options, newconfig, self)
            except ConfigError as exc:
                if exc.where[:1] == ("labels",):
                    exc.where = (*where, *exc.where)
                exc.context.append(f"pool {name}")
                raise
            self._pools[name] = pool

    def _load_diskimage(self, options: dict[str, Any], where: tuple[PathItem, ...], newconfig: Config) -> None:
        image = ProviderDiskImage()
        image.name = _name(options, where)
        top = newconfig.diskimages[image.name]
        top.image_types.add(self.image_type or "")
        image.pause = bool(options.get("pause", False))
        image.config_drive = options.get("config-drive")
        image.connection_type = options.get("connection-type", "ssh")
        image.connection_port = connection_port(options, str(image.connection_type))
        image.username = top.username
        image.python_path = top.python_path
        image.shell_type = top.shell_type
        image.meta = options.get("meta") or {}
        self.diskimages[image.name] = image

    def _load_cloud_image(self, options: dict[str, Any], where: tuple[PathItem, ...]) -> None:
        image = ProviderCloudImage()
        image.name = _name(options, where)
        image.config_drive = options.get("config-drive")
        image.image_id = options.get("image-id")
        image.image_name = options.get("image-name")
        image.username = options.get("username")
        image.python_path = options.get("python-path", "auto")
        image.shell_type = options.get("shell-type")
        image.connection_type = options.get("connection-type", "ssh")
        image.connection_port = connection_port(options, str(image.connection_type))
        self.cloud_images[image.name] = image

    def getSchema(self) -> v.Schema:
        return v.Schema(provider_schema())

    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        return {label for name, pool in self._pools.items() if not pool_name or name == pool_name for label in pool.labels}


def _one_of(keys: tuple[str, ...], exactly_one: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a check over a whole dict: one of *keys* is required."""

    def check(data: dict[str, Any]) -> dict[str, Any]:
        given = [key for key in keys if key in data]
        if not given:
            raise v.Invalid(f"one of {' and '.join(keys)} is required")
        if exactly_one and len(given) > 1:
            raise v.Invalid(f"only one of {' and '.join(keys)} may be given")
        return data

    return check


def provider_schema() -> dict[Any, Any]:
    """Return the schema of the provider without common options (for validation only)."""
    diskimage = {
        v.Required("name"): str,
        "pause": bool,
        "meta": dict,
        "config-drive": bool,
        "connection-type": str,
        "connection-port": int,
    }
    cloud_image = {
        v.Required("name"): str,
        "config-drive": bool,
        v.Exclusive("image-id", "cloud-image-name-or-id"): str,
        v.Exclusive("image-name", "cloud-image-name-or-id"): str,
        "username": str,
        "python-path": str,
        "shell-type": str,
        "connection-type": str,
        "connection-port": int,
    }
    label = v.All(
        {
            v.Required("name"): str,
            "diskimage": str,
            "cloud-image": str,
            "min-ram": int,
            "flavor-name": str,
            "key-name": str,
            "console-log": bool,
            "boot-from-volume": bool,
            "volume-size": int,
            "instance-properties": dict,
            "dynamic-instance-properties": dict,
            "userdata": str,
            "networks": [str],
            "host-key-checking": bool,
            "volume-type": str,
            "availability-zones": [str],
            "security-groups": [str],
            "server-group": str,
            "scheduler-hints": dict,
        },
        _one_of(("diskimage", "cloud-image"), exactly_one=True),
        _one_of(("min-ram", "flavor-name"), exactly_one=False),
    )
    pool = {
        **ConfigPool.getCommonSchemaDict(),
        v.Required("name"): str,
        "networks": [str],
        "security-groups": [str],
        "availability-zones": [str],
        "auto-floating-ip": bool,
        "use-internal-ip": bool,
        "host-key-checking": bool,
        "ignore-provider-quota": bool,
        "max-cores": int,
        "max-ram": int,
        "max-volumes": int,
        "max-volume-gb": int,
        "labels": [label],
    }
    return {
        v.Required("cloud"): str,
        "region-name": str,
        "boot-timeout": int,
        "launch-timeout": int,
        "launch-retries": int,
        "image-upload-timeout": int,
        "nodepool-id": str,
        "rate": v.Coerce(float),
        "image-name-format": str,
        "clean-floating-ips": bool,
        "port-cleanup-interval": int,
        "post-upload-hook": str,
        "diskimages": [diskimage],
        "cloud-images": [cloud_image],
        "pools": [pool],
    }

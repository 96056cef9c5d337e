"""Common options of providers of virtual machines, and their loading (CFG-7)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import voluptuous as v

from nodepool.config.diskimages import DiskImage
from nodepool.config.errors import ConfigError, PathItem
from nodepool.config.model import Config, ConfigPool, ProviderConfig
from nodepool.config.value import ConfigValue
from nodepool.driver.provider import Driver

DEFAULT_PORTS = {"ssh": 22, "winrm": 5986}

Where = tuple[PathItem, ...]

#: Options of images, in schemas.
CONNECTION: dict[Any, Any] = {"connection-type": str, "connection-port": int, "python-path": str, "shell-type": str}
#: Options of providers and pools.
LIMITS: dict[Any, Any] = {"max-servers": int, "max-cores": int, "max-ram": int, "max-resources": {str: int}}
#: Of providers.
TIMES: dict[Any, Any] = {"boot-timeout": int, "launch-timeout": int, "launch-retries": int}
NUMBER = v.Any(int, float)


def pool(label: object, *switches: str) -> dict[Any, Any]:
    """Return the options that all pools have, and boolean ones."""
    return {
        **ConfigPool.getCommonSchemaDict(),
        v.Required("name"): str,
        v.Required("labels"): [label],
        **dict.fromkeys((*switches, "use-internal-ip", "host-key-checking"), bool),
        "max-cores": int,
        "max-ram": int,
        "max-resources": {str: int},
    }


class UnknownImage(ConfigError, ValueError):
    """A label refers to an image that the provider does not have."""

    __str__ = ConfigError.__str__


def connection_port(options: dict[str, Any], connection_type: str) -> int:
    return int(options.get("connection-port", DEFAULT_PORTS.get(connection_type, 22)))


def required(options: dict[str, Any], key: str, where: Where = ()) -> Any:
    if not isinstance(options, dict) or options.get(key) is None:
        raise ConfigError(f"required key '{key}' is missing", where=where)
    return options[key]


@contextmanager
def at(where: Where, context: str | None = None) -> Iterator[None]:
    """Add the position in the provider to errors of the block."""
    try:
        yield
    except ConfigError as error:
        error.where = (*where, *error.where)
        if context:
            error.context.append(context)
        raise


def one_of(*keys: str, what: str) -> Any:
    """Return a check for schemas: exactly one of these options is given."""

    def check(options: dict[str, Any]) -> dict[str, Any]:
        given = [key for key in keys if options.get(key) is not None]
        if not given:
            raise v.Invalid(f"{what} needs one of {', '.join(keys)}")
        if len(given) > 1:
            raise v.Invalid(f"{what} has more than one of {', '.join(keys)}", path=[given[1]])
        return options

    return check


def texts(values: dict[str, Any] | None) -> dict[str, str]:
    """Return tags as strings: YAML creates numbers and booleans, clouds support strings only."""
    return {
        str(key): str(value).lower() if isinstance(value, bool) else str(value) for key, value in (values or {}).items()
    }  # fmt: skip


class CloudImage(ConfigValue):
    """An existing image in the cloud."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.name: str = options["name"]
        self.username: str | None = options.get("username")
        self.python_path: str | None = options.get("python-path", "auto")
        self.shell_type: str | None = options.get("shell-type")
        self.connection_type: str = options.get("connection-type", "ssh")
        self.connection_port: int = connection_port(options, self.connection_type)

    @property
    def external_name(self) -> str:
        """Name of the image in the cloud, for messages."""
        return self.name


class ProviderDiskImage(ConfigValue):
    """An image that we upload."""

    # Top-level objects are compared by name there.
    ignore_equality = ["diskimage"]

    def __init__(self, image_type: str, options: dict[str, Any], diskimage: DiskImage) -> None:
        self.name: str = options["name"]
        self.diskimage = diskimage
        diskimage.image_types.add(image_type)
        self.pause = bool(options.get("pause", False))
        self.username: str = options.get("username", diskimage.username)
        self.python_path: str | None = options.get("python-path", diskimage.python_path)
        self.shell_type: str | None = options.get("shell-type", diskimage.shell_type)
        self.connection_type: str = options.get("connection-type", "ssh")
        self.connection_port: int = connection_port(options, self.connection_type)
        self.meta: dict[str, Any] = options.get("tags") or {}

    @property
    def external_name(self) -> str:
        """Name of the image in the whole configuration."""
        return self.name


class MachineLabel(ConfigValue):
    # The image is compared by name: its other relevant settings are in the provider's own entry.
    ignore_equality = ["pool", "diskimage"]

    def __init__(self, options: dict[str, Any], provider: MachineProviderConfig, pool: MachinePool) -> None:
        self.name: str = options["name"]
        self.pool = pool
        self.host_key_checking = pool.host_key_checking
        self.cloud_image: Any = None
        self.diskimage: DiskImage | None = None
        self.diskimage_name: str | None = options.get("diskimage")
        for key, images in (("cloud-image", provider.cloud_images), ("diskimage", provider.diskimages)):
            name = options.get(key)
            if name is None:
                continue
            if name not in images:
                raise UnknownImage(
                    f"{key} {name} does not exist in provider {provider.name} but is referenced in label {self.name}",
                    where=(key,),
                )
            if key == "cloud-image":
                self.cloud_image = images[name]
            else:
                self.diskimage = images[name].diskimage


class MachinePool(ConfigPool):
    ignore_equality = ["provider"]
    provider: MachineProviderConfig

    def __init__(self, provider_config: Any = None, pool_config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.provider = provider_config
        self.name = ""
        self.max_cores: float = math.inf
        self.max_ram: float = math.inf
        self.max_resources: dict[str, float] = {}
        self.use_internal_ip = False
        self.host_key_checking = True
        if provider_config is not None and pool_config is not None:
            self.load(pool_config)

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        provider = self.provider
        self.name = required(pool_config, "name")
        self.max_servers = pool_config.get("max-servers", provider.max_servers)
        self.max_cores = pool_config.get("max-cores", provider.max_cores)
        self.max_ram = pool_config.get("max-ram", provider.max_ram)
        self.max_resources = {**provider.max_resources, **(pool_config.get("max-resources") or {})}
        self.use_internal_ip = bool(pool_config.get("use-internal-ip", provider.use_internal_ip))
        self.host_key_checking = bool(pool_config.get("host-key-checking", provider.host_key_checking))


class MachineProviderConfig(ProviderConfig):
    """Base class; a driver names its classes, and reads its own options in ``load_own``."""

    ignore_equality = ["driver_object"]
    cloud_image_class: ClassVar[type[Any]] = CloudImage
    diskimage_class: ClassVar[type[Any]] = ProviderDiskImage
    label_class: ClassVar[type[Any]] = MachineLabel
    pool_class: ClassVar[type[Any]] = MachinePool
    #: Defaults of 11.0.0 that differ between clouds.
    default_boot_timeout: ClassVar[int] = 120
    default_rate: ClassVar[float] = 1
    uploads: ClassVar[bool] = True

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(provider)
        self.driver_object = driver
        self._pools: dict[str, Any] = {}
        self.rate: float = self.default_rate
        self.launch_retries = 3
        self.launch_timeout = 3600
        self.boot_timeout = self.default_boot_timeout
        self.use_internal_ip = False
        self.host_key_checking = True
        self.image_type = "raw"
        self.image_name_format = "{image_name}-{timestamp}"
        self.post_upload_hook: str | None = None
        self.max_servers: float = math.inf
        self.max_cores: float = math.inf
        self.max_ram: float = math.inf
        self.max_resources: dict[str, float] = {}
        self.cloud_images: dict[str, Any] = {}
        self.diskimages: dict[str, Any] = {}

    @property
    def pools(self) -> dict[str, Any]:
        return self._pools

    @property
    def manage_images(self) -> bool:
        return self.uploads

    def load_own(self, options: dict[str, Any]) -> None:
        """Read the options of this driver; pools and images are read afterwards."""

    def load(self, newconfig: Config) -> None:
        options = self.provider
        self.rate = options.get("rate", self.default_rate)
        self.launch_retries = options.get("launch-retries", 3)
        self.launch_timeout = options.get("launch-timeout", 3600)
        self.boot_timeout = options.get("boot-timeout", self.default_boot_timeout)
        self.use_internal_ip = bool(options.get("use-internal-ip", False))
        self.host_key_checking = bool(options.get("host-key-checking", True))
        self.post_upload_hook = options.get("post-upload-hook")
        self.max_servers = options.get("max-servers", math.inf)
        self.max_cores = options.get("max-cores", math.inf)
        self.max_ram = options.get("max-ram", math.inf)
        self.max_resources = dict(options.get("max-resources") or {})
        self.load_own(options)
        for index, image in enumerate(options.get("cloud-images") or []):
            where: Where = ("cloud-images", index)
            name = required(image, "name", where)
            with at(where):
                self.cloud_images[name] = self._cloud_image(image)
        for index, image in enumerate(options.get("diskimages") or []):
            where = ("diskimages", index)
            name = required(image, "name", where)
            with at(where):
                self.diskimages[name] = self.diskimage_class(self.image_type, image, newconfig.diskimages[name])
        for index, pool_options in enumerate(options.get("pools") or []):
            self._load_pool(pool_options, ("pools", index), newconfig)

    def _cloud_image(self, options: dict[str, Any]) -> Any:
        return self.cloud_image_class(options)

    def _load_pool(self, options: dict[str, Any], where: Where, newconfig: Config) -> None:
        name = required(options, "name", where)
        with at(where, f"pool {name}"):
            pool = self.pool_class(self, options)
        for index, label_options in enumerate(options.get("labels") or []):
            place: Where = (*where, "labels", index)
            label_name = required(label_options, "name", place)
            with at(place, f"pool {name}, label {label_name}"):
                pool.labels[label_name] = self.label_class(label_options, self, pool)
            newconfig.labels[label_name].pools.append(pool)
        self._pools[name] = pool

    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        return {label for name, pool in self._pools.items() if not pool_name or name == pool_name for label in pool.labels}

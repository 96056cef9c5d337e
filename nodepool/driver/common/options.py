"""Common options of providers of virtual machines, and their loading (CFG-7)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import voluptuous as v

from nodepool.base.config_value import ConfigValue
from nodepool.base.option import (
    REQUIRED,
    Each,
    at,
    changed,
    derived,
    entries,
    inherited,
    load,
    option,
)
from nodepool.config.diskimages import DiskImage
from nodepool.config.model import Config, ConfigPool, ProviderConfig
from nodepool.driver.provider import Driver
from nodepool.exceptions import ConfigError

DEFAULT_PORTS = {"ssh": 22, "winrm": 5986}
NUMBER = v.Any(int, float)

#: Defaults.
PROVIDER, DISKIMAGE = inherited("provider"), inherited("diskimage")
_PORT = derived("22, winrm 5986", lambda image, _: DEFAULT_PORTS.get(image.connection_type, 22))


class UnknownImage(ConfigError, ValueError):
    """A label refers to an image that the provider does not have."""

    __str__ = ConfigError.__str__


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
        str(key): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in (values or {}).items()
    }


class Image(ConfigValue):
    """An image in the cloud."""

    name: str
    connection_type: str = option(str, "ssh", "``winrm`` for Windows")
    connection_port: int = option(int, _PORT, "port that the launcher checks", convert=int)

    @property
    def external_name(self) -> str:
        """Name of the image, for messages."""
        return self.name


class CloudImage(Image):
    """An existing image in the cloud."""

    name: str = option(str, REQUIRED, "name for labels")
    username: str | None = option(str, None, "login user of jobs", key=v.Required)
    python_path: str | None = option(str, "auto", "Python of the node, for Ansible")
    shell_type: str | None = option(str, None, "for Ansible, for example ``cmd``")

    def __init__(self, options: dict[str, Any]) -> None:
        load(self, options)


class ProviderDiskImage(Image):
    """An image that we upload."""

    # Top-level objects are compared by name there.
    ignore_equality = ["diskimage"]
    name: str = option(str, REQUIRED, "name of a top-level diskimage")
    username: str = option(str, DISKIMAGE, "login user of jobs")
    python_path: str | None = option(str, DISKIMAGE, "Python of the node, for Ansible")
    shell_type: str | None = option(str, DISKIMAGE, "for Ansible, for example ``cmd``")
    pause: bool = option(bool, False, "stop uploads")
    meta: dict[str, Any] = option(dict, {}, "tags of the image in the cloud", name="tags")

    def __init__(self, image_type: str, options: dict[str, Any], diskimage: DiskImage) -> None:
        self.diskimage = diskimage
        diskimage.image_types.add(image_type)
        load(self, options)


class MachineLabel(ConfigValue):
    # The image is compared by name: its other relevant settings are in the provider's own entry.
    ignore_equality = ["pool", "diskimage"]
    checks = (one_of("cloud-image", "diskimage", what="a label"),)
    name: str = option(str, REQUIRED, "name of a top-level label")
    cloud_image: Any = option(
        str, None, "entry of ``cloud-images``; or ``diskimage``", stored=False
    )
    diskimage: DiskImage | None = option(
        str, None, "entry of ``diskimages``; or ``cloud-image``", stored=False
    )

    def __init__(
        self, options: dict[str, Any], provider: MachineProviderConfig, pool: MachinePool
    ) -> None:
        self.pool = pool
        self.host_key_checking = pool.host_key_checking
        self.diskimage_name: str | None = options.get("diskimage")
        load(self, options)
        for key, images in (
            ("cloud-image", provider.cloud_images),
            ("diskimage", provider.diskimages),
        ):
            name = options.get(key)
            if name is None:
                continue
            if name not in images:
                raise UnknownImage(
                    f"{key} {name} does not exist in provider {provider.name} but is referenced in "
                    f"label {self.name}",
                    where=(key,),
                )
            if key == "cloud-image":
                self.cloud_image = images[name]
            else:
                self.diskimage = images[name].diskimage


class MachinePool(ConfigPool):
    ignore_equality = ["provider"]
    provider: MachineProviderConfig
    name: str = option(str, REQUIRED, "part of records and metrics")
    labels: dict[str, Any] = option(
        Each("label_class"), {}, "labels that the pool offers", key=v.Required
    )
    max_servers: float = changed(ConfigPool.max_servers, default=PROVIDER)
    max_cores: float = option(int, PROVIDER, "maximum number of vCPUs")
    max_ram: float = option(int, PROVIDER, "maximum MiB")
    max_resources: dict[str, float] = option(
        {str: int},
        {},
        "maximum of other resources, by name; added to the provider's",
        shown="the provider's",
    )
    use_internal_ip: bool = option(bool, PROVIDER, "use the private address")
    host_key_checking: bool = option(
        bool, PROVIDER, "read the SSH host keys before a node is ready"
    )

    def __init__(
        self,
        provider_config: MachineProviderConfig | None = None,
        pool_config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.provider = cast(MachineProviderConfig, provider_config)
        if provider_config is not None and pool_config is not None:
            self.load(pool_config)

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)
        self.max_resources = {**self.provider.max_resources, **self.max_resources}


class MachineProviderConfig(ProviderConfig):
    """Base class; a driver names its classes, and completes its options in ``load_own``."""

    ignore_equality = ["driver_object"]
    cloud_image_class: ClassVar[type[Any]] = CloudImage
    diskimage_class: ClassVar[type[Any]] = ProviderDiskImage
    label_class: ClassVar[type[Any]] = MachineLabel
    pool_class: ClassVar[type[Any]] = MachinePool
    uploads: ClassVar[bool] = True
    image_type: str = "raw"
    image_name_format = "{image_name}-{timestamp}"

    rate: float = option(
        NUMBER,
        1,
        "**changing calls per second**; deletions have the same number in addition, reading calls "
        "ten times as many. A throttled"
        " provider slows down automatically, to one call in 30 s, and recovers",
    )
    boot_timeout: int = option(
        int, 120, "seconds from the start of a machine until its port answers"
    )
    launch_timeout: int = option(int, 3600, "seconds for the whole launch")
    launch_retries: int = option(int, 3, "attempts in total")
    max_servers: float = option(int, math.inf, "default of the pools")
    max_cores: float = option(int, math.inf, "default of the pools")
    max_ram: float = option(int, math.inf, "MiB; default of the pools")
    max_resources: dict[str, float] = option(
        {str: int}, {}, "maximum of other resources, by name; default of the pools", convert=dict
    )
    use_internal_ip: bool = option(bool, False, "default of the pools")
    host_key_checking: bool = option(bool, True, "default of the pools")
    post_upload_hook: str | None = option(str, None, "program to run after an upload")
    cloud_images: dict[str, Any] = option(Each("cloud_image_class"), {}, "existing images")
    diskimages: dict[str, Any] = option(
        Each("diskimage_class"), {}, "images that the builder uploads"
    )
    _pools: dict[str, Any] = option(
        Each("pool_class"), {}, "groups of labels", name="pools", key=v.Required
    )

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(provider)
        self.driver_object = driver
        self._pools, self.cloud_images, self.diskimages = {}, {}, {}

    @property
    def pools(self) -> dict[str, Any]:
        return self._pools

    @property
    def manage_images(self) -> bool:
        return self.uploads

    def load_own(self, options: dict[str, Any]) -> None:
        """Check and complete the loaded options; pools and images are loaded afterwards."""

    def load(self, newconfig: Config) -> None:
        options = self.provider
        load(self, options)
        self.load_own(options)
        for where, image in entries(options.get("cloud-images"), "cloud-images"):
            with at(where):
                self.cloud_images[image["name"]] = self._cloud_image(image)
        for where, image in entries(options.get("diskimages"), "diskimages"):
            with at(where):
                self.diskimages[image["name"]] = self.diskimage_class(
                    self.image_type, image, newconfig.diskimages[image["name"]]
                )
        for where, pool in entries(options.get("pools"), "pools"):
            with at(where, f"pool {pool['name']}"):
                self._load_pool(pool, newconfig)

    def _cloud_image(self, options: dict[str, Any]) -> Any:
        return self.cloud_image_class(options)

    def _load_pool(self, options: dict[str, Any], newconfig: Config) -> None:
        pool = self._pools[options["name"]] = self.pool_class(self, options)
        for where, label in entries(options.get("labels"), "labels"):
            with at(where, f"label {label['name']}"):
                pool.labels[label["name"]] = self.label_class(label, self, pool)
                newconfig.labels[label["name"]].pools.append(pool)

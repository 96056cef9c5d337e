"""Options of an OpenStack provider (OST-1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import voluptuous as v

from nodepool.base.config_value import ConfigValue
from nodepool.base.option import REQUIRED, at, changed, entries, exclusive, inherited, load, option
from nodepool.config.diskimages import DiskImage
from nodepool.config.errors import ProviderUnavailable
from nodepool.config.model import Config, ConfigPool, ProviderConfig
from nodepool.driver.common.offers import ALTERNATIVES
from nodepool.driver.common.options import CloudImage, Image
from nodepool.exceptions import ConfigError

#: Default of labels.
_POOL = inherited("pool")
_IMAGE = exclusive("cloud-image-name-or-id")
_FLAVORS, _ZONES = exclusive("flavors"), exclusive("zones")


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


class ProviderDiskImage(Image):
    """An image that we upload to this cloud."""

    name: str = option(str, REQUIRED, "name of a top-level diskimage", convert=str)
    pause: bool = option(bool, False, "stop uploads")
    meta: dict[str, Any] = option(
        dict,
        {},
        "properties of the image; they override the top-level ``metadata``. Values become strings; "
        "``min_disk`` and ``min_ram``"
        " numbers, ``protected`` a bool, ``tags`` a list",
    )
    config_drive: bool | None = option(
        bool, None, "give servers a config drive", shown="the cloud's"
    )
    username: str | None = None
    python_path: str | None = None
    shell_type: str | None = None


class ProviderCloudImage(CloudImage):
    """An existing image in the cloud."""

    name: str = changed(CloudImage.name, convert=str)
    username: str | None = changed(CloudImage.username, key=str)
    config_drive: bool | None = option(
        bool, None, "give servers a config drive", shown="the cloud's"
    )
    image_id: str | None = option(
        str, None, "id in the cloud, not checked; or ``image-name``", key=_IMAGE
    )
    image_name: str | None = option(
        str, None, "name (or id) in the cloud", key=_IMAGE, shown="``name``"
    )

    def __init__(self) -> None:
        """Create an image without options."""

    @property
    def external_name(self) -> str:
        """Name or id of the image in the cloud."""
        return self.image_id or self.image_name or self.name


class ProviderLabel(ConfigValue):
    """Launch settings of a label."""

    # The image is compared by name: its other relevant settings are in the provider's own entry.
    ignore_equality = ["pool", "diskimage"]
    checks = (
        _one_of(("diskimage", "cloud-image"), exactly_one=True),
        _one_of(("min-ram", "flavor-name"), exactly_one=False),
    )
    pool: ProviderPool | None = None
    diskimage_name: str | None = None
    name: str = option(str, REQUIRED, "name of a top-level label", convert=str)
    diskimage: DiskImage | None = option(
        str, None, "entry of ``diskimages``; or ``cloud-image``", stored=False
    )
    cloud_image: ProviderCloudImage | None = option(
        str, None, "entry of ``cloud-images``; or ``diskimage``", stored=False
    )
    flavor_name: str | None = option(
        str, None, "name or id; with ``min-ram``, a part of the name. One of the two is required"
    )
    min_ram: int = option(int, 0, "MiB: the smallest flavor with at least this much", shown="")
    key_name: str | None = option(str, None, "key pair")
    networks: list[str] = option([str], [], "replaces the pool's", shown="the pool's")
    security_groups: list[str] = option([str], [], "*new*: replaces the pool's", shown="the pool's")
    azs: list[str] | None = option(
        [str], None, "*new*: candidates for the node", name="availability-zones", shown="the pool's"
    )
    alternatives: list[dict[str, Any]] = option(
        [
            {
                "flavor-name": option(
                    str, None, "as of the label", key=_FLAVORS, shown="the label's"
                ),
                "flavor-names": option([str], None, "several: an offer for each", key=_FLAVORS),
                "availability-zone": option(
                    str, None, "as of the label", key=_ZONES, shown="the label's zones"
                ),
                "availability-zones": option([str], None, "several: an offer for each", key=_ZONES),
            }
        ],
        [],
        ALTERNATIVES,
    )
    boot_from_volume: bool = option(
        bool, False, "root disk on a volume that is deleted with the server"
    )
    volume_size: int = option(int, 50, "GB of that volume")
    volume_type: str | None = option(
        str, None, "*new*: type of that volume (compute API 2.67)", shown="the cloud's"
    )
    server_group: str | None = option(str, None, "*new*: name or id of an existing server group")
    scheduler_hints: dict[str, Any] = option(dict, {}, "*new*: passed to the scheduler unchanged")
    instance_properties: dict[str, Any] = option(dict, {}, "metadata of the server")
    dynamic_instance_properties: dict[str, str] = option(
        dict,
        {},
        'the same, with ``{request...}`` replaced, for example ``"{request.tenant_name}"``',
    )
    userdata: str | None = option(str, None, "for cloud-init")
    console_log: bool = option(bool, False, "log the console if the host keys cannot be read")
    host_key_checking: bool = option(bool, _POOL, "read the SSH host keys before a node is ready")


class ProviderPool(ConfigPool):
    ignore_equality = ["provider"]
    provider: OpenStackProviderConfig | None = None
    name: str = option(str, REQUIRED, "part of records and metrics")
    max_cores: float | None = option(int, math.inf, "maximum number of vCPUs")
    max_ram: float | None = option(int, math.inf, "maximum MiB")
    max_volumes: float | None = option(
        int, math.inf, "maximum number of volumes of labels that boot from volume"
    )
    max_volume_gb: float | None = option(int, math.inf, "maximum GB of these volumes")
    networks: list[str] = option(
        [str],
        [],
        "names or ids; if empty, the ``default_interface`` of ``clouds.yaml``, else the cloud's "
        "choice",
    )
    security_groups: list[str] = option([str], [], "names", shown="the cloud's default")
    azs: list[str] | None = option(
        [str],
        None,
        "all nodes of a request are in one",
        name="availability-zones",
        shown="all of the cloud",
    )
    auto_floating_ip: bool = option(
        bool, True, "assign floating IPs to servers without a public address"
    )
    use_internal_ip: bool = option(
        bool, False, "*new*: use the private address even if there is a public one"
    )
    host_key_checking: bool = option(bool, True, "read the SSH host keys before a node is ready")
    ignore_provider_quota: bool = option(bool, False, "ignore the limits of the project")
    labels: dict[str, Any] = option(
        [ProviderLabel], {}, "labels that the pool offers", stored=False
    )

    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: object) -> None:
        """Read the options. *args*: the whole configuration and the provider configuration."""
        full_config, provider = args
        super().load(pool_config)
        self.provider = provider
        for where, options in entries(pool_config.get("labels"), "labels"):
            with at(where):
                label = self._load_label(options, full_config, provider)
            self.labels[label.name] = label
            full_config.labels[label.name].pools.append(self)

    def _load_label(
        self, options: dict[str, Any], full_config: Config, provider: OpenStackProviderConfig
    ) -> ProviderLabel:
        label = ProviderLabel()
        label.pool = self
        load(label, options)
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
                    where=("cloud-image",),
                )
        label.networks = label.networks or self.networks
        if label.volume_type and not label.boot_from_volume:
            raise ConfigError(
                f"volume-type of label {label.name} needs boot-from-volume: true",
                where=("volume-type",),
            )
        return label


class OpenStackProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]

    cloud_config: Any = None
    _cloud: object = option(
        str, None, "entry of ``clouds.yaml``", name="cloud", key=v.Required, stored=False
    )
    region_name: str | None = option(
        str, None, "region; also stored with the nodes", shown="the cloud's"
    )
    rate: float = option(
        v.Coerce(float),
        1.0,
        "**seconds between two calls** to the same service (compute, network, ...), not calls per "
        "second. 0 = no limit. The"
        " default is slow for busy clouds: 0.05 allows 20 calls per second",
        convert=float,
    )
    boot_timeout: int = option(int, 60, "seconds from the start of a server until its port answers")
    launch_timeout: int = option(int, 3600, "seconds for the whole launch")
    launch_retries: int = option(int, 3, "attempts in total")
    image_upload_timeout: int = option(int, 3600, "seconds for upload and import of an image")
    _nodepool_id: object = option(
        str, None, "accepted for old files, without effect", name="nodepool-id", stored=False
    )
    image_name_format: str = option(
        str, "{image_name}-{timestamp}", "name of an upload in the cloud; also ``{upload_id}``"
    )
    clean_floating_ips: bool | None = option(
        bool, None, "delete **all** unattached floating IPs of the project", shown="false"
    )
    port_cleanup_interval: int = option(
        int, 600, "seconds between two checks for leaked ports; 0 = never"
    )
    post_upload_hook: str | None = option(str, None, "program to run after an upload")
    diskimages: dict[str, ProviderDiskImage] = option(
        [ProviderDiskImage], {}, "images that the builder uploads", stored=False
    )
    cloud_images: dict[str, ProviderCloudImage] = option(
        [ProviderCloudImage], {}, "existing images of the cloud", stored=False
    )
    _pools: dict[str, ProviderPool] = option(
        [ProviderPool], {}, "groups of labels", name="pools", stored=False
    )

    def __init__(self, driver: Any, provider: dict[str, Any]) -> None:
        self.driver_object = driver
        self._pools, self.diskimages, self.cloud_images = {}, {}, {}
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
                f"cloud {cloud!r} of provider {self.name} cannot be used, see its entry in "
                f"clouds.yaml: {exc}",
                where=("cloud",),
            ) from exc

    def load(self, newconfig: Config) -> None:
        options = self.provider
        self.cloud_config = self._lookupCloud()
        self.image_type = self.cloud_config.config["image_format"]
        load(self, options)
        for where, image in entries(options.get("diskimages"), "diskimages"):
            with at(where):
                self._load_diskimage(image, newconfig)
        for where, image in entries(options.get("cloud-images"), "cloud-images"):
            with at(where):
                self._load_cloud_image(image)
        for where, pool_options in entries(options.get("pools"), "pools"):
            pool = ProviderPool()
            with at(where, f"pool {pool_options['name']}"):
                pool.load(pool_options, newconfig, self)
            self._pools[pool_options["name"]] = pool

    def _load_diskimage(self, options: dict[str, Any], newconfig: Config) -> None:
        top = newconfig.diskimages[options["name"]]
        top.image_types.add(self.image_type or "")
        image = ProviderDiskImage()
        load(image, options)
        image.username, image.python_path, image.shell_type = (
            top.username,
            top.python_path,
            top.shell_type,
        )
        self.diskimages[image.name] = image

    def _load_cloud_image(self, options: dict[str, Any]) -> None:
        image = ProviderCloudImage()
        load(image, options)
        self.cloud_images[image.name] = image

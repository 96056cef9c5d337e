"""Options of the example driver."""

from __future__ import annotations

from typing import Any

import voluptuous as v

from nodepool.base.option import REQUIRED, derived, inherited, load, option
from nodepool.config.model import Config
from nodepool.driver import ConfigPool, ConfigValue, ProviderConfig
from nodepool.driver.provider import Driver
from nodepool.exceptions import ConfigError


class ExampleCloudImage(ConfigValue):
    """An image that exists in the cloud. The framework copies these settings to the node."""

    name: str = option(str, REQUIRED, "name for labels")
    image_id: str | None = option(str, None, "id in the cloud", shown="``name``")
    username: str | None = option(str, None, "login user of jobs")
    key: str | None = option(str, None, "SSH public key of the user")
    python_path: str | None = option(str, "auto", "Python of the node, for Ansible")
    shell_type: str | None = None
    connection_type: str | None = option(str, "ssh", "``winrm`` for Windows")
    connection_port: int | None = option(
        int,
        derived(
            "22, winrm 5986", lambda image, _: 5986 if image.connection_type == "winrm" else 22
        ),
        "port that the launcher checks",
    )

    @property
    def external_name(self) -> str:
        return self.image_id or self.name


class ExampleLabel(ConfigValue):
    # Back references are not compared: they would recurse endlessly.
    ignore_equality = ["pool"]
    diskimage = None
    name: str = option(str, REQUIRED, "name of a top-level label", convert=str)
    #: The object, not its name; set by the pool.
    cloud_image: ExampleCloudImage | None = option(
        str, None, "entry of ``cloud-images``", key=v.Required, stored=False
    )
    instance_type: str = option(str, REQUIRED, "size of the machine")
    host_key_checking: bool = option(None, inherited("pool"), "", hidden=True)

    def __init__(self, pool: ExamplePool) -> None:
        self.pool = pool


class ExamplePool(ConfigPool):
    ignore_equality = ["provider"]
    provider: ExampleProviderConfig | None = None
    name: str = option(str, REQUIRED, "part of records and metrics")
    use_internal_ip: bool = option(bool, False, "use the private address")
    host_key_checking: bool = option(bool, True, "read the SSH host keys before a node is ready")
    labels: dict[str, ExampleLabel] = option(
        [ExampleLabel], {}, "labels that the pool offers", key=v.Required, stored=False
    )

    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: object) -> None:
        full_config, provider = args
        self.provider = provider
        super().load(pool_config)
        for options in pool_config["labels"]:
            label = ExampleLabel(self)
            load(label, options)
            label.cloud_image = provider.cloud_images.get(options["cloud-image"])
            if label.cloud_image is None:
                raise ConfigError(
                    f"cloud-image {options['cloud-image']} does not exist in provider "
                    f"{provider.name}"
                    f" but is referenced in label {label.name}"
                )
            self.labels[label.name] = label
            # This registers that the pool offers the label; an unknown label is an error.
            full_config.labels[label.name].pools.append(self)


class ExampleProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]
    region: str = option(str, REQUIRED, "region of the cloud")
    project: str = option(str, REQUIRED, "project of the machines")
    rate_limit: float = option(v.Any(int, float), 1, "calls per second")
    boot_timeout: int = option(
        int, 60, "seconds from the start of a machine until its port answers"
    )
    launch_timeout: int = option(int, 3600, "seconds for the whole launch")
    launch_retries: int = option(int, 3, "attempts in total")
    cloud_images: dict[str, ExampleCloudImage] = option(
        [ExampleCloudImage], {}, "existing images", stored=False
    )
    _pools: dict[str, ConfigPool] = option(
        [ExamplePool], {}, "groups of labels", name="pools", key=v.Required, stored=False
    )

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        self.driver_object = driver
        self._pools, self.cloud_images, self.diskimages = {}, {}, {}
        super().__init__(provider)

    def load(self, newconfig: Config) -> None:
        load(self, self.provider)
        for image_options in self.provider.get("cloud-images") or []:
            image = ExampleCloudImage()
            load(image, image_options)
            self.cloud_images[image.name] = image
        for pool_options in self.provider["pools"]:
            pool = ExamplePool()
            pool.load(pool_options, newconfig, self)
            self._pools[pool.name] = pool

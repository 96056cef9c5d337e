"""Options of the example driver."""

from __future__ import annotations

from typing import Any

import voluptuous as v

from nodepool.config.errors import ConfigError
from nodepool.config.model import Config
from nodepool.driver import ConfigPool, ConfigValue, ProviderConfig
from nodepool.driver.provider import Driver


class ExampleCloudImage(ConfigValue):
    """An image that exists in the cloud. The framework copies these settings to the node."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.image_id: str | None = None
        self.username: str | None = None
        self.key: str | None = None
        self.python_path: str | None = None
        self.shell_type: str | None = None
        self.connection_type: str | None = None
        self.connection_port: int | None = None

    @property
    def external_name(self) -> str | None:
        return self.image_id or self.name


class ExampleLabel(ConfigValue):
    # Back references are not compared: they would recurse endlessly.
    ignore_equality = ["pool"]

    def __init__(self) -> None:
        self.name: str | None = None
        self.pool: ExamplePool | None = None
        self.cloud_image: ExampleCloudImage | None = None
        self.diskimage = None
        self.instance_type: str | None = None
        self.host_key_checking = True


class ExamplePool(ConfigPool):
    ignore_equality = ["provider"]

    def __init__(self) -> None:
        self.name = ""
        self.provider: ExampleProviderConfig | None = None
        self.use_internal_ip = False
        self.host_key_checking = True
        super().__init__()

    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: object) -> None:
        full_config, provider = args
        super().load(pool_config)
        self.provider = provider
        self.name = pool_config["name"]
        self.use_internal_ip = bool(pool_config.get("use-internal-ip", False))
        self.host_key_checking = bool(pool_config.get("host-key-checking", True))
        for options in pool_config["labels"]:
            label = ExampleLabel()
            label.name = str(options["name"])
            label.pool = self
            label.cloud_image = provider.cloud_images.get(options["cloud-image"])
            if label.cloud_image is None:
                raise ConfigError(
                    f"cloud-image {options['cloud-image']} does not exist in provider {provider.name}"
                    f" but is referenced in label {label.name}"
                )
            label.instance_type = options["instance-type"]
            label.host_key_checking = self.host_key_checking
            self.labels[label.name] = label
            # This registers that the pool offers the label; an unknown label is an error.
            full_config.labels[label.name].pools.append(self)


class ExampleProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        self.driver_object = driver
        self._pools: dict[str, ConfigPool] = {}
        self.cloud_images: dict[str, ExampleCloudImage] = {}
        self.diskimages: dict[str, Any] = {}
        self.region: str | None = None
        self.project: str | None = None
        self.rate_limit: float = 1
        self.boot_timeout = 60
        self.launch_timeout = 3600
        self.launch_retries = 3
        super().__init__(provider)

    @property
    def pools(self) -> dict[str, ConfigPool]:
        return self._pools

    @property
    def manage_images(self) -> bool:
        return False

    def load(self, newconfig: Config) -> None:
        options = self.provider
        self.region = options["region"]
        self.project = options["project"]
        self.rate_limit = options.get("rate-limit", 1)
        self.boot_timeout = options.get("boot-timeout", 60)
        self.launch_timeout = options.get("launch-timeout", 3600)
        self.launch_retries = options.get("launch-retries", 3)
        for image_options in options.get("cloud-images") or []:
            image = ExampleCloudImage()
            image.name = image_options["name"]
            image.image_id = image_options.get("image-id")
            image.username = image_options.get("username")
            image.key = image_options.get("key")
            image.python_path = image_options.get("python-path", "auto")
            image.connection_type = image_options.get("connection-type", "ssh")
            image.connection_port = image_options.get("connection-port", 5986 if image.connection_type == "winrm" else 22)
            self.cloud_images[str(image.name)] = image
        for pool_options in options["pools"]:
            pool = ExamplePool()
            pool.load(pool_options, newconfig, self)
            self._pools[str(pool.name)] = pool

    def getSchema(self) -> v.Schema:
        cloud_image = {
            v.Required("name"): str,
            "image-id": str,
            "username": str,
            "key": str,
            "python-path": str,
            "connection-type": str,
            "connection-port": int,
        }
        label = {v.Required("name"): str, v.Required("cloud-image"): str, v.Required("instance-type"): str}
        pool = {
            **ConfigPool.getCommonSchemaDict(),
            v.Required("name"): str,
            v.Required("labels"): [label],
            "use-internal-ip": bool,
            "host-key-checking": bool,
        }
        return v.Schema(
            {
                v.Required("region"): str,
                v.Required("project"): str,
                v.Required("pools"): [pool],
                "cloud-images": [cloud_image],
                "rate-limit": v.Any(int, float),
                "boot-timeout": int,
                "launch-timeout": int,
                "launch-retries": int,
            }
        )

    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        return {label for name, pool in self._pools.items() if not pool_name or name == pool_name for label in pool.labels}

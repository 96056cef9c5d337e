"""Options of the driver ``nodemanager`` (NM-C.8)."""

from __future__ import annotations

import math
import re
from typing import Any

import voluptuous as v

from nodepool.config.errors import ConfigError
from nodepool.config.model import Config
from nodepool.driver import ConfigPool, ConfigValue, ProviderConfig
from nodepool.driver.nodemanager.pushed import config as backing_config
from nodepool.driver.nodemanager.pushed.config import BackingOptions
from nodepool.driver.provider import Driver
from nodepool.nodemanager.client import privileges

_RATE = re.compile(r"(\d+)([kmg]?)\Z", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}
#: Image formats from which a node manager can create a root tree.
IMAGE_TYPE = "tar"


TLS_KEYS = ("ca-cert", "client-cert", "client-key")
#: Seconds.
MIN_LEASE = 240
_URL = re.compile(r"unix:/|https?://[^/]")


def bits(value: object) -> int:
    """Return ``100m`` as 100,000,000 bit/s.

    :raises v.Invalid: it is not a rate.
    """
    match = _RATE.match(str(value))
    if match is None:
        raise v.Invalid(f"{value!r} is not a rate; use bit/s with k, m or g, such as 100m")
    return int(match[1]) * _FACTORS[match[2].lower()]


class NodeManagerImage(ConfigValue):
    """A cloud image, or an uploaded one."""

    def __init__(self) -> None:
        self.name: str = ""
        #: Root of slivers; None: the uploaded image.
        self.root: str | None = None
        self.pause = False
        self.username: str | None = "root"
        self.python_path: str | None = "auto"
        self.shell_type: str | None = None
        self.connection_type: str | None = "ssh"
        self.connection_port: int | None = 22
        self.meta: dict[str, Any] = {}

    @property
    def external_name(self) -> str:
        return self.name


class NodeManagerLabel(ConfigValue):
    ignore_equality = ["pool"]

    def __init__(self) -> None:
        self.name: str = ""
        self.pool: NodeManagerPool | None = None
        self.cloud_image: NodeManagerImage | None = None
        self.diskimage: Any = None
        self.host_key_checking = False
        self.cpus: float = 0
        self.cpu_limit: float = 0
        self.ram: int = 0
        self.disk: int = 0
        self.pids: int | None = None
        self.net_max: int | None = None
        self.net_min: int | None = None
        self.network: str | None = None
        self.privileges: list[str] = []
        self.ssh_keys: str = ""
        self.rspec: dict[str, Any] = {}
        #: Options for requesting hosts (backing-label); None: hosts are configured or announced.
        self.backing_label: str | None = None


class NodeManagerPool(ConfigPool):
    ignore_equality = ["provider"]

    def __init__(self) -> None:
        self.name: str = ""
        self.provider: NodeManagerProviderConfig | None = None
        self.max_cores: float = math.inf
        self.max_ram: float = math.inf
        super().__init__()

    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: object) -> None:
        full_config, provider = args
        super().load(pool_config)
        self.provider = provider
        self.name = str(pool_config["name"])
        self.max_cores = pool_config.get("max-cores", math.inf)
        self.max_ram = pool_config.get("max-ram", math.inf)
        self.azs = pool_config.get("availability-zones")
        for number, options in enumerate(pool_config.get("labels") or []):
            label = self._label(options, provider, full_config, ("labels", number))
            self.labels[label.name] = label
            full_config.labels[label.name].pools.append(self)

    def _label(
        self, options: dict[str, Any], provider: NodeManagerProviderConfig, full_config: Config, where: tuple[Any, ...]
    ) -> NodeManagerLabel:
        label = NodeManagerLabel()
        label.name = str(options["name"])
        label.pool = self
        cloud_image, diskimage = options.get("cloud-image"), options.get("diskimage")
        if (cloud_image is None) == (diskimage is None):
            raise ConfigError(f"label {label.name} needs either cloud-image or diskimage", where=where)
        if cloud_image is not None:
            label.cloud_image = provider.cloud_images.get(cloud_image)
            if label.cloud_image is None:
                raise ConfigError(
                    f"cloud-image {cloud_image} does not exist in provider {provider.name} but is referenced in "
                    f"label {label.name}",
                    where=(*where, "cloud-image"),
                )
        else:
            if diskimage not in provider.diskimages:
                raise ConfigError(
                    f"diskimage {diskimage} does not exist in provider {provider.name} but is referenced in label {label.name}",
                    where=(*where, "diskimage"),
                )
            label.diskimage = full_config.diskimages[diskimage]
        label.host_key_checking = bool(options.get("host-key-checking", False))
        label.cpus = options.get("cpus", 0)
        label.cpu_limit = options.get("cpu-limit", 0)
        label.ram = options.get("ram", 0)
        label.disk = options.get("disk", 0)
        label.pids = options.get("pids")
        label.network = options.get("network")
        try:
            label.privileges = privileges.check(options.get("privileges") or [])
        except ValueError as error:
            raise ConfigError(f"label {label.name}: privileges: {error}", where=(*where, "privileges")) from None
        label.rspec = dict(options.get("rspec") or {})
        label.backing_label = options.get("backing-label")
        if provider.backing is None and label.backing_label:
            raise ConfigError(f"label {label.name}: backing-label needs backing-label of the provider", where=where)
        if provider.backing is not None:
            label.backing_label = label.backing_label or provider.backing.label
        keys = options.get("ssh-keys") or provider.ssh_keys
        label.ssh_keys = "\n".join(keys) if isinstance(keys, list) else keys
        try:
            label.net_max = bits(options["net-max"]) if "net-max" in options else None
            label.net_min = bits(options["net-min"]) if "net-min" in options else None
        except v.Invalid as error:
            raise ConfigError(f"label {label.name}: {error}", where=where) from None
        return label


class NodeManagerHost(ConfigValue):
    """One node manager."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.name = str(options["name"])
        self.url = str(options["url"])
        self.ca_cert: str | None = options.get("ca-cert")
        self.client_cert: str | None = options.get("client-cert")
        self.client_key: str | None = options.get("client-key")
        self.ssh_address: str | None = options.get("ssh-address")
        self.group: str | None = options.get("group")
        #: The name that the host must report.
        self.expected_name: str | None = None


class NodeManagerProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        self.driver_object = driver
        self._pools: dict[str, ConfigPool] = {}
        self.cloud_images: dict[str, NodeManagerImage] = {}
        self.diskimages: dict[str, NodeManagerImage] = {}
        self.hosts: dict[str, NodeManagerHost] = {}
        self.discover = False
        #: None: hosts are configured, or announce themselves.
        self.backing: BackingOptions | None = None
        #: For announced https hosts, and for configured ones without their own.
        self.ca_cert: str | None = None
        self.client_cert: str | None = None
        self.client_key: str | None = None
        self.image_type: str = IMAGE_TYPE
        self.image_name_format = "{image_name}-{timestamp}"
        self.post_upload_hook: str | None = None
        self.lease_time = 86400
        self.boot_timeout = 30
        self.launch_timeout = 60
        self.launch_retries = 3
        self.rate: float = 100
        self.placement = "spread"
        self.ssh_keys: str = ""
        super().__init__(provider)

    @property
    def pools(self) -> dict[str, ConfigPool]:
        return self._pools

    @property
    def manage_images(self) -> bool:
        return self.backing is None

    def load(self, newconfig: Config) -> None:
        options = self.provider
        if "backing-label" in options:
            self.backing = BackingOptions(options)
        else:
            unused = next((key for key in backing_config.SCHEMA if str(key) in options), None)
            if unused is not None:
                raise ConfigError(f"{unused} has no effect without backing-label", where=(str(unused),))
        self.discover = bool(options.get("discover", False))
        tls = {key: options[key] for key in TLS_KEYS if key in options}
        if tls and len(tls) < len(TLS_KEYS):
            raise ConfigError("ca-cert, client-cert and client-key are needed together", where=(next(iter(tls)),))
        self.ca_cert, self.client_cert, self.client_key = (tls.get(key) for key in TLS_KEYS)
        for number, entry in enumerate(options.get("hosts") or []):
            host = NodeManagerHost({**tls, **entry})
            if host.name in self.hosts:
                raise ConfigError(f"host {host.name} is listed twice", where=("hosts", number))
            if not _URL.match(host.url):
                raise ConfigError(
                    f"host {host.name}: {host.url!r} is not an address of a node manager; use unix:/path, "
                    "https://host:port or http://127.0.0.1:port",
                    where=("hosts", number, "url"),
                )
            if host.url.startswith("https:") and not (host.ca_cert and host.client_cert and host.client_key):
                raise ConfigError(f"host {host.name}: https needs ca-cert, client-cert and client-key", where=("hosts", number))
            self.hosts[host.name] = host
        if not self.hosts and not self.discover and self.backing is None:
            raise ConfigError("either hosts (at least one) or discover: true is needed, or backing-label", where=("hosts",))
        self.lease_time = options.get("lease-time", 86400)
        if self.lease_time < MIN_LEASE:
            raise ConfigError(
                f"lease-time must be at least {MIN_LEASE} s: launchers renew leases about once a minute", where=("lease-time",)
            )
        # A backing node may have to be launched first.
        self.boot_timeout = options.get("boot-timeout", 30 if self.backing is None else 120)
        self.launch_timeout = options.get("launch-timeout", 60 if self.backing is None else 3600)
        self.launch_retries = options.get("launch-retries", 3)
        self.rate = options.get("rate", 100)
        # Slivers that are spread over backing nodes would keep all of them in use.
        self.placement = options.get("placement", "spread" if self.backing is None else "pack")
        self.post_upload_hook = options.get("post-upload-hook")
        self.ssh_keys = options.get("ssh-keys", "")
        for entry in options.get("cloud-images") or []:
            image = self._image(entry)
            image.root = entry.get("root", "host" if image.name == "host" else None)
            if image.root is None:
                raise ConfigError(f"cloud-image {image.name} needs a root: host, dir:/path, tar:/path or oci:reference")
            self.cloud_images[image.name] = image
        for entry in options.get("diskimages") or []:
            top = newconfig.diskimages[entry["name"]]
            image = self._image({"username": top.username, "python-path": top.python_path, "shell-type": top.shell_type, **entry})
            top.image_types.add(self.image_type)
            self.diskimages[image.name] = image
        for number, entry in enumerate(options.get("pools") or []):
            pool = NodeManagerPool()
            try:
                pool.load(entry, newconfig, self)
            except ConfigError as error:
                error.where = ("pools", number, *error.where)
                raise
            self._pools[pool.name] = pool
        for each in self._pools.values():
            for label in each.labels.values():
                if label.backing_label in self.getSupportedLabels():
                    raise ConfigError(
                        f"label {label.name}: backing-label {label.backing_label} is a label of this provider itself",
                        where=("backing-label",),
                    )

    def _getLabel(self, backing_label: str) -> BackingOptions | None:
        """Return the settings for backing nodes of this label; None when they are not used."""
        used = any(label.backing_label == backing_label for pool in self._pools.values() for label in pool.labels.values())
        return self.backing if used else None

    @staticmethod
    def _image(options: dict[str, Any]) -> NodeManagerImage:
        image = NodeManagerImage()
        image.name = str(options["name"])
        image.pause = bool(options.get("pause", False))
        image.username = options.get("username", "root")
        image.python_path = options.get("python-path", "auto")
        image.shell_type = options.get("shell-type")
        image.connection_type = options.get("connection-type", "ssh")
        image.meta = dict(options.get("meta") or {})
        return image

    def getSchema(self) -> v.Schema:
        keys = v.Any(str, [str])
        image = {
            v.Required("name"): str,
            "username": str,
            "python-path": str,
            "shell-type": str,
            "connection-type": str,
            "meta": dict,
            "pause": bool,
        }
        number = v.Any(int, float)
        label = {
            v.Required("name"): str,
            "cloud-image": str,
            "diskimage": str,
            "cpus": number,
            "cpu-limit": number,
            "ram": int,
            "disk": int,
            "pids": int,
            "net-max": v.Any(int, str),
            "net-min": v.Any(int, str),
            "network": str,
            "privileges": [str],
            "host-key-checking": bool,
            "ssh-keys": keys,
            "rspec": dict,
            "backing-label": str,
        }
        pool = {
            **ConfigPool.getCommonSchemaDict(),
            v.Required("name"): str,
            v.Required("labels"): [label],
            "max-cores": number,
            "max-ram": int,
            "availability-zones": [str],
        }
        host = {
            v.Required("name"): str,
            v.Required("url"): str,
            "ca-cert": str,
            "client-cert": str,
            "client-key": str,
            "ssh-address": str,
            "group": str,
        }
        tls: dict[Any, Any] = dict.fromkeys(TLS_KEYS, str)
        return v.Schema(
            {
                v.Required("pools"): [pool],
                "hosts": [host],
                "discover": bool,
                **tls,
                **backing_config.SCHEMA,
                "lease-time": int,
                "boot-timeout": int,
                "launch-timeout": int,
                "launch-retries": int,
                "rate": number,
                "placement": v.Any("spread", "pack"),
                "cloud-images": [{**image, "root": str}],
                "diskimages": [image],
                "post-upload-hook": str,
                "ssh-keys": keys,
            }
        )

    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        return {label for name, pool in self._pools.items() if not pool_name or name == pool_name for label in pool.labels}

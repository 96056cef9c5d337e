"""Options of the driver ``nodemanager`` (NM-C.8)."""

from __future__ import annotations

import math
import re
from typing import Any

import voluptuous as v

from nodepool.base.option import REQUIRED, at, changed, derived, entries, load, option, rows
from nodepool.config.model import Config
from nodepool.driver import ConfigPool, ConfigValue, ProviderConfig
from nodepool.driver.common.options import NUMBER
from nodepool.driver.nodemanager.pushed.config import BackingOptions
from nodepool.driver.provider import Driver
from nodepool.exceptions import ConfigError
from nodepool.nodemanager.client import privileges

_RATE = re.compile(r"(\d+)([kmg]?)\Z", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}
#: Image formats from which a node manager can create a root tree.
IMAGE_TYPE = "tar"


TLS_KEYS = ("ca-cert", "client-cert", "client-key")
#: One key a line, or a list.
_KEYS = v.Any(str, [str])
#: Seconds.
MIN_LEASE = 240
_URL = re.compile(r"unix:/|https?://[^/]")


def bits(value: object) -> int | None:
    """Return ``100m`` as 100,000,000 bit/s; None is kept.

    :raises ValueError: it is not a rate.
    """
    if value is None:
        return None
    match = _RATE.match(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a rate; use bit/s with k, m or g, such as 100m")
    return int(match[1]) * _FACTORS[match[2].lower()]


def _joined(keys: str | list[str]) -> str:
    return "\n".join(keys) if isinstance(keys, list) else keys


class NodeManagerImage(ConfigValue):
    """An uploaded image."""

    connection_port: int | None = 22
    #: Root of slivers; None: the uploaded image.
    root: str | None = None
    name: str = option(str, REQUIRED, "name for labels; of a top-level diskimage", convert=str)
    username: str | None = option(
        str, "root", "login user of jobs; of an uploaded image: the diskimage's"
    )
    python_path: str | None = option(
        str, "auto", "Python of the node, for Ansible; of an uploaded image: the diskimage's"
    )
    shell_type: str | None = option(
        str, None, "for Ansible, for example ``cmd``; of an uploaded image: the diskimage's"
    )
    connection_type: str | None = option(str, "ssh", "for Ansible")
    meta: dict[str, Any] = option(dict, {}, "stored with the uploaded image")
    pause: bool = option(bool, False, "stop uploads")

    @property
    def external_name(self) -> str:
        return self.name


class NodeManagerCloudImage(NodeManagerImage):
    root: str | None = option(
        str,
        None,
        "``host`` (image ``host`` only: the default), ``dir:/path``, ``tar:/path`` there, "
        "``oci:REF``",
    )


class NodeManagerLabel(ConfigValue):
    ignore_equality = ["pool"]
    pool: NodeManagerPool | None = None
    name: str = option(str, REQUIRED, "name of a top-level label", convert=str)
    cloud_image: NodeManagerImage | None = option(
        str, None, "entry of ``cloud-images``; or ``diskimage``", stored=False
    )
    diskimage: Any = option(str, None, "entry of ``diskimages``; or ``cloud-image``", stored=False)
    cpus: float = option(NUMBER, 0, "guaranteed cores")
    cpu_limit: float = option(NUMBER, 0, "maximum cores", shown="no limit")
    ram: int = option(int, 0, "MiB", shown="the node manager's")
    disk: int = option(int, 0, "GiB", shown="the node manager's")
    pids: int | None = option(int, None, "maximum number of processes", shown="the node manager's")
    net_max: int | None = option(
        v.Any(int, str),
        None,
        "maximum rate in bit/s, with k, m or g",
        convert=bits,
        shown="the node manager's",
    )
    net_min: int | None = option(
        v.Any(int, str), None, "guaranteed rate in bit/s, with k, m or g", convert=bits
    )
    network: str | None = option(
        str, None, "``none``, ``nat`` or ``bridge:INTERFACE``", shown="the node manager's"
    )
    privileges: list[str] = option([str], [], "privileges of the sliver", convert=privileges.check)
    host_key_checking: bool = option(
        bool, False, "read the host keys again; they come from the node manager"
    )
    ssh_keys: str = option(
        _KEYS, "", "public keys that can log in", shown="the provider's", convert=_joined
    )
    rspec: dict[str, Any] = option(dict, {}, "any resource by name")
    backing_label: str | None = option(
        str, None, "label of the backing nodes", shown="the provider's"
    )


class NodeManagerPool(ConfigPool):
    ignore_equality = ["provider"]
    provider: NodeManagerProviderConfig
    name: str = option(str, REQUIRED, "part of records and metrics", convert=str)
    labels: dict[str, NodeManagerLabel] = option(
        [NodeManagerLabel], {}, "labels that the pool offers", key=v.Required, stored=False
    )
    max_cores: float = option(NUMBER, math.inf, "maximum number of guaranteed cores")
    max_ram: float = option(int, math.inf, "maximum MiB")
    azs: list[str] | None = option(
        [str], None, "groups of hosts to use", name="availability-zones", shown="all"
    )

    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: object) -> None:
        full_config, self.provider = args
        super().load(pool_config)
        for where, options in entries(pool_config.get("labels"), "labels"):
            with at(where, f"label {options['name']}"):
                label = self._label(options, full_config)
            self.labels[label.name] = label
            full_config.labels[label.name].pools.append(self)

    def _label(self, options: dict[str, Any], full_config: Config) -> NodeManagerLabel:
        provider, label = self.provider, NodeManagerLabel()
        load(label, options)
        label.pool = self
        given = [key for key in ("cloud-image", "diskimage") if options.get(key) is not None]
        if len(given) != 1:
            raise ConfigError(f"label {label.name} needs either cloud-image or diskimage")
        (key,) = given
        name = options[key]
        if name not in (provider.cloud_images if key == "cloud-image" else provider.diskimages):
            raise ConfigError(
                f"{key} {name} does not exist in provider {provider.name} but is referenced in "
                f"label {label.name}",
                where=(key,),
            )
        if key == "cloud-image":
            label.cloud_image = provider.cloud_images[name]
        else:
            label.diskimage = full_config.diskimages[name]
        if provider.backing is None and label.backing_label:
            raise ConfigError(
                f"label {label.name}: backing-label needs backing-label of the provider"
            )
        if provider.backing is not None:
            label.backing_label = label.backing_label or provider.backing.label
        label.ssh_keys = label.ssh_keys or provider.ssh_keys
        return label


class NodeManagerHost(ConfigValue):
    """One node manager."""

    #: The name that the host must report.
    expected_name: str | None = None
    name: str = option(str, REQUIRED, "name of the host", convert=str)
    url: str = option(
        str,
        REQUIRED,
        "``unix:/path``, ``https://host:port`` or ``http://127.0.0.1:port``",
        convert=str,
    )
    ca_cert: str | None = option(str, None, "CA of the host, for https", shown="the provider's")
    client_cert: str | None = option(str, None, "our certificate", shown="the provider's")
    client_key: str | None = option(str, None, "its key", shown="the provider's")
    ssh_address: str | None = option(str, None, "address of the slivers", shown="the host's own")
    group: str | None = option(str, None, "availability zone")

    def __init__(self, options: dict[str, Any]) -> None:
        """:raises ConfigError: the address cannot be used."""
        load(self, options)
        if not _URL.match(self.url):
            raise ConfigError(
                f"host {self.name}: {self.url!r} is not an address of a node manager; use "
                "unix:/path, "
                "https://host:port or http://127.0.0.1:port",
                where=("url",),
            )
        if self.url.startswith("https:") and not (
            self.ca_cert and self.client_cert and self.client_key
        ):
            raise ConfigError(f"host {self.name}: https needs ca-cert, client-cert and client-key")


def _unless_backed(own: object, backed: object) -> Any:
    """Return a default; a provider with backing nodes has another one."""
    return derived(
        f"{own}; with ``backing-label`` {backed}",
        lambda provider, _: own if provider.backing is None else backed,
    )


class NodeManagerProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]
    image_type = IMAGE_TYPE
    image_name_format = "{image_name}-{timestamp}"
    hosts: dict[str, NodeManagerHost] = option([NodeManagerHost], {}, "node managers", stored=False)
    discover: bool = option(
        bool,
        False,
        "also use hosts that register in ZooKeeper (a ``zookeeper`` source in their "
        "``nodemanager.yaml``); they get images with"
        " the next upload",
    )
    ca_cert: str | None = option(str, None, "for https hosts that do not have their own")
    client_cert: str | None = option(str, None, "for https hosts that do not have their own")
    client_key: str | None = option(str, None, "for https hosts that do not have their own")
    #: None: hosts are configured, or announce themselves.
    backing: BackingOptions | None = option(BackingOptions, None, "", flat=True, stored=False)
    lease_time: int = option(
        int,
        86400,
        f"seconds, at least {MIN_LEASE}: lifetime of a sliver whose launcher never returns",
    )
    # A backing node may have to be launched first.
    boot_timeout: int = option(
        int,
        _unless_backed(30, 120),
        "seconds until the node answers; a backing node that cannot be used for this time gets no "
        "more slivers, its ready nodes"
        " are deleted, and it is returned when it is empty",
    )
    launch_timeout: int = option(
        int,
        _unless_backed(60, 3600),
        "seconds for the whole launch, including that of a backing node",
    )
    launch_retries: int = option(int, 3, "attempts in total")
    # A failed sliver does not count as a failed machine.
    max_launch_failures_per_hour: int = changed(
        ProviderConfig.max_launch_failures_per_hour, default=-1, shown="no limit"
    )
    rate: float = option(NUMBER, 100, "calls per second")
    # Slivers that are spread over backing nodes would keep all of them in use.
    placement: str = option(
        v.Any("spread", "pack"),
        _unless_backed("spread", "pack"),
        "``spread``: the host with the most free guaranteed CPU; ``pack``: the least",
    )
    post_upload_hook: str | None = option(str, None, "program to run after an upload")
    ssh_keys: str = option(_KEYS, "", "public keys that can log in", convert=_joined)
    cloud_images: dict[str, NodeManagerImage] = option(
        [NodeManagerCloudImage], {}, "images on the hosts", stored=False
    )
    diskimages: dict[str, NodeManagerImage] = option(
        [NodeManagerImage], {}, "images uploaded to all hosts", stored=False
    )
    _pools: dict[str, ConfigPool] = option(
        [NodeManagerPool], {}, "groups of labels", name="pools", key=v.Required, stored=False
    )

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(provider)
        self.driver_object = driver
        self.backing = None
        self.certificate_ca: str | None = None
        self._pools, self.cloud_images, self.diskimages, self.hosts = {}, {}, {}, {}

    @property
    def manage_images(self) -> bool:
        return self.backing is None

    def keys_of(self, hostname: str, keys: str) -> str:
        """Return the keys of a sliver, with the CA whose certificates are for this host name."""
        return (
            f'{keys}\ncert-authority,principals="{hostname}" {self.certificate_ca}'.strip()
            if self.certificate_ca
            else keys
        )

    def load(self, newconfig: Config) -> None:
        certificates = newconfig.access.certificates
        self.certificate_ca = None if certificates is None else certificates.public
        options = self.provider
        if "backing-label" in options:
            self.backing = BackingOptions(options)
        else:
            unused = next((key for (key,), _option in rows(BackingOptions) if key in options), None)
            if unused is not None:
                raise ConfigError(f"{unused} has no effect without backing-label", where=(unused,))
        load(self, options)
        tls = {key: options[key] for key in TLS_KEYS if key in options}
        if tls and len(tls) < len(TLS_KEYS):
            raise ConfigError(
                "ca-cert, client-cert and client-key are needed together", where=(next(iter(tls)),)
            )
        for where, entry in entries(options.get("hosts"), "hosts"):
            with at(where):
                host = NodeManagerHost({**tls, **entry})
                if host.name in self.hosts:
                    raise ConfigError(f"host {host.name} is listed twice")
            self.hosts[host.name] = host
        if not self.hosts and not self.discover and self.backing is None:
            raise ConfigError(
                "either hosts (at least one) or discover: true is needed, or backing-label",
                where=("hosts",),
            )
        if self.lease_time < MIN_LEASE:
            raise ConfigError(
                f"lease-time must be at least {MIN_LEASE} s: launchers renew leases about once a "
                "minute",
                where=("lease-time",),
            )
        for where, entry in entries(options.get("cloud-images"), "cloud-images"):
            with at(where):
                self._add_cloud_image(entry)
        for where, entry in entries(options.get("diskimages"), "diskimages"):
            top, image = newconfig.diskimages[entry["name"]], NodeManagerImage()
            with at(where):
                load(
                    image,
                    {
                        "username": top.username,
                        "python-path": top.python_path,
                        "shell-type": top.shell_type,
                        **entry,
                    },
                )
            top.image_types.add(self.image_type)
            self.diskimages[image.name] = image
        for where, entry in entries(options.get("pools"), "pools"):
            pool = NodeManagerPool()
            with at(where):
                pool.load(entry, newconfig, self)
            self._pools[pool.name] = pool
        for label in self._labels():
            if label.backing_label in self.getSupportedLabels():
                raise ConfigError(
                    f"label {label.name}: backing-label {label.backing_label} is a label of this "
                    "provider itself",
                    where=("backing-label",),
                )

    def _add_cloud_image(self, options: dict[str, Any]) -> None:
        image = NodeManagerCloudImage()
        load(image, options)
        if image.name == "host" and "root" not in options:
            image.root = "host"
        if image.root is None:
            raise ConfigError(
                f"cloud-image {image.name} needs a root: host, dir:/path, tar:/path or "
                "oci:reference"
            )
        self.cloud_images[image.name] = image

    def _labels(self) -> list[NodeManagerLabel]:
        return [label for pool in self._pools.values() for label in pool.labels.values()]

    def _getLabel(self, backing_label: str) -> BackingOptions | None:
        """Return the settings for backing nodes of this label; None when they are not used."""
        return (
            self.backing
            if any(label.backing_label == backing_label for label in self._labels())
            else None
        )

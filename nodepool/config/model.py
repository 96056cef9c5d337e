"""The loaded configuration (CFG-4, CFG-7 and CFG-9)."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast

import voluptuous as v

from nodepool.base import optional
from nodepool.base.amounts import Share
from nodepool.base.config_value import ConfigValue
from nodepool.base.connection_string import TLS_REQUIRED
from nodepool.base.files import FileIdentity
from nodepool.base.option import (
    REQUIRED,
    Option,
    Section,
    at,
    entries,
    load,
    option,
    schema,
    values,
    whole,
)
from nodepool.config.access import AccessConfig
from nodepool.config.diskimages import DiskImage, absolute, build_disk_images
from nodepool.config.drivers import drivers
from nodepool.config.errors import (
    DriverLoadError,
    ProviderLoadError,
    ProviderUnavailable,
    UnknownDriver,
    UnknownName,
)
from nodepool.config.zookeeper import (
    SERVER,
    TLS,
    buildZooKeeperHosts,
    connections,
    warn_about_chroots,
)
from nodepool.exceptions import ConfigError, IncompleteConfiguration, PathItem

T = TypeVar("T")

log = logging.getLogger("nodepool.config")


class Named(dict[str, T]):
    """Objects by name; errors about missing ones contain name and list."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __missing__(self, key: str) -> T:
        error = UnknownName(
            f"{self.kind} {key!r} is not defined in the top-level {self.kind}s list"
        )
        error.name = key
        raise error


def _probe_method(value: object) -> object:
    if value not in ("ssh", "port", "command"):
        raise ValueError(f"expected ssh, port or command, not {value!r}")
    return value


class Probing(Section):
    """How idle nodes of a label are probed."""

    interval: int = option(
        v.All(int, v.Range(min=0)),
        1800,
        "seconds between two probes of an idle node; 0: none",
        convert=whole,
    )
    method: str = option(
        v.Any("ssh", "port", "command"),
        "ssh",
        "what must work: a known SSH host key, the ``port``, or a ``command`` on the node",
        convert=_probe_method,
    )
    command: str | None = option(
        str,
        None,
        "with ``method: command``: runs in the login shell of the node; status 0 is healthy",
        shown="",
    )
    ssh_key: str | None = option(
        str,
        None,
        "with ``method: command``: absolute path of the private key, on launchers",
        convert=lambda value: None if value is None else absolute(str(value)),
        shown="",
    )
    timeout: int = option(
        v.All(int, v.Range(min=1, max=600)),
        30,
        "with ``method: command``: seconds for the login and the command",
        convert=lambda value: max(1, min(600, int(whole(value)))),
    )

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        for name in ("command", "ssh-key", "timeout"):
            given = (options or {}).get(name) is not None
            if self.method == "command" and not given and name != "timeout":
                raise ConfigError(
                    f"probe: method command needs {name}: add it, or use another method",
                    where=(name,),
                )
            if given and self.method != "command":
                raise ConfigError(
                    f"probe: {name} has no effect with method {self.method}: use method command, "
                    "or remove it",
                    where=(name,),
                )


def _price(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        raise ValueError(f"expected a price from 0, not {value!r}")
    return float(value)


class Cost(Section):
    """What a node costs."""

    hour: float | None = option(
        v.Any(float, int), None, "price of an hour, in any currency", convert=_price
    )


class ProviderCost(Cost):
    """What the nodes of a provider cost."""

    flavors: dict[str, float] = option(
        {str: v.Any(float, int)},
        {},
        "prices of an hour by ``flavor-name`` or ``instance-type`` of the provider's labels",
        convert=lambda given: {str(name): _price(value) for name, value in given.items()},
    )


class Label(ConfigValue):
    """A label; ``pools`` are those that offer it, appended by the drivers."""

    # The pools are compared with their providers.
    ignore_equality = ["pools"]

    name: str = option(str, REQUIRED, "name in requests", stored=False)
    min_ready: int = option(
        int, 0, "number of ready nodes to keep, counted over all launchers", convert=whole
    )
    max_ready_age: int = option(
        int, 0, "seconds after which an unused ready node is deleted; 0: never", convert=whole
    )
    max_unready: Share = option(
        v.Any(
            v.All(int, v.Range(min=1)),
            v.All(str, v.Match(r"^([1-9][0-9]?%|100%|[1-9][0-9]{0,5})$")),
            msg="expected a number from 1 or a share such as 20%",
        ),
        cast(Any, 1),
        "ready nodes that a rotation may leave missing: a number, or a share such as 20%",
        convert=Share.parse,
    )
    shrink_ready: bool = option(
        bool, True, "delete ready nodes above a lowered ``min-ready``; 11.0.0 keeps them"
    )
    lease: bool = option(
        bool,
        True,
        "whether people, scripts and CI jobs may lease these nodes; Zuul is not affected",
    )
    cost: Cost = option(
        Cost,
        cast(Any, {}),
        "*new*: what a node of this label costs, before the provider's, for ``nodepool usage``",
        convert=Cost,
        shown="",
    )
    probe: Probing = option(
        Probing,
        cast(Any, {}),
        "*new*: whether idle nodes still answer, see :doc:`operation/nodes`",
        convert=Probing,
        shown="",
    )

    def __init__(self) -> None:
        load(self, {})
        #: The file has ``min-ready``: without it, another launcher may keep nodes of the label.
        self.sets_min_ready = False
        self.pools: list[ConfigPool] = []


def probing_of(labels: Mapping[str, Label], names: Iterable[str]) -> Probing | None:
    """Return how a node with these labels is probed: as the one that is probed most often."""
    found = [label.probe for label in map(labels.get, names) if label is not None]
    probed = [probe for probe in found if probe.interval > 0]
    return min(probed, key=lambda probe: probe.interval, default=None)


WEB_PAGES = ("loopback", "everywhere", "off")


def _pages(value: object) -> object:
    # YAML reads an unquoted off as false.
    pages = "off" if value is False else value
    if pages not in WEB_PAGES:
        raise ValueError(f"expected {', '.join(WEB_PAGES)}, not {value!r}")
    return pages


_WEBAPP: dict[str, Any] = {
    "port": option(int, 8005, "TCP port; 0: any free one", convert=whole),
    "listen_address": option(str, "0.0.0.0", "address to listen on"),
    "pages": option(
        v.Any(*WEB_PAGES, False),
        "loopback",
        "who can open the pages, see :doc:`operation/web`",
        convert=_pages,
    ),
}


def _web(given: dict[str, Any]) -> dict[str, Any]:
    return values(_WEBAPP, {key: value for key, value in given.items() if value is not None})


_OTHER = Option(int, math.inf, "limit of another resource", convert=whole)
#: ``attribute`` is the name of the resource in ``tenant_resource_limits``.
_TENANT: dict[Any, Any] = {
    "tenant-name": option(str, REQUIRED, "name of the tenant"),
    "max-servers": option(int, math.inf, "number of nodes", convert=whole, attribute="instances"),
    "max-cores": option(int, math.inf, "number of cores", convert=whole, attribute="cores"),
    "max-ram": option(int, math.inf, "MiB of memory", convert=whole, attribute="ram"),
    "max-volumes": option(int, math.inf, "number of volumes", convert=whole, attribute="volumes"),
    "max-volume-gb": option(
        int, math.inf, "GB of all volumes", convert=whole, attribute="volume-gb"
    ),
    str: int,
}


class ImageAccess(Protocol):
    """How to log in to machines of an image."""

    @property
    def name(self) -> str | None: ...

    @property
    def username(self) -> str | None: ...

    @property
    def python_path(self) -> str | None: ...

    @property
    def shell_type(self) -> str | None: ...

    @property
    def connection_type(self) -> str | None: ...

    @property
    def connection_port(self) -> int | None: ...


class UploadedImage(ImageAccess, Protocol):
    """One of our disk images, as uploaded to a provider."""

    @property
    def pause(self) -> bool: ...


def disk_image(label: object) -> ImageAccess | None:
    """Return the disk image of a label of any driver's configuration; None if it has none."""
    return getattr(label, "diskimage", None) or None


def cloud_image(label: object) -> ImageAccess | None:
    """Return the cloud image of a label of any driver's configuration; None if it has none."""
    return getattr(label, "cloud_image", None) or None


class ConfigPool(ConfigValue, metaclass=abc.ABCMeta):
    """A pool of a provider; pools of different classes are never equal."""

    name: str
    #: Its provider; set by the driver.
    provider: ProviderConfig | None = None
    # Options of some drivers.
    max_cores: float | None = None
    max_ram: float | None = None
    max_volumes: float | None = None
    max_volume_gb: float | None = None
    max_resources: dict[str, float] | None = None
    use_internal_ip = False
    max_servers: float = option(int, math.inf, "maximum number of nodes; 0 disables the pool")
    node_attributes: dict[str, Any] | None = option(
        dict, None, "stored with each node and shown to Zuul"
    )
    priority: int | None = option(int, None, "lower is preferred", shown="the provider's")

    def __init__(self) -> None:
        self.labels: Any = {}
        load(self, {}, ConfigPool)
        self.ignore_provider_quota = False
        self.azs: list[str] | None = None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and super().__eq__(other)

    __hash__ = ConfigValue.__hash__

    @classmethod
    def getCommonSchemaDict(cls) -> dict[Any, Any]:
        return dict(schema(ConfigPool))

    @abc.abstractmethod
    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Set the declared options from *pool_config*; subclasses extend it."""
        load(self, pool_config)


class DriverConfig(ConfigValue):
    """The driver of a provider; contains only its name."""

    def __init__(self) -> None:
        self.name: str | None = None


class ProviderConfig(ConfigValue, metaclass=abc.ABCMeta):
    """One entry of ``providers``; created from its YAML dict, filled by ``load``."""

    # Options of drivers with state machines; times are in seconds.
    launch_retries: int
    launch_timeout: float | None = None
    boot_timeout: float | None = None
    #: How to log in to machines of uploaded images, by the image's name.
    diskimages: Mapping[str, UploadedImage]
    #: Format of images to upload; None: the driver uploads none.
    image_type: str | None = None
    image_name_format: str
    post_upload_hook: str | None = None
    name: str = option(
        str,
        REQUIRED,
        "name of the provider, part of records, metrics and tags; do not change it",
        stored=False,
    )
    driver: DriverConfig = option(str, cast(Any, "openstack"), "name of the driver", stored=False)
    max_concurrency: int = option(int, -1, "maximum concurrent launches; 0: none", shown="no limit")
    max_launch_failures_per_hour: int = option(
        int,
        5,
        "*new*: failed launches in a row, of each label, after which no more are started, see "
        ":doc:`operation/nodes`; at most 100; 0 or -1: no limit",
        convert=whole,
    )
    cost: ProviderCost = option(
        ProviderCost,
        cast(Any, {}),
        "*new*: what a node costs, for ``nodepool usage``",
        convert=ProviderCost,
        shown="",
    )
    priority: int | None = option(
        int, None, "of the provider's pools; lower is preferred", shown="100"
    )

    def __init__(self, provider: dict[str, Any]) -> None:
        self.name = provider["name"]
        self.provider = provider
        self._pools: dict[str, Any] = {}
        load(self, provider, ProviderConfig)
        self.driver = DriverConfig()
        self.driver.name = provider.get("driver", "openstack")

    @classmethod
    def getCommonSchemaDict(cls) -> dict[Any, Any]:
        return dict(schema(ProviderConfig))

    @property
    def pools(self) -> dict[str, ConfigPool]:
        return self._pools

    @property
    def manage_images(self) -> bool:
        """Return True if the builder has to upload images to this provider."""
        return False

    @abc.abstractmethod
    def load(self, newconfig: Config) -> None:
        """Parse ``self.provider``; *newconfig* is the whole configuration under construction."""

    def getSchema(self) -> v.Schema:
        """Return the schema of the provider without common keys, for validation only.

        Drivers that do not declare their options override it.
        """
        own, common = schema(type(self), type(self)), self.getCommonSchemaDict()
        return v.Schema({key: check for key, check in own.items() if key not in common})

    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        """Return the labels of the named pool, or of all pools."""
        return {
            label
            for name, pool in self.pools.items()
            if not pool_name or name == pool_name
            for label in pool.labels
        }


class Config(ConfigValue):
    """The whole configuration, see CFG-9.2 for the attributes.

    ``provider_errors``: providers that are disabled because driver, library or cloud description is
    missing, with the reason.
    ``provider_failures``: providers that could not be started, with the reason.
    ``not_running_labels``: their labels.
    """

    ignore_equality = [
        "provider_managers",
        "config_mtimes",
        "files",
        "provider_errors",
        "provider_failures",
        "not_running_labels",
    ]

    #: Names of the providers that are not in force; set by the launcher that applied the
    #: configuration.
    providers_not_running: list[str]

    zookeeper_servers: Any = option(
        [SERVER], {}, "servers of ZooKeeper; required, here or in the secure file", stored=False
    )
    zookeeper_tls: object = option(
        TLS, None, "required unless ``zookeeper-insecure`` is true", stored=False
    )
    zookeeper_insecure: bool = option(
        bool, False, "allow connections without TLS", convert=lambda value: value is True
    )
    zookeeper_timeout: float = option(
        v.Any(float, int), 10, "seconds after which ZooKeeper ends our session", convert=float
    )
    webapp: dict[str, Any] = option(_WEBAPP, {}, "the launcher's web server", convert=_web)
    access: AccessConfig = option(
        AccessConfig,
        cast(Any, None),
        "who may change things by the API, see :doc:`operation/access`",
        convert=AccessConfig,
    )
    drivers_path: object = option(
        v.Any(str, [str]),
        None,
        "directories with more drivers, relative to this file (:doc:`writing-a-driver`)",
        stored=False,
    )
    #: Builders require it.
    images_dir: str = option(str, cast(str, None), "builder: directory of image files")
    elements_dir: str | None = option(
        str, None, "builder: directories with elements, joined by ``:`` (``ELEMENTS_PATH``)"
    )
    build_log_dir: str | None = option(
        str, None, "builder: directory of build logs", shown="``/var/log/nodepool/builds``"
    )
    build_log_retention: int = option(
        int, 7, "builder: number of old logs to keep of each image", convert=whole
    )
    failed_build_retention: int = option(
        int,
        7 * 24 * 3600,
        "builder: seconds that a failed build is listed",
        convert=lambda value: max(0, whole(value)),
    )
    build_min_free: int = option(
        int,
        256,
        "builder: MiB that must be free to start a build",
        convert=lambda value: max(0, whole(value)),
    )
    max_hold_age: float = option(
        int,
        math.inf,
        "maximum seconds that a node is held",
        convert=lambda value: age if (age := whole(value)) > 0 else math.inf,
    )
    usage_log: str | None = option(
        str, None, "*new*: SQLite file for what ended nodes have used, see :doc:`operation/usage`"
    )
    labels: dict[str, Label] = option(
        [Label], cast(Any, {}), "types of nodes that can be requested", stored=False
    )
    diskimages: dict[str, DiskImage] = option(
        [DiskImage], cast(Any, {}), "images that the builder builds", stored=False
    )
    providers: dict[str, ProviderConfig] = option(
        [object], cast(Any, {}), "where nodes come from", stored=False
    )
    tenant_resource_limits: dict[str, dict[str, float]] = option(
        [_TENANT], cast(Any, {}), "limits of tenants over all providers and launchers", stored=False
    )

    def __init__(self) -> None:
        self.diskimages = Named("diskimage")
        self.labels = Named("label")
        self.providers = {}
        self.provider_managers: dict[str, Any] = {}
        self.provider_errors: dict[str, str] = {}
        self.provider_failures: dict[str, str] = {}
        self.not_running_labels: dict[str, list[str]] = {}
        self.zookeeper_servers = {}
        self.zookeeper_tls_cert: str | None = None
        self.zookeeper_tls_key: str | None = None
        self.zookeeper_tls_ca: str | None = None
        self.tenant_resource_limits = {}
        self.config_mtimes: dict[str, int] = {}
        #: All files that were read, also by drivers (clouds.yaml), as they were before; None: it
        #: did not exist.
        self.files: dict[str, FileIdentity | None] = {}
        load(self, {})
        #: Who may see the pages and /api/v1; not among the arguments of 11.0.0.
        self.web_pages: str = self.webapp.pop("pages")

    def require(self, path: str, *options: str) -> None:
        """Check options that a program requires.

        :param path: of the configuration file, for the message.
        :raises IncompleteConfiguration: an option is missing.
        """
        if "zookeeper-servers" in options:
            if not self.zookeeper_servers:
                raise IncompleteConfiguration(
                    f"{path}: No ZooKeeper servers specified in config (zookeeper-servers)"
                )
            if not (
                (self.zookeeper_tls_cert and self.zookeeper_tls_key and self.zookeeper_tls_ca)
                or self.zookeeper_insecure
            ):
                raise IncompleteConfiguration(f"{path}: {TLS_REQUIRED}")
        if "images-dir" in options and not self.images_dir:
            raise IncompleteConfiguration(f"{path}: No images-dir specified in config.")

    def setConfigPathMtime(self, path: str, mtime: int) -> None:
        self.config_mtimes[path] = mtime

    def apply(self, options: Mapping[str, Any]) -> None:
        """Set the options with plain values, the web server and access, if given and not null."""
        load(self, options, part=True)
        self.web_pages = self.webapp.pop("pages", self.web_pages)

    def _set(self, names: str, *given: object) -> None:
        self.apply(dict(zip(names.split(), given, strict=True)))

    # Setters of release 11.0.0; None changes nothing.
    setElementsDir = functools.partialmethod(_set, "elements-dir")
    setImagesDir = functools.partialmethod(_set, "images-dir")
    setBuildLog = functools.partialmethod(_set, "build-log-dir build-log-retention")
    setMaxHoldAge = functools.partialmethod(_set, "max-hold-age")
    setWebApp = functools.partialmethod(_set, "webapp")
    setZooKeeperTimeout = functools.partialmethod(_set, "zookeeper-timeout")

    def setZooKeeperServers(self, zk_cfg: list[dict[str, Any]] | None) -> None:
        """Set the connection string; an empty list changes nothing."""
        if zk_cfg:
            servers = connections(zk_cfg)
            warn_about_chroots(servers)
            self.zookeeper_servers = buildZooKeeperHosts(servers)

    def setZooKeeperTLS(self, zk_tls: dict[str, Any] | None) -> None:
        """Replace all three paths; None changes nothing."""
        if not isinstance(zk_tls or {}, dict):
            raise ConfigError(
                "zookeeper-tls: expected a dictionary with cert, key and ca",
                where=("zookeeper-tls",),
            )
        if zk_tls:
            self.zookeeper_tls_cert, self.zookeeper_tls_key, self.zookeeper_tls_ca = map(
                zk_tls.get, TLS
            )

    def setDiskImages(self, diskimages_cfg: list[dict[str, Any]] | None) -> None:
        self.diskimages.update(build_disk_images(diskimages_cfg))

    def setSecureDiskimageEnv(
        self, diskimages: list[dict[str, Any]] | None, secure_config_path: str
    ) -> None:
        """Merge secret environment variables over those of the named images."""
        for _, entry in entries(diskimages, "diskimages"):
            if entry["name"] not in self.diskimages:
                raise UnknownName(f"{secure_config_path}: unknown diskimage {entry['name']}")
            self.diskimages[entry["name"]].set_env_vars(entry.get("env-vars"), secret=True)

    def why_not_leased(self, labels: Iterable[str]) -> str | None:
        """Return why these labels may not be leased; None: they may."""
        found = sorted(
            {label for label in labels if label in self.labels and not self.labels[label].lease}
        )
        return (
            f"label {', '.join(found)} may not be leased (lease: false in its configuration)"
            if found
            else None
        )

    def setLabels(self, labels_cfg: list[dict[str, Any]] | None) -> None:
        for where, entry in entries(labels_cfg, "labels"):
            label = Label()
            label.name = str(entry["name"])
            with at(where):
                load(label, entry, part=True)
            label.sets_min_ready = entry.get("min-ready") is not None
            self.labels[label.name] = label

    def setTenantResourceLimits(
        self, tenant_resource_limits_cfg: list[dict[str, Any]] | None
    ) -> None:
        """Set limits by tenant: always cores, instances and ram, others if specified."""
        for where, entry in entries(
            tenant_resource_limits_cfg, "tenant-resource-limits", "tenant-name"
        ):
            limits: dict[str, float] = {"cores": math.inf, "instances": math.inf, "ram": math.inf}
            for name, value in entry.items():
                if name != "tenant-name" and value is not None:
                    limit = _TENANT.get(name, _OTHER)
                    with at(where):
                        limits[limit.attribute or name] = limit.value(entry, None, name)
            self.tenant_resource_limits[entry["tenant-name"]] = limits

    def setProviders(self, providers_cfg: list[dict[str, Any]] | None) -> None:
        """Load every provider.

        Invalid options raise a ConfigError. If a driver is unknown or cannot be loaded, or a cloud
        is not described on this machine, only that provider is disabled, and the reason is stored
        in ``provider_errors``.
        """
        for where, entry in entries(providers_cfg, "providers"):
            name = entry["name"]
            try:
                provider = get_provider_config(entry)
                provider.load(self)
            except (UnknownDriver, DriverLoadError, ProviderUnavailable, ImportError) as exc:
                text = str(exc)
                if isinstance(exc, ImportError):
                    text += "; install the missing Python module"
                self.provider_errors[name] = f"provider {name} is not used: {text}"
                log.error("%s", self.provider_errors[name])
                # Its pools may be in the labels already; no pool serves them.
                for label in self.labels.values():
                    label.pools = [
                        pool
                        for pool in label.pools
                        if pool.provider is None or pool.provider.name != name
                    ]
                continue
            except ConfigError as exc:
                if isinstance(exc, UnknownName) and exc.name is not None:
                    # A driver of others may name a place that is not in the entry.
                    with contextlib.suppress(LookupError, TypeError):
                        place = functools.reduce(
                            lambda part, key: part[key], exc.where, cast(Any, entry)
                        )
                        exc.where += find_value(place, exc.name)
                exc.where = exc.where if exc.where[:1] == ("providers",) else (*where, *exc.where)
                exc.context.append(f"provider {name}")
                raise
            except Exception as exc:
                what = (
                    f"required key {exc} is missing"
                    if isinstance(exc, KeyError)
                    else str(exc) or repr(exc)
                )
                error = ProviderLoadError(what, where=where)
                error.context.append(f"provider {name}, driver {entry.get('driver')}")
                raise error from exc
            replaced = self.providers.get(provider.name)
            if replaced is not None:
                log.warning("Provider %s is defined twice; the later definition is used", name)
                for label in self.labels.values():
                    label.pools = [pool for pool in label.pools if pool.provider is not replaced]
            self.providers[provider.name] = provider
            self.provider_errors.pop(provider.name, None)


def find_value(data: object, value: object) -> tuple[PathItem, ...]:
    """Return the path of the first option in *data* whose value contains *value*.

    The value, or one of its words, must be equal; () if there is none.
    """
    items: Iterable[Any] = ()
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    for key, child in items:
        if child == value or (isinstance(child, str) and value in child.split()):
            return (key,)
        below = find_value(child, value)
        if below:
            return (key, *below)
    return ()


def get_provider_config(provider: dict[str, Any]) -> ProviderConfig:
    """Return the driver's not yet loaded object for *provider*; set ``driver``.

    A provider whose name starts with ``fake`` always gets the driver ``fake``.

    :raises DriverLoadError: the driver cannot be loaded, or lacks a package; the text says how to
        install it.
    """
    asked = provider.setdefault("driver", "openstack")
    if str(provider.get("name", "")).startswith("fake"):
        if asked not in ("fake", "openstack"):
            log.warning(
                "Provider %s uses driver fake instead of %s, because of its name",
                provider["name"],
                asked,
            )
        provider["driver"] = "fake"
    driver = drivers().get(provider["driver"])
    if type(driver).__module__.startswith("nodepool.driver."):
        absent = optional.missing(optional.OF_DRIVER.get(provider["driver"], ()))
        if absent is not None:
            raise DriverLoadError(f"driver {provider['driver']} needs {absent}")
    config: ProviderConfig = driver.getProviderConfig(provider)
    return config

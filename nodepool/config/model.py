"""The loaded configuration (CFG-4, CFG-7 and CFG-9)."""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast

import voluptuous as v

from nodepool.base import optional
from nodepool.base.config_value import ConfigValue
from nodepool.base.connection_string import TLS_REQUIRED
from nodepool.base.option import REQUIRED, load, option, schema
from nodepool.config.access import AccessConfig
from nodepool.config.diskimages import DiskImage, build_disk_images
from nodepool.config.drivers import drivers
from nodepool.config.errors import DriverLoadError, ProviderLoadError, ProviderUnavailable, UnknownDriver, UnknownName
from nodepool.config.zookeeper import buildZooKeeperHosts, connections, warn_about_chroots
from nodepool.exceptions import ConfigError, IncompleteConfiguration, PathItem

T = TypeVar("T")

log = logging.getLogger("nodepool.config")


class Named(dict[str, T]):
    """Objects by name; errors about missing ones contain name and list."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __missing__(self, key: str) -> T:
        error = UnknownName(f"{self.kind} {key!r} is not defined in the top-level {self.kind}s list")
        error.name = key
        raise error


class Label(ConfigValue):
    """A label; ``pools`` are those that offer it, appended by the drivers."""

    # The pools are compared with their providers.
    ignore_equality = ["pools"]

    def __init__(self) -> None:
        self.name: str = None  # type: ignore[assignment]  # set by Config.setLabels
        self.max_ready_age = 0
        self.min_ready = 0
        self.pools: list[ConfigPool] = []


WEB_PAGES = ("loopback", "everywhere", "off")


def integer(data: dict[str, Any], key: str, default: object, where: tuple[PathItem, ...] = ()) -> Any:
    """Return an integer option; digits in quotes are accepted with a warning.

    :raises ConfigError: it is anything else.
    """
    value = data.get(key)
    if value is None:
        return default
    if isinstance(value, int | float):
        return value
    try:
        number = int(str(value))
    except ValueError:
        raise ConfigError(f"{key}: expected a whole number, not {value!r}", where=(*where, key)) from None
    log.warning("%s: %r is taken as the number %s; remove the quotes", key, value, number)
    return number


def dict_items(items: object, key: str) -> list[dict[str, Any]]:
    """Return the entries of a list option; null is an empty list."""
    if items is None:
        return []
    if not isinstance(items, list):
        raise ConfigError(f"{key}: expected a list", where=(key,))
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ConfigError(f"{key}: entry {index + 1} must be a dictionary of options", where=(key, index))
    return items


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
    max_servers: float = option(int, math.inf, "maximum number of nodes")
    node_attributes: dict[str, Any] | None = option(dict, None, "stored with each node and shown to Zuul")
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
    name: str = option(str, REQUIRED, "name of the provider, part of records, metrics and tags; do not change it", stored=False)
    driver: DriverConfig = option(str, cast(Any, "openstack"), "name of the driver", stored=False)
    max_concurrency: int = option(int, -1, "maximum concurrent launches", shown="no limit")
    priority: int | None = option(int, None, "of the provider's pools; lower is preferred", shown="100")

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
        """Return the pools by name; :meth:`load` has stored them."""
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
        return {label for name, pool in self.pools.items() if not pool_name or name == pool_name for label in pool.labels}


class Config(ConfigValue):
    """The whole configuration, see CFG-9.2 for the attributes.

    ``provider_errors``: providers that are disabled because driver, library or cloud description is missing, with the
    reason.
    ``provider_failures``: providers that could not be started, with the reason.
    ``not_running_labels``: their labels.
    """

    ignore_equality = [
        "provider_managers",
        "config_mtimes",
        "driver_files",
        "provider_errors",
        "provider_failures",
        "not_running_labels",
    ]

    #: Names of the providers that are not in force; set by the launcher that applied the configuration.
    providers_not_running: list[str]

    def __init__(self) -> None:
        self.diskimages: dict[str, DiskImage] = Named("diskimage")
        self.labels: dict[str, Label] = Named("label")
        self.providers: dict[str, ProviderConfig] = {}
        self.provider_managers: dict[str, Any] = {}
        self.provider_errors: dict[str, str] = {}
        self.provider_failures: dict[str, str] = {}
        self.not_running_labels: dict[str, list[str]] = {}
        self.zookeeper_servers: Any = {}
        self.zookeeper_timeout = 10.0
        self.zookeeper_tls_cert: str | None = None
        self.zookeeper_tls_key: str | None = None
        self.zookeeper_tls_ca: str | None = None
        self.zookeeper_insecure = False
        self.elements_dir: str | None = None
        #: None if the option is missing; builders require it.
        self.images_dir: str = None  # type: ignore[assignment]
        self.build_log_dir: str | None = None
        self.build_log_retention: int = 7
        #: Seconds that a failed build is listed with its reason.
        self.failed_build_retention: int = 7 * 24 * 3600
        #: MiB that must be free before a build starts.
        self.build_min_free: int = 256
        self.max_hold_age: float = math.inf
        self.webapp: dict[str, Any] = {"port": 8005, "listen_address": "0.0.0.0"}
        #: Who may see the pages and /api/v1; not among the arguments of 11.0.0.
        self.web_pages = "loopback"
        self.access = AccessConfig()
        self.tenant_resource_limits: dict[str, dict[str, float]] = {}
        self.config_mtimes: dict[str, int] = {}
        #: Files that drivers have read (clouds.yaml), as ``config_mtimes``; None for one that does not exist.
        self.driver_files: dict[str, int | None] = {}

    def require(self, path: str, *options: str) -> None:
        """Check options that a program requires.

        :param path: of the configuration file, for the message.
        :raises IncompleteConfiguration: an option is missing.
        """
        if "zookeeper-servers" in options:
            if not self.zookeeper_servers:
                raise IncompleteConfiguration(f"{path}: No ZooKeeper servers specified in config (zookeeper-servers)")
            if not ((self.zookeeper_tls_cert and self.zookeeper_tls_key and self.zookeeper_tls_ca) or self.zookeeper_insecure):
                raise IncompleteConfiguration(f"{path}: {TLS_REQUIRED}")
        if "images-dir" in options and not self.images_dir:
            raise IncompleteConfiguration(f"{path}: No images-dir specified in config.")

    def setConfigPathMtime(self, path: str, mtime: int) -> None:
        self.config_mtimes[path] = mtime

    def setElementsDir(self, value: str | None) -> None:
        self.elements_dir = value

    def setImagesDir(self, value: str | None) -> None:
        self.images_dir = value  # type: ignore[assignment]

    def setBuildLog(self, directory: str | None, retention: object) -> None:
        self.build_log_dir = directory
        self.build_log_retention = integer({"build-log-retention": retention}, "build-log-retention", 7)

    def setBuildLimits(self, failed_build_retention: object, build_min_free: object) -> None:
        """Set the time in seconds and the size in MiB; None keeps the default."""
        given = {"failed-build-retention": failed_build_retention, "build-min-free": build_min_free}
        self.failed_build_retention = max(0, integer(given, "failed-build-retention", self.failed_build_retention))
        self.build_min_free = max(0, integer(given, "build-min-free", self.build_min_free))

    def setMaxHoldAge(self, value: object) -> None:
        """Set the limit in seconds; None, 0 and negative numbers mean unlimited."""
        age = integer({"max-hold-age": value}, "max-hold-age", 0)
        self.max_hold_age = age if age > 0 else math.inf

    def setWebApp(self, webapp_cfg: dict[str, Any] | None) -> None:
        given = webapp_cfg or {}
        if not isinstance(given, dict):
            raise ConfigError("webapp: expected a dictionary", where=("webapp",))
        pages = given.get("pages", self.web_pages)
        # YAML reads an unquoted off as false.
        self.web_pages = "off" if pages is False else pages
        if self.web_pages not in WEB_PAGES:
            raise ConfigError(f"webapp: pages: expected {', '.join(WEB_PAGES)}, not {pages!r}", where=("webapp", "pages"))
        self.webapp = {
            "port": integer(given, "port", 8005, ("webapp",)),
            "listen_address": given.get("listen_address", "0.0.0.0"),
        }

    def setZooKeeperServers(self, zk_cfg: list[dict[str, Any]] | None) -> None:
        """Set the connection string; an empty list changes nothing."""
        if not zk_cfg:
            return
        servers = connections(dict_items(zk_cfg, "zookeeper-servers"))
        warn_about_chroots(servers)
        self.zookeeper_servers = buildZooKeeperHosts(servers)

    def setZooKeeperTimeout(self, timeout: float | str) -> None:
        """Set the session timeout in seconds."""
        try:
            self.zookeeper_timeout = float(timeout)
        except (TypeError, ValueError):
            raise ConfigError(f"zookeeper-timeout: expected seconds, not {timeout!r}", where=("zookeeper-timeout",)) from None

    def setZooKeeperTLS(self, zk_tls: dict[str, Any] | None) -> None:
        """Replace all three paths; None changes nothing."""
        if not zk_tls:
            return
        if not isinstance(zk_tls, dict):
            raise ConfigError("zookeeper-tls: expected a dictionary with cert, key and ca", where=("zookeeper-tls",))
        self.zookeeper_tls_cert = zk_tls.get("cert")
        self.zookeeper_tls_key = zk_tls.get("key")
        self.zookeeper_tls_ca = zk_tls.get("ca")

    def setDiskImages(self, diskimages_cfg: list[dict[str, Any]] | None) -> None:
        for name, image in build_disk_images(dict_items(diskimages_cfg, "diskimages")).items():
            self.diskimages[name] = image

    def setSecureDiskimageEnv(self, diskimages: list[dict[str, Any]] | None, secure_config_path: str) -> None:
        """Merge secret environment variables over those of the named images."""
        for entry in dict_items(diskimages, "diskimages"):
            name = entry.get("name")
            if name not in self.diskimages:
                raise UnknownName(f"{secure_config_path}: unknown diskimage {name}")
            if not isinstance(entry.get("env-vars"), dict):
                raise ConfigError(f"{secure_config_path}: diskimage {name} needs env-vars, a dictionary")
            self.diskimages[name].set_env_vars(entry["env-vars"], secret=True)

    def setLabels(self, labels_cfg: list[dict[str, Any]] | None) -> None:
        for index, entry in enumerate(dict_items(labels_cfg, "labels")):
            where = ("labels", index)
            if not entry.get("name"):
                raise ConfigError("required key 'name' is missing in labels", where=where)
            label = Label()
            label.name = str(entry["name"])
            label.max_ready_age = integer(entry, "max-ready-age", 0, where)
            label.min_ready = integer(entry, "min-ready", 0, where)
            self.labels[label.name] = label

    def setTenantResourceLimits(self, tenant_resource_limits_cfg: list[dict[str, Any]] | None) -> None:
        """Set limits by tenant: always cores, instances and ram, others if specified."""
        names = {"max-cores": "cores", "max-servers": "instances", "max-ram": "ram"}
        other = {"max-volumes": "volumes", "max-volume-gb": "volume-gb"}
        key = "tenant-resource-limits"
        for index, entry in enumerate(dict_items(tenant_resource_limits_cfg, key)):
            if not entry.get("tenant-name"):
                raise ConfigError("required key 'tenant-name' is missing in tenant-resource-limits", where=(key, index))
            limits: dict[str, float] = dict.fromkeys(names.values(), math.inf)
            for name in entry:
                if name != "tenant-name":
                    stored = names.get(name) or other.get(name) or name
                    limits[stored] = integer(entry, name, math.inf, (key, index))
            self.tenant_resource_limits[entry["tenant-name"]] = limits

    def setProviders(self, providers_cfg: list[dict[str, Any]] | None) -> None:
        """Load every provider.

        Invalid options raise a ConfigError. If a driver is unknown or cannot be loaded, or a cloud is not described on
        this machine, only that provider is disabled, and the reason is stored in ``provider_errors``.
        """
        for index, entry in enumerate(dict_items(providers_cfg, "providers")):
            where = ("providers", index)
            name = entry.get("name")
            if not name:
                raise ConfigError("required key 'name' is missing in providers", where=where)
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
                    label.pools = [pool for pool in label.pools if pool.provider is None or pool.provider.name != name]
                continue
            except ConfigError as exc:
                if isinstance(exc, UnknownName):
                    exc.where = exc.where if len(exc.where) > 1 else find_value(entry, exc.name)
                exc.where = exc.where if exc.where[:1] == ("providers",) else (*where, *exc.where)
                exc.context.append(f"provider {name}")
                raise
            except Exception as exc:
                what = f"required key {exc} is missing" if isinstance(exc, KeyError) else str(exc) or repr(exc)
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

    :raises DriverLoadError: the driver cannot be loaded, or lacks a package; the text says how to install it.
    """
    asked = provider.setdefault("driver", "openstack")
    if str(provider.get("name", "")).startswith("fake"):
        if asked not in ("fake", "openstack"):
            log.warning("Provider %s uses driver fake instead of %s, because of its name", provider["name"], asked)
        provider["driver"] = "fake"
    driver = drivers().get(provider["driver"])
    if type(driver).__module__.startswith("nodepool.driver."):
        absent = optional.missing(optional.OF_DRIVER.get(provider["driver"], ()))
        if absent is not None:
            raise DriverLoadError(f"driver {provider['driver']} needs {absent}")
    config: ProviderConfig = driver.getProviderConfig(provider)
    return config

"""Options of a Kubernetes provider (KUB-4); those of OpenShift build on them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import voluptuous as v

from nodepool.config.errors import ConfigError, PathItem
from nodepool.config.model import Config, ConfigPool, ProviderConfig
from nodepool.config.value import ConfigValue
from nodepool.driver.kubernetes import schema
from nodepool.driver.provider import Driver

#: Seconds; each step of a launch has its own limit (KUB-7).
LAUNCH_TIMEOUT = 600


def as_texts(values: dict[str, Any] | None) -> dict[str, str]:
    """Return labels as strings: YAML has numbers and booleans, Kubernetes strings only."""
    return {
        str(key): str(value).lower() if isinstance(value, bool) else str(value) for key, value in (values or {}).items()
    }  # fmt: skip


class ContainerImage(ConfigValue):
    """A label's image for the launcher, with settings for Zuul; not an object in the cloud."""

    connection_type: str | None = None
    connection_port: int | None = None
    username: str | None = None

    def __init__(self, python_path: str | None, shell_type: str | None) -> None:
        self.name: str | None = None
        self.python_path = python_path
        self.shell_type = shell_type


class KubernetesLabel(ConfigValue):
    ignore_equality = ["pool"]
    pool: KubernetesPool

    def __init__(self) -> None:
        self.name: str = ""
        self.type: str = "pod"
        self.cloud_image = ContainerImage("auto", None)
        self.diskimage = None
        self.host_key_checking = False
        #: The whole specification of the pod; None: it is built from the options.
        self.spec: dict[str, Any] | None = None
        self.options: dict[str, Any] = {}
        self.cpu: int | None = None
        self.memory: int | None = None
        self.storage: int | None = None
        self.cpu_limit: int | None = None
        self.memory_limit: int | None = None
        self.storage_limit: int | None = None
        self.gpu: float | None = None
        self.gpu_resource: str | None = None
        self.extra_resources: dict[str, Any] = {}
        self.labels: dict[str, str] = {}
        self.dynamic_labels: dict[str, str] = {}
        self.annotations: dict[str, str] = {}

    @property
    def is_pod(self) -> bool:
        return self.type != "namespace"

    @property
    def python_path(self) -> str | None:
        return self.cloud_image.python_path

    @property
    def shell_type(self) -> str | None:
        return self.cloud_image.shell_type


class KubernetesPool(ConfigPool):
    ignore_equality = ["provider"]
    label_class: ClassVar[type[KubernetesLabel]] = KubernetesLabel
    #: Whether the node's id is appended to the pool's name.
    prefix = True

    def __init__(self) -> None:
        self.name: str = ""
        self.provider: KubernetesProviderConfig | None = None
        self.max_cores: float = math.inf
        self.max_ram: float = math.inf
        self.max_resources: dict[str, float] = {}
        super().__init__()

    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: object) -> None:
        full_config, provider = args
        super().load(pool_config)
        self.provider = provider
        self.name = str(pool_config["name"])
        limits = provider.provider
        self.max_servers = pool_config.get("max-servers", provider.max_servers)
        self.max_cores = pool_config.get("max-cores", limits.get("max-cores", math.inf))
        self.max_ram = pool_config.get("max-ram", limits.get("max-ram", math.inf))
        self.max_resources = {**(limits.get("max-resources") or {}), **(pool_config.get("max-resources") or {})}
        # Other names of the same limits, which have precedence.
        self.max_servers = self.max_resources.get("instances", self.max_servers)
        self.max_cores = self.max_resources.get("cores", self.max_cores)
        self.max_ram = self.max_resources.get("ram", self.max_ram)
        if self.priority is None:
            self.priority = provider.priority
        trouble = schema.name_trouble(self.name, schema.LONGEST_NAME - (schema.ID_LENGTH if self.prefix else 0))
        if trouble:
            raise ConfigError(f"name of pool: {trouble}", where=("name",))
        for number, options in enumerate(pool_config.get("labels") or []):
            where = ("labels", number)
            label = self._label(options, pool_config, where)
            self.labels[label.name] = label
            full_config.labels[label.name].pools.append(self)

    def _label(self, options: dict[str, Any], defaults: dict[str, Any], where: tuple[PathItem, ...]) -> KubernetesLabel:
        label = self.label_class()
        label.name = str(options["name"])
        label.pool = self
        label.type = str(options.get("type", label.type))
        label.options = dict(options)
        label.spec = options.get("spec")
        label.cloud_image = ContainerImage(options.get("python-path", "auto"), options.get("shell-type"))
        for name in schema.LIMITS:
            request = options.get(name) or defaults.get(f"default-label-{name}") or None
            limit = options.get(f"{name}-limit") or defaults.get(f"default-label-{name}-limit") or request
            setattr(label, name, request)
            setattr(label, f"{name}_limit", limit)
        label.gpu = options.get("gpu")
        label.gpu_resource = options.get("gpu-resource")
        extra = defaults.get("default-label-extra-resources") or defaults.get("default-label-extra_resources") or {}
        label.extra_resources = {**extra, **(options.get("extra-resources") or {})}
        label.labels = as_texts(options.get("labels"))
        label.dynamic_labels = dict(options.get("dynamic-labels") or {})
        label.annotations = as_texts(options.get("annotations"))
        self._check(label, options, where)
        return label

    def _check(self, label: KubernetesLabel, options: dict[str, Any], where: tuple[PathItem, ...]) -> None:
        if label.is_pod and (trouble := self._name_trouble(label.name)):
            raise ConfigError(f"name of label: {trouble}", where=(*where, "name"))
        if trouble := schema.value_trouble(label.name):
            raise ConfigError(f"name of label: {trouble}", where=(*where, "name"))
        if trouble := schema.labels_trouble(label.labels, label.dynamic_labels):
            raise ConfigError(f"label {label.name}: labels: {trouble}", where=(*where, "labels"))
        if (label.gpu is None) != (label.gpu_resource is None):
            raise ConfigError(f"label {label.name}: gpu and gpu-resource are needed together", where=(*where, "gpu"))

    def _name_trouble(self, name: str) -> str | None:
        return schema.name_trouble(name)


class KubernetesProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]
    pool_class: ClassVar[type[KubernetesPool]] = KubernetesPool
    #: Names of the limit of nodes in order of precedence.
    SERVERS: ClassVar[tuple[str, ...]] = ("max-servers",)

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        self.driver_object = driver
        self._pools: dict[str, Any] = {}
        self.context: str | None = None
        self.launch_retries = 3
        self.launch_timeout = LAUNCH_TIMEOUT
        self.max_servers: float = math.inf
        #: Applied to each namespace that is created.
        self.namespace_labels: dict[str, str] = {}
        self.namespace_annotations: dict[str, str] = {}
        self.network_policies: list[dict[str, Any]] = []
        self.limit_range: list[dict[str, Any]] = []
        #: Namespace for pulling images of min-ready labels to all machines in advance; None: none.
        self.pull_namespace: str | None = None
        self.pull_selector: dict[str, Any] = {}
        self.pulled_labels: set[str] = set()
        super().__init__(provider)

    @property
    def pools(self) -> dict[str, ConfigPool]:
        return self._pools

    @property
    def manage_images(self) -> bool:
        return False

    def load(self, newconfig: Config) -> None:
        options = self.provider
        self.context = options.get("context")
        self.launch_retries = max(1, int(options.get("launch-retries", 3)))
        self.max_servers = next((options[name] for name in self.SERVERS if options.get(name) is not None), math.inf)
        self.namespace_labels = as_texts(options.get("namespace-labels"))
        self.namespace_annotations = as_texts(options.get("namespace-annotations"))
        self.network_policies = list(options.get("network-policies") or [])
        self.limit_range = list(options.get("limit-range") or [])
        pull = options.get("pre-pull") or {}
        self.pull_namespace, self.pull_selector = pull.get("namespace"), dict(pull.get("node-selector") or {})
        if trouble := schema.value_trouble(self.name):
            raise ConfigError(f"name of provider: {trouble}", where=("name",))
        if trouble := schema.labels_trouble(self.namespace_labels):
            raise ConfigError(f"namespace-labels: {trouble}", where=("namespace-labels",))
        for number, entry in enumerate(options.get("pools") or []):
            pool = self.pool_class()
            try:
                pool.load(entry, newconfig, self)
            except ConfigError as error:
                error.where = ("pools", number, *error.where)
                raise
            self._pools[pool.name] = pool
        self.pulled_labels = {name for name in self.getSupportedLabels() if newconfig.labels[name].min_ready > 0}

    def getSchema(self) -> v.Schema:
        label = schema.label({v.Required("type"): str})
        return schema.provider(
            schema.pool(label),
            {
                "context": str,
                "namespace-labels": dict,
                "namespace-annotations": dict,
                "network-policies": [dict],
                "limit-range": [dict],
                "pre-pull": {v.Required("namespace"): str, "node-selector": dict},
            },
        )

    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        return {label for name, pool in self._pools.items() if not pool_name or name == pool_name for label in pool.labels}

"""Options of a Kubernetes provider (KUB-4); those of OpenShift build on them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import voluptuous as v

from nodepool.base.config_value import ConfigValue
from nodepool.base.option import REQUIRED, Each, at, changed, entries, load, option
from nodepool.config.model import Config, ConfigPool, ProviderConfig
from nodepool.driver.common.options import NUMBER, PROVIDER, texts
from nodepool.driver.kubernetes import names
from nodepool.driver.provider import Driver
from nodepool.exceptions import ConfigError

#: Seconds; each step of a launch has its own limit (KUB-7).
LAUNCH_TIMEOUT = 600
#: Names of the label's own option, and of the pool's default for it, with their units.
LIMITS = {"cpu": "cores", "memory": "MiB", "storage": "MB of disk"}
#: Options of a label from which the pod is built.
POD: dict[str, Any] = {
    "image": option(str, None, "image of the container"),
    "image-pull": option(str, "IfNotPresent", "when the image is pulled"),
    "image-pull-secrets": option(
        [dict], None, "*new*: secrets for pulling images, of the specification"
    ),
    **{
        name: option(
            int,
            None,
            f"{unit} requested; 0: the default",
            shown=f"the pool's ``default-label-{name}``",
        )
        for name, unit in LIMITS.items()
    },
    **{
        f"{name}-limit": option(
            int,
            None,
            f"maximum of {unit}",
            shown=f"the pool's ``default-label-{name}-limit``, or ``{name}``",
        )
        for name, unit in LIMITS.items()
    },
    "gpu": option(NUMBER, None, "number of GPUs; with ``gpu-resource``"),
    "gpu-resource": option(
        str, None, "name of the resource, such as ``nvidia.com/gpu``; with ``gpu``"
    ),
    "extra-resources": option(
        {str: int}, {}, "further usage of a node, for limits only; added to the pool's"
    ),
    "env": option(
        [
            {
                "name": option(str, None, "name of the variable", key=v.Required),
                "value": option(str, None, "its value", key=v.Required),
            }
        ],
        [],
        "variables of the container",
    ),
    "node-selector": option(dict, None, "labels of the machine"),
    "scheduler-name": option(str, None, "scheduler of the pod"),
    "privileged": option(bool, None, "whether the container is privileged"),
    "volumes": option(list, None, "volumes, as in the specification"),
    "volume-mounts": option(list, None, "mounts of the container, as in the specification"),
    "python-path": option(str, "auto", "Python of the node, for Ansible"),
    "shell-type": option(str, None, "for Ansible, for example ``cmd``"),
    "service-account": option(str, None, "*new*: account of the pod"),
    "automount-token": option(
        bool, None, "*new*: give the account's token to the pod", shown="the account's"
    ),
    "tolerations": option([dict], None, "*new*: as in the specification"),
    "affinity": option(dict, None, "*new*: as in the specification"),
    "topology-spread": option(
        [dict], None, "*new*: ``topologySpreadConstraints`` of the specification"
    ),
    "priority-class": option(str, None, "*new*: priority class of the pod"),
    "security-context": option(dict, {}, "*new*: of the container"),
    "pod-security-context": option(dict, None, "*new*: of the pod"),
    "init-containers": option([dict], None, "*new*: as in the specification"),
    "sidecars": option([dict], [], "*new*: further containers; ``kubectl`` uses the first"),
    "os": option(
        v.Any("linux", "windows"),
        None,
        "*new*: system of the machine",
        shown="any; commands are for ``linux``",
    ),
}


class ContainerImage(ConfigValue):
    """A label's image for the launcher, with settings for Zuul; not an object in the cloud."""

    name: str | None = None
    connection_type: str | None = None
    connection_port: int | None = None
    username: str | None = None

    def __init__(self, python_path: str | None, shell_type: str | None) -> None:
        self.python_path = python_path
        self.shell_type = shell_type


def _one_shape(label: dict[str, Any]) -> dict[str, Any]:
    other = next((key for key in POD if key in label), None)
    if "spec" in label and other is not None:
        raise v.Invalid(
            f"{other} cannot be used together with spec; write it into the spec", path=[other]
        )
    return label


class KubernetesLabel(ConfigValue):
    ignore_equality = ["pool"]
    checks = (_one_shape,)
    diskimage = None
    host_key_checking = False
    longest_name: ClassVar[int] = names.LONGEST_NAME
    cpu: int | None
    memory: int | None
    storage: int | None
    cpu_limit: int | None
    memory_limit: int | None
    storage_limit: int | None
    name: str = option(str, REQUIRED, "name of a top-level label", convert=str)
    type: str = option(
        str, "pod", "``namespace``; any other value: with a pod", key=v.Required, convert=str
    )
    labels: dict[str, str] = option(dict, {}, "labels of the node's objects", convert=texts)
    dynamic_labels: dict[str, str] = option(
        {str: str}, {}, "the same, with ``{request...}`` replaced"
    )
    annotations: dict[str, str] = option(dict, {}, "annotations of the pod", convert=texts)
    options: dict[str, Any] = option(POD, {}, "", flat=True)
    spec: dict[str, Any] | None = option(
        dict, None, "the whole specification of the pod, instead of the options of a pod"
    )

    def __init__(self, options: dict[str, Any], pool: KubernetesPool) -> None:
        """:raises ConfigError: an option is missing, or Kubernetes would refuse it."""
        load(self, options)
        self.pool = pool
        self.cloud_image = ContainerImage(self.options["python-path"], self.options["shell-type"])
        for name in LIMITS:
            request = self.options[name] or pool.defaults[f"default-label-{name}"] or None
            limit = (
                self.options[f"{name}-limit"]
                or pool.defaults[f"default-label-{name}-limit"]
                or request
            )
            setattr(self, name, request)
            setattr(self, f"{name}_limit", limit)
        self.gpu: float | None = self.options["gpu"]
        self.gpu_resource: str | None = self.options["gpu-resource"]
        extra = (
            pool.defaults["default-label-extra-resources"]
            or pool.defaults["default-label-extra_resources"]
        )
        self.extra_resources: dict[str, Any] = {**extra, **self.options["extra-resources"]}
        if self.is_pod and (trouble := names.name_trouble(self.name, self.longest_name)):
            raise ConfigError(f"name of label: {trouble}", where=("name",))
        if trouble := names.value_trouble(self.name):
            raise ConfigError(f"name of label: {trouble}", where=("name",))
        if trouble := names.labels_trouble(self.labels, self.dynamic_labels):
            raise ConfigError(f"label {self.name}: labels: {trouble}", where=("labels",))
        if (self.gpu is None) != (self.gpu_resource is None):
            raise ConfigError(
                f"label {self.name}: gpu and gpu-resource are needed together", where=("gpu",)
            )

    @property
    def is_pod(self) -> bool:
        return self.type != "namespace"


class KubernetesPool(ConfigPool):
    ignore_equality = ["provider"]
    provider: KubernetesProviderConfig
    #: Whether the node's id is appended to the pool's name.
    prefix = True
    name: str = option(
        str, REQUIRED, "part of the names of namespaces, of records and metrics", convert=str
    )
    labels: dict[str, KubernetesLabel] = option(
        Each("label_class"), {}, "labels that the pool offers", key=v.Required
    )
    max_servers: float = changed(ConfigPool.max_servers, default=PROVIDER)
    max_cores: float = option(int, PROVIDER, "maximum number of cores requested")
    max_ram: float = option(int, PROVIDER, "maximum MiB requested")
    max_resources: dict[str, float] = option(
        {str: int},
        {},
        "maximum of resources, by name, added to the provider's; ``instances``, ``cores`` and "
        "``ram`` have precedence over the"
        " other options",
        shown="the provider's",
    )
    defaults: dict[str, Any] = option(
        {
            **{
                f"default-label-{name}": option(int, None, f"default of ``{name}`` of labels")
                for name in LIMITS
            },
            **{
                f"default-label-{name}-limit": option(
                    int, None, f"default of ``{name}-limit`` of labels"
                )
                for name in LIMITS
            },
            "default-label-extra-resources": option(
                {str: int}, {}, "default of ``extra-resources`` of labels"
            ),
            "default-label-extra_resources": option({str: int}, {}, "11.0.0's name of the same"),
        },
        {},
        "",
        flat=True,
    )

    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: object) -> None:
        full_config, self.provider = args
        super().load(pool_config)
        self.max_resources = {**self.provider.max_resources, **self.max_resources}
        self.max_servers = self.max_resources.get("instances", self.max_servers)
        self.max_cores = self.max_resources.get("cores", self.max_cores)
        self.max_ram = self.max_resources.get("ram", self.max_ram)
        trouble = names.name_trouble(
            self.name, names.LONGEST_NAME - (names.ID_LENGTH if self.prefix else 0)
        )
        if trouble:
            raise ConfigError(f"name of pool: {trouble}", where=("name",))
        for where, options in entries(pool_config.get("labels"), "labels"):
            with at(where):
                label = self.provider.label_class(options, self)
            self.labels[label.name] = label
            full_config.labels[label.name].pools.append(self)


class KubernetesProviderConfig(ProviderConfig):
    ignore_equality = ["driver_object"]
    label_class: ClassVar[type[KubernetesLabel]] = KubernetesLabel
    pool_class: ClassVar[type[KubernetesPool]] = KubernetesPool
    #: Names of the limit of nodes in order of precedence.
    SERVERS: ClassVar[tuple[str, ...]] = ("max-servers",)
    launch_timeout = LAUNCH_TIMEOUT
    launch_retries: int = option(
        int, 3, "attempts in total", convert=lambda attempts: max(1, int(attempts))
    )
    context: str | None = option(
        str, None, "context of the kubeconfig", shown="the current one, or the account of the pod"
    )
    max_servers: float = option(int, math.inf, "default of the pools")
    max_cores: float = option(int, math.inf, "default of the pools")
    max_ram: float = option(int, math.inf, "default of the pools")
    max_resources: dict[str, float] = option({str: int}, {}, "default of the pools")
    namespace_labels: dict[str, str] = option(
        dict, {}, "*new*: labels of each created namespace", convert=texts
    )
    namespace_annotations: dict[str, str] = option(
        dict, {}, "*new*: annotations of each created namespace", convert=texts
    )
    network_policies: list[dict[str, Any]] = option(
        [dict], [], "*new*: created in each namespace: policies, or their ``spec``"
    )
    limit_range: list[dict[str, Any]] = option(
        [dict], [], "*new*: created in each namespace: limit ranges, or their ``spec``"
    )
    pull: dict[str, Any] = option(
        {
            "namespace": option(str, None, "namespace of the daemon set", key=v.Required),
            "node-selector": option(dict, None, "machines to pull on", shown="all"),
        },
        {},
        "*new*: pull images of labels with ``min-ready`` to the machines in advance",
        name="pre-pull",
    )
    _pools: dict[str, Any] = option(
        Each("pool_class"), {}, "groups of labels", name="pools", key=v.Required
    )

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(provider)
        self.driver_object = driver
        self.pulled_labels: set[str] = set()

    def load(self, newconfig: Config) -> None:
        options = self.provider
        load(self, options)
        self.max_servers = next(
            (options[name] for name in self.SERVERS if options.get(name) is not None), math.inf
        )
        if trouble := names.value_trouble(self.name):
            raise ConfigError(f"name of provider: {trouble}", where=("name",))
        if trouble := names.labels_trouble(self.namespace_labels):
            raise ConfigError(f"namespace-labels: {trouble}", where=("namespace-labels",))
        for where, entry in entries(options.get("pools"), "pools"):
            pool = self.pool_class()
            with at(where):
                pool.load(entry, newconfig, self)
            self._pools[pool.name] = pool
        self.pulled_labels = {
            name for name in self.getSupportedLabels() if newconfig.labels[name].min_ready > 0
        }

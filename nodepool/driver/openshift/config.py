"""Options of an OpenShift provider (OSH-4): those of Kubernetes with other limit names."""

from __future__ import annotations

from typing import Any, ClassVar

import voluptuous as v

from nodepool.config.errors import ConfigError
from nodepool.config.model import Config
from nodepool.driver.kubernetes import schema
from nodepool.driver.kubernetes.config import KubernetesLabel, KubernetesPool, KubernetesProviderConfig


class OpenshiftLabel(KubernetesLabel):
    @property
    def is_pod(self) -> bool:
        return self.type == "pod"


class OpenshiftPool(KubernetesPool):
    label_class = OpenshiftLabel


class OpenshiftProviderConfig(KubernetesProviderConfig):
    pool_class: ClassVar[type[KubernetesPool]] = OpenshiftPool
    SERVERS: ClassVar[tuple[str, ...]] = ("max-projects", "max-servers")

    def load(self, newconfig: Config) -> None:
        if not self.provider.get("context"):
            raise ConfigError("required key 'context' is missing: the context of the kubeconfig", where=("context",))
        super().load(newconfig)

    def getSchema(self) -> v.Schema:
        label = schema.label({v.Required("type"): str})
        more: dict[Any, Any] = {v.Required("context"): str, **dict.fromkeys(self.SERVERS, int)}
        return schema.provider(schema.pool(label), more)

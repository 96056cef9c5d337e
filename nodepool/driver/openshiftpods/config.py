"""Options of a provider of pods in existing projects (OSH-4)."""

from __future__ import annotations

from typing import Any

import voluptuous as v

from nodepool.config.errors import ConfigError, PathItem
from nodepool.driver.kubernetes import schema
from nodepool.driver.kubernetes.config import KubernetesLabel, KubernetesPool
from nodepool.driver.openshift.config import OpenshiftProviderConfig


class OpenshiftPodLabel(KubernetesLabel):
    """A label whose nodes are always pods."""


class OpenshiftPodsPool(KubernetesPool):
    """A pool, whose name is that of the project."""

    label_class = OpenshiftPodLabel
    prefix = False

    def _check(self, label: KubernetesLabel, options: dict[str, Any], where: tuple[PathItem, ...]) -> None:
        super()._check(label, options, where)
        if label.spec is None and not options.get("image"):
            raise ConfigError(f"label {label.name} needs an image, or a spec", where=(*where, "image"))

    def _name_trouble(self, name: str) -> str | None:
        return schema.name_trouble(name, schema.LONGEST_NAME - schema.ID_LENGTH)


class OpenshiftPodsProviderConfig(OpenshiftProviderConfig):
    pool_class = OpenshiftPodsPool
    SERVERS = ("max-pods", "max-projects", "max-servers")

    def getSchema(self) -> v.Schema:
        more: dict[Any, Any] = {v.Required("context"): str, **dict.fromkeys(self.SERVERS, int)}
        return schema.provider(schema.pool(schema.label({})), more)

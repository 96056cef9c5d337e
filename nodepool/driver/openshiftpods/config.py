"""Options of a provider of pods in existing projects (OSH-4)."""

from __future__ import annotations

from typing import Any

from nodepool.base.option import changed, option
from nodepool.driver.kubernetes import names
from nodepool.driver.kubernetes.config import KubernetesLabel, KubernetesPool
from nodepool.driver.openshift.config import OpenshiftProviderConfig
from nodepool.exceptions import ConfigError


class OpenshiftPodLabel(KubernetesLabel):
    """A label whose nodes are always pods."""

    longest_name = names.LONGEST_NAME - names.ID_LENGTH
    type = changed(KubernetesLabel.type, hidden=True)

    def __init__(self, options: dict[str, Any], pool: KubernetesPool) -> None:
        super().__init__(options, pool)
        if self.spec is None and not self.options["image"]:
            raise ConfigError(f"label {self.name} needs an image, or a spec", where=("image",))


class OpenshiftPodsPool(KubernetesPool):
    prefix = False
    name = changed(KubernetesPool.name, doc="name of the project, part of records and metrics")


class OpenshiftPodsProviderConfig(OpenshiftProviderConfig):
    label_class = OpenshiftPodLabel
    pool_class = OpenshiftPodsPool
    SERVERS = ("max-pods", "max-projects", "max-servers")
    max_pods: float | None = option(
        int, None, "default of ``max-servers`` of the pools", stored=False
    )

"""Options of an OpenShift provider (OSH-4): those of Kubernetes with other limit names."""

from __future__ import annotations

from typing import ClassVar

import voluptuous as v

from nodepool.base.option import changed, option
from nodepool.config.model import Config
from nodepool.driver.kubernetes.config import KubernetesLabel, KubernetesProviderConfig
from nodepool.exceptions import ConfigError


class OpenshiftLabel(KubernetesLabel):
    type = changed(
        KubernetesLabel.type, doc="``pod``: a project with a pod; any other value: a project"
    )

    @property
    def is_pod(self) -> bool:
        return self.type == "pod"


class OpenshiftProviderConfig(KubernetesProviderConfig):
    label_class: ClassVar[type[KubernetesLabel]] = OpenshiftLabel
    SERVERS: ClassVar[tuple[str, ...]] = ("max-projects", "max-servers")
    context = changed(KubernetesProviderConfig.context, key=v.Required, shown=None)
    # Options of created namespaces, which are not for projects.
    namespace_labels = changed(KubernetesProviderConfig.namespace_labels, hidden=True)
    namespace_annotations = changed(KubernetesProviderConfig.namespace_annotations, hidden=True)
    network_policies = changed(KubernetesProviderConfig.network_policies, hidden=True)
    limit_range = changed(KubernetesProviderConfig.limit_range, hidden=True)
    pull = changed(KubernetesProviderConfig.pull, hidden=True)
    max_projects: float | None = option(
        int, None, "default of ``max-servers`` of the pools", stored=False
    )

    def load(self, newconfig: Config) -> None:
        if not self.provider.get("context"):
            raise ConfigError(
                "required key 'context' is missing: the context of the kubeconfig",
                where=("context",),
            )
        super().load(newconfig)

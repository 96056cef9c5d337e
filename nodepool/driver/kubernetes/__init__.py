"""Driver for Kubernetes: namespaces and pods (KUB). ``kubernetes`` is imported on demand."""

from __future__ import annotations

from typing import Any

from nodepool.driver import statemachine
from nodepool.driver.kubernetes.config import KubernetesProviderConfig


class KubernetesDriver(statemachine.StateMachineDriver):
    name = "kubernetes"

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        return KubernetesProviderConfig(self, provider)

    def getAdapter(self, provider_config: KubernetesProviderConfig) -> Any:
        from nodepool.driver.kubernetes.adapter import KubernetesAdapter

        return KubernetesAdapter(provider_config)

    def getProvider(self, provider_config: KubernetesProviderConfig) -> Any:
        from nodepool.driver.kubernetes.provider import KubernetesProvider

        return KubernetesProvider(self.getAdapter(provider_config), provider_config)

"""Driver for Kubernetes: namespaces and pods as nodes (KUB). The package ``kubernetes`` is imported when a provider uses it."""

from __future__ import annotations

from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver import statemachine


class KubernetesDriver(statemachine.StateMachineDriver):
    name = "kubernetes"

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        from nodepool.driver.kubernetes.config import KubernetesProviderConfig

        return KubernetesProviderConfig(self, provider)

    def getAdapter(self, provider_config: ProviderConfig) -> Any:
        from nodepool.driver.kubernetes import provider

        return provider.make_adapter(provider_config)

    def getProvider(self, provider_config: ProviderConfig) -> Any:
        from nodepool.driver.kubernetes.provider import KubernetesProvider

        return KubernetesProvider(self.getAdapter(provider_config), provider_config)

"""Driver for OpenShift: projects, and pods in their own projects, as nodes (OSH)."""

from __future__ import annotations

from typing import Any

from nodepool.driver import statemachine
from nodepool.driver.openshift.config import OpenshiftProviderConfig


class OpenshiftDriver(statemachine.StateMachineDriver):
    name = "openshift"

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        return OpenshiftProviderConfig(self, provider)

    def getAdapter(self, provider_config: OpenshiftProviderConfig) -> Any:
        from nodepool.driver.openshift.adapter import OpenshiftAdapter

        return OpenshiftAdapter(provider_config)

    def getProvider(self, provider_config: OpenshiftProviderConfig) -> Any:
        from nodepool.driver.kubernetes.provider import KubernetesProvider

        return KubernetesProvider(self.getAdapter(provider_config), provider_config)

"""Driver for pods in existing projects of OpenShift, with the launcher's own rights (OSH)."""

from __future__ import annotations

from typing import Any

from nodepool.driver import statemachine
from nodepool.driver.openshiftpods.config import OpenshiftPodsProviderConfig


class OpenshiftPodsDriver(statemachine.StateMachineDriver):
    name = "openshiftpods"

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        return OpenshiftPodsProviderConfig(self, provider)

    def getAdapter(self, provider_config: OpenshiftPodsProviderConfig) -> Any:
        from nodepool.driver.openshiftpods.adapter import OpenshiftPodsAdapter

        return OpenshiftPodsAdapter(provider_config)

    def getProvider(self, provider_config: OpenshiftPodsProviderConfig) -> Any:
        from nodepool.driver.openshiftpods.provider import OpenshiftPodsProvider

        return OpenshiftPodsProvider(self.getAdapter(provider_config), provider_config)

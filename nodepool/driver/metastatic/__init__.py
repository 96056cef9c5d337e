"""Slots on nodes of other drivers (MST)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nodepool.config.model import ProviderConfig
from nodepool.driver.metastatic.config import MetastaticProviderConfig
from nodepool.driver.statemachine import StateMachineDriver

if TYPE_CHECKING:
    from nodepool.driver.metastatic.adapter import MetastaticAdapter


class MetastaticDriver(StateMachineDriver):
    name = "metastatic"

    def getProviderConfig(self, provider: dict[str, Any]) -> MetastaticProviderConfig:
        return MetastaticProviderConfig(self, provider)

    def getAdapter(self, provider_config: ProviderConfig) -> MetastaticAdapter:
        # Validating a configuration does not need ZooKeeper.
        from nodepool.driver.metastatic.adapter import MetastaticAdapter

        return MetastaticAdapter(provider_config)

    def getProvider(self, provider_config: ProviderConfig) -> Any:
        from nodepool.driver.statemachine import StateMachineProvider

        adapter = self.getAdapter(provider_config)
        provider = StateMachineProvider(adapter, provider_config)
        # The adapter is a user of Nodepool itself: it needs the provider's connection to ZooKeeper.
        adapter._setProvider(provider)
        return provider

"""Slots on nodes of other drivers (MST)."""

from __future__ import annotations

from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver.statemachine.driver import NamedClassesDriver


class MetastaticDriver(NamedClassesDriver):
    name = "metastatic"
    config_class = "nodepool.driver.metastatic.config:MetastaticProviderConfig"
    adapter_class = "nodepool.driver.metastatic.adapter:MetastaticAdapter"

    def getProvider(self, provider_config: ProviderConfig) -> Any:
        provider = super().getProvider(provider_config)
        # The adapter is a user of Nodepool itself: it needs the provider's connection to ZooKeeper.
        provider.adapter._setProvider(provider)
        return provider

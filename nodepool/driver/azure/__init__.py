"""Driver for Microsoft Azure, by its REST API."""

from __future__ import annotations

from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver import statemachine


class AzureDriver(statemachine.StateMachineDriver):
    name = "azure"

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        from nodepool.driver.azure import config

        return config.AzureProviderConfig(self, provider)

    def getAdapter(self, provider_config: ProviderConfig) -> Any:
        from nodepool.driver.azure import adapter

        return adapter.AzureAdapter(provider_config)

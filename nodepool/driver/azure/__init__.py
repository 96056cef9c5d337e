"""Driver for Microsoft Azure, by its REST API."""

from __future__ import annotations

from typing import Any

from nodepool.driver import statemachine
from nodepool.driver.azure.config import AzureProviderConfig


class AzureDriver(statemachine.StateMachineDriver):
    name = "azure"

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        from nodepool.driver.azure import config

        return config.AzureProviderConfig(self, provider)

    def getAdapter(self, provider_config: AzureProviderConfig) -> Any:
        from nodepool.driver.azure import adapter

        return adapter.AzureAdapter(provider_config)

"""Driver for Google Compute Engine. Google's libraries are imported on demand."""

from __future__ import annotations

from typing import Any

from nodepool.driver import statemachine
from nodepool.driver.gce.config import GceProviderConfig


class GceDriver(statemachine.StateMachineDriver):
    name = "gce"

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        from nodepool.driver.gce import config

        return config.GceProviderConfig(self, provider)

    def getAdapter(self, provider_config: GceProviderConfig) -> Any:
        from nodepool.driver.gce import adapter

        return adapter.GceAdapter(provider_config)

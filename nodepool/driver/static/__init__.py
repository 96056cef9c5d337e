"""Driver for existing machines (STA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nodepool.driver import Driver
from nodepool.driver.static.config import StaticProviderConfig

if TYPE_CHECKING:
    from nodepool.driver.static.provider import StaticNodeProvider


class StaticDriver(Driver):
    name = "static"

    def getProviderConfig(self, provider: dict[str, Any]) -> StaticProviderConfig:
        return StaticProviderConfig(provider)

    def getProvider(self, provider_config: StaticProviderConfig) -> StaticNodeProvider:
        # Validating a configuration does not need ZooKeeper.
        from nodepool.driver.static.provider import StaticNodeProvider

        return StaticNodeProvider(provider_config)

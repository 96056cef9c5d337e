"""The smallest driver: nodes are ready immediately (FAK-2)."""

from __future__ import annotations

from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver import Driver
from nodepool.driver.test.config import TestConfig


class TestDriver(Driver):
    __test__ = False
    name = "test"

    def getProviderConfig(self, provider: dict[str, Any]) -> TestConfig:
        return TestConfig(provider)

    def getProvider(self, provider_config: ProviderConfig) -> Any:
        from nodepool.driver.test.provider import TestProvider

        return TestProvider(provider_config)

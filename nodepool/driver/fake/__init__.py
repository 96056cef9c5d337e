"""The OpenStack driver over a cloud in memory (FAK-1)."""

from __future__ import annotations

from typing import Any

from nodepool.driver.fake.clouds import FakeClouds, config_files
from nodepool.driver.fake.config import FakeProviderConfig
from nodepool.driver.openstack import OpenStackDriver
from nodepool.driver.openstack.config import OpenStackProviderConfig


class FakeDriver(OpenStackDriver):
    name = "fake"

    def _readClouds(self) -> FakeClouds:
        return FakeClouds()

    def _cloudFiles(self) -> list[str]:
        return config_files()

    def getProviderConfig(self, provider: dict[str, Any]) -> FakeProviderConfig:
        return FakeProviderConfig(self, provider)

    def getAdapter(self, provider_config: OpenStackProviderConfig) -> Any:
        from nodepool.driver.fake.adapter import FakeAdapter

        return FakeAdapter(provider_config)

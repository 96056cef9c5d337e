"""The OpenStack driver over a cloud in memory (FAK-1)."""

from __future__ import annotations

from nodepool.driver.fake.clouds import FakeClouds, config_files
from nodepool.driver.openstack import OpenStackDriver


class FakeDriver(OpenStackDriver):
    name = "fake"
    config_class = "nodepool.driver.fake.config:FakeProviderConfig"
    adapter_class = "nodepool.driver.fake.adapter:FakeAdapter"

    def _readClouds(self) -> FakeClouds:
        return FakeClouds()

    def _cloudFiles(self) -> list[str]:
        return config_files()

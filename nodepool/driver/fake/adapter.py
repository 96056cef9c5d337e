"""Adapter of the fake driver; tests change its settings at runtime (FAK-1.1)."""

from __future__ import annotations

from typing import Any

from nodepool.driver.fake.api import FakeApi
from nodepool.driver.fake.cloud import (
    FakeDeleteImageFailCloud,
    FakeLaunchAndDeleteFailCloud,
    FakeLaunchAndGetFaultCloud,
    FakeOpenStackCloud,
    FakeUploadFailCloud,
    _creation_error,
)
from nodepool.driver.fake.objects import Dummy
from nodepool.driver.openstack.adapter import OpenStackAdapter
from nodepool.driver.openstack.config import OpenStackProviderConfig

__all__ = [
    "Dummy",
    "FakeAdapter",
    "FakeDeleteImageFailCloud",
    "FakeLaunchAndDeleteFailCloud",
    "FakeLaunchAndGetFaultCloud",
    "FakeOpenStackCloud",
    "FakeUploadFailCloud",
]


class FakeAdapter(OpenStackAdapter):
    fake_cloud: Any = FakeOpenStackCloud
    # A query costs almost nothing here, and tests expect their changes to be visible immediately.
    LISTING_TTL = 0.0
    LOOKS = (0.02, 0.2)
    SETTLING = 0.0

    def __init__(self, provider_config: OpenStackProviderConfig) -> None:
        self.createServer_fails = 0
        self.createServer_fails_with_external_id = 0
        self._fake = type(self).fake_cloud()
        self._made: set[str] = set()
        super().__init__(provider_config)

    def _getClient(self) -> Any:
        return self._fake

    def _getApi(self) -> FakeApi:
        return FakeApi(self._client)

    def _createServer(self, *args: Any, **kwargs: Any) -> Any:
        if self.createServer_fails > 0:
            self.createServer_fails -= 1
            raise Exception("Expected createServer exception")
        if self.createServer_fails_with_external_id > 0:
            self.createServer_fails_with_external_id -= 1
            raise _creation_error("fakeid")
        server = super()._createServer(*args, **kwargs)
        self._made.add(server["id"])
        return server

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """Check only servers created here: the fake cloud is this process's own.

        Other launchers share the records, but not the servers.
        """
        return super().findMissingInstances(
            [external_id for external_id in external_ids if external_id in self._made]
        )

"""Options of a fake provider: those of OpenStack."""

from __future__ import annotations

from typing import Any

from nodepool.driver.openstack.config import OpenStackProviderConfig


class FakeProviderConfig(OpenStackProviderConfig):
    def _cloudKwargs(self) -> dict[str, Any]:
        # The entry in clouds.yaml needs no credentials.
        return {**super()._cloudKwargs(), "validate": False}

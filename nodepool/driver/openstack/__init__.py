"""Driver for OpenStack clouds (driver-openstack.md). The SDK is imported when the first real cloud is used."""

from __future__ import annotations

import threading
from typing import Any

from nodepool.driver import statemachine
from nodepool.driver.openstack.config import OpenStackProviderConfig


class OpenStackDriver(statemachine.StateMachineDriver):
    """``openstack_config`` is the SDK's view of clouds.yaml, read again after every reset."""

    name = "openstack"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._openstack_config: Any = None

    @property
    def openstack_config(self) -> Any:
        with self._lock:
            if self._openstack_config is None:
                self._openstack_config = self._readClouds()
            return self._openstack_config

    @openstack_config.setter
    def openstack_config(self, value: Any) -> None:
        with self._lock:
            self._openstack_config = value

    def _readClouds(self) -> Any:
        from openstack.config import loader

        return loader.OpenStackConfig()

    def reset(self) -> None:
        self.openstack_config = None

    def getProviderConfig(self, provider: dict[str, Any]) -> OpenStackProviderConfig:
        return OpenStackProviderConfig(self, provider)

    def getAdapter(self, provider_config: Any) -> Any:
        from nodepool.driver.openstack.adapter import OpenStackAdapter

        return OpenStackAdapter(provider_config)

"""Driver for OpenStack (OST). The SDK is imported when the first real cloud is used."""

from __future__ import annotations

import os
import threading
from typing import Any

from nodepool.base.files import FileIdentity, file_identity
from nodepool.driver.statemachine.driver import NamedClassesDriver


class OpenStackDriver(NamedClassesDriver):
    """``openstack_config`` is the SDK's view of clouds.yaml, read again after every reset."""

    name = "openstack"
    config_class = "nodepool.driver.openstack.config:OpenStackProviderConfig"
    adapter_class = "nodepool.driver.openstack.adapter:OpenStackAdapter"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._openstack_config: object = None
        self._files: dict[str, FileIdentity | None] = {}

    @property
    def openstack_config(self) -> Any:
        with self._lock:
            if self._openstack_config is None:
                self._files = {path: file_identity(path) for path in self._cloudFiles()}
                self._openstack_config = self._readClouds()
            return self._openstack_config

    @openstack_config.setter
    def openstack_config(self, value: object) -> None:
        with self._lock:
            self._openstack_config = value

    def _readClouds(self) -> Any:
        from openstack.config import loader

        return loader.OpenStackConfig()

    def _cloudFiles(self) -> list[str]:
        """Return the possible paths of clouds.yaml and its secure parts."""
        from openstack.config import loader

        named = [
            os.environ[name]
            for name in ("OS_CLIENT_CONFIG_FILE", "OS_CLIENT_SECURE_FILE")
            if os.environ.get(name)
        ]
        return [*named, *loader.CONFIG_FILES, *loader.SECURE_FILES]

    def configFiles(self) -> dict[str, FileIdentity | None]:
        with self._lock:
            return dict(self._files)

    def reset(self) -> None:
        with self._lock:
            self._openstack_config = None
            self._files = {}

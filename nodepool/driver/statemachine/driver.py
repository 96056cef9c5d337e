"""Base classes of drivers with an adapter (DRV-7.1)."""

from __future__ import annotations

import pkgutil
from abc import abstractmethod
from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver.provider import Driver
from nodepool.driver.statemachine.model import Adapter


class StateMachineDriver(Driver):
    """Entry point for drivers which implement an :class:`Adapter`."""

    #: ``module:class``. Imported late: the provider imports all launch code, which configuration
    #: checks do not need.
    provider_class = "nodepool.driver.statemachine.provider:StateMachineProvider"

    def getProvider(self, provider_config: Any) -> Any:
        provider = pkgutil.resolve_name(self.provider_class)
        return provider(self.getAdapter(provider_config), provider_config)

    @abstractmethod
    def getProviderConfig(self, provider: dict[str, Any]) -> ProviderConfig:
        """Parse the provider section of the configuration."""

    @abstractmethod
    def getAdapter(self, provider_config: Any) -> Adapter:
        """Return a new adapter for this provider; replaced when its configuration changes."""


class NamedClassesDriver(StateMachineDriver):
    """A driver that names its classes as ``module:class``.

    They are imported when a provider uses them, because of the clouds' libraries, and looked up at
    each call, because tests replace them.
    """

    config_class: str
    adapter_class: str

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        return pkgutil.resolve_name(self.config_class)(self, provider)

    def getAdapter(self, provider_config: Any) -> Any:
        return pkgutil.resolve_name(self.adapter_class)(provider_config)

"""Base class of drivers with an adapter (DRV-7.1)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from nodepool.config.model import ProviderConfig
from nodepool.driver.provider import Driver
from nodepool.driver.statemachine.model import Adapter

if TYPE_CHECKING:
    from nodepool.driver.statemachine.provider import StateMachineProvider


class StateMachineDriver(Driver):
    """Entry point for drivers which implement an :class:`Adapter`."""

    def getProvider(self, provider_config: Any) -> StateMachineProvider:
        # Imported late: the provider imports all launch code, which configuration checks do not
        # need.
        from nodepool.driver.statemachine.provider import StateMachineProvider

        return StateMachineProvider(self.getAdapter(provider_config), provider_config)

    @abstractmethod
    def getProviderConfig(self, provider: dict[str, Any]) -> ProviderConfig:
        """Parse the provider section of the configuration."""

    @abstractmethod
    def getAdapter(self, provider_config: Any) -> Adapter:
        """Return a new adapter for this provider; replaced when its configuration changes."""

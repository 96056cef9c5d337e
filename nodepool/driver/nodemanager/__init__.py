"""Slivers of node managers as nodes (NM-C.8)."""

from __future__ import annotations

from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver import statemachine
from nodepool.driver.nodemanager.config import NodeManagerProviderConfig


class NodeManagerDriver(statemachine.StateMachineDriver):
    name = "nodemanager"

    def getProviderConfig(self, provider: dict[str, Any]) -> NodeManagerProviderConfig:
        return NodeManagerProviderConfig(self, provider)

    def getAdapter(self, provider_config: Any) -> Any:
        from nodepool.driver.nodemanager.adapter import NodeManagerAdapter

        if provider_config.backing is not None:
            from nodepool.driver.nodemanager.pushed.adapter import BackedAdapter

            return BackedAdapter(provider_config)
        return NodeManagerAdapter(provider_config)

    def getProvider(self, provider_config: ProviderConfig) -> Any:
        from nodepool.driver.nodemanager.provider import NodeManagerProvider

        return NodeManagerProvider(self.getAdapter(provider_config), provider_config)

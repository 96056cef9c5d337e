"""Slivers of node managers as nodes (NM-C.8)."""

from __future__ import annotations

from typing import Any

from nodepool.driver.statemachine.driver import NamedClassesDriver


class NodeManagerDriver(NamedClassesDriver):
    name = "nodemanager"
    config_class = "nodepool.driver.nodemanager.config:NodeManagerProviderConfig"
    adapter_class = "nodepool.driver.nodemanager.adapter:NodeManagerAdapter"
    provider_class = "nodepool.driver.nodemanager.provider:NodeManagerProvider"

    def getAdapter(self, provider_config: Any) -> Any:
        if provider_config.backing is None:
            return super().getAdapter(provider_config)
        from nodepool.driver.nodemanager.pushed.adapter import BackedAdapter

        return BackedAdapter(provider_config)

"""Driver for IBM Cloud VPC. IBM's libraries are imported when the first provider is used."""

from __future__ import annotations

from typing import Any

from nodepool.driver import statemachine
from nodepool.driver.ibmvpc.config import IBMVPCProviderConfig


class IBMVPCDriver(statemachine.StateMachineDriver):
    name = "ibmvpc"

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        from nodepool.driver.ibmvpc import config

        return config.IBMVPCProviderConfig(self, provider)

    def getAdapter(self, provider_config: IBMVPCProviderConfig) -> Any:
        from nodepool.driver.ibmvpc import adapter

        return adapter.IBMVPCAdapter(provider_config)

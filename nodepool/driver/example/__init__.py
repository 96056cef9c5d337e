"""Template for authors of state machine drivers (FAK-3). Copy it and fill it in.

The directory name is the driver's name; exactly one Driver class is defined in this file.
"""

from __future__ import annotations

from typing import Any

from nodepool.driver import statemachine
from nodepool.driver.example.config import ExampleProviderConfig


class ExampleDriver(statemachine.StateMachineDriver):
    name = "example"

    def getProviderConfig(self, provider: dict[str, Any]) -> ExampleProviderConfig:
        return ExampleProviderConfig(self, provider)

    def getAdapter(self, provider_config: ExampleProviderConfig) -> Any:
        # Imported here, so that the cloud's library is loaded only when a provider uses it.
        from nodepool.driver.example.adapter import ExampleAdapter

        return ExampleAdapter(provider_config)

"""Driver for Amazon EC2 (driver-aws.md). boto3 is imported when the first provider is used."""

from __future__ import annotations

from typing import Any

from nodepool.driver import statemachine


class AwsDriver(statemachine.StateMachineDriver):
    """Configuration and adapter classes are looked up in their modules at each call, where tests replace them."""

    name = "aws"

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        from nodepool.driver.aws import config

        return config.AwsProviderConfig(self, provider)

    def getAdapter(self, provider_config: Any) -> Any:
        from nodepool.driver.aws import adapter

        return adapter.AwsAdapter(provider_config)

"""Driver for Amazon EC2 (AWS). boto3 is imported when the first provider is used."""

from __future__ import annotations

import os
from typing import Any

from nodepool.base.files import FileIdentity, file_identity
from nodepool.driver import statemachine
from nodepool.driver.aws.config import AwsProviderConfig


class AwsDriver(statemachine.StateMachineDriver):
    """Driver for AWS. Classes are looked up at each call, because tests replace them."""

    name = "aws"
    _used = False

    def reset(self) -> None:
        self._used = False

    def configFiles(self) -> dict[str, FileIdentity | None]:
        """Return the files with profiles: they are rechecked if a provider's profile was
        missing.
        """
        if not self._used:
            return {}
        files = (
            os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
            os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        )
        return {path: file_identity(path) for path in map(os.path.expanduser, files)}

    def getProviderConfig(self, provider: dict[str, Any]) -> Any:
        from nodepool.driver.aws import config

        self._used = True
        return config.AwsProviderConfig(self, provider)

    def getAdapter(self, provider_config: AwsProviderConfig) -> Any:
        from nodepool.driver.aws import adapter

        return adapter.AwsAdapter(provider_config)

"""Driver for Amazon EC2 (AWS). boto3 is imported when the first provider is used."""

from __future__ import annotations

import os
from typing import Any

from nodepool.base.files import FileIdentity, file_identity
from nodepool.driver.statemachine.driver import NamedClassesDriver


class AwsDriver(NamedClassesDriver):
    name = "aws"
    config_class = "nodepool.driver.aws.config:AwsProviderConfig"
    adapter_class = "nodepool.driver.aws.adapter:AwsAdapter"
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
        self._used = True
        return super().getProviderConfig(provider)

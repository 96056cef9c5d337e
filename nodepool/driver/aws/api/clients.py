"""Sessions and clients of boto3, which only this module imports."""

from __future__ import annotations

import threading
from typing import Any

from nodepool.driver.aws.config import AwsProviderConfig
from nodepool.exceptions import ConfigurationError

CONNECT_TIMEOUT = 10.0
READ_TIMEOUT = 60.0
CONNECTIONS = 40

_lock = threading.Lock()
_loader: object = None


def make(provider: AwsProviderConfig, read_timeout: float) -> tuple[Any, Any, Any, Any, Any]:
    """Return EC2, S3 (resource and client), service quotas and EBS, for region and profile.

    AWS's usual settings apply.

    :raises ConfigurationError: the profile does not exist.
    """
    import boto3
    import botocore.exceptions
    import botocore.loaders
    import botocore.session
    from botocore.config import Config

    global _loader
    # Our own wrapper retries calls, within deadlines and rate limits; it could not see retries
    # below.
    plain = Config(
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=read_timeout,
        max_pool_connections=CONNECTIONS,
        retries={"total_max_attempts": 1, "mode": "standard"},
        user_agent_extra="nodepool",
    )
    # The library's own threads send the parts of a large upload: only the library can retry one of
    # them.
    uploads = plain.merge(Config(retries={"total_max_attempts": 5, "mode": "standard"}))
    with _lock:
        try:
            core = botocore.session.Session(profile=provider.profile_name)
            if _loader is None:
                _loader = core.get_component("data_loader")
            else:
                # The descriptions of the APIs are large; one copy serves all providers.
                core.register_component("data_loader", _loader)
            session = boto3.Session(botocore_session=core, region_name=provider.region_name)
            return (
                session.client("ec2", config=plain),
                session.resource("s3", config=uploads),
                session.client("s3", config=plain),
                session.client("service-quotas", config=plain),
                session.client("ebs", config=plain),
            )
        except botocore.exceptions.ProfileNotFound as error:
            raise ConfigurationError(
                f"provider {provider.name}: profile-name {provider.profile_name} is in no AWS "
                "configuration file"
            ) from error

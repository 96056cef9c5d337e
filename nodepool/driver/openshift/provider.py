"""The provider, and the way to its cluster, which tests of others replace (OSH-11)."""

from __future__ import annotations

import logging
from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver.kubernetes import provider as kubernetes
from nodepool.driver.kubernetes.api.client import Cluster
from nodepool.driver.openshift.adapter import OpenshiftAdapter

log = logging.getLogger("nodepool.driver.openshift.provider")


def get_client(log: logging.Logger, context: str | None, constructor: object = None) -> tuple[str | None, str | None, Any, Any]:
    """As that of Kubernetes; the second client has OpenShift's own kinds. Raises NoAccess."""
    return kubernetes.get_client(log, context, constructor)


class OpenshiftProvider(kubernetes.KubernetesProvider):
    pass


def make_adapter(provider_config: ProviderConfig) -> OpenshiftAdapter:
    def connect() -> Cluster:
        _token, _ca, core, second = get_client(log, provider_config.context, None)  # type: ignore[attr-defined]
        return kubernetes.as_cluster(core, second)

    return OpenshiftAdapter(provider_config, connect)

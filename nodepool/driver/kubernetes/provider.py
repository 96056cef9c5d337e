"""The provider, and the way to its cluster, which tests of others replace (KUB-12)."""

from __future__ import annotations

import logging
from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver.kubernetes.adapter import KubernetesAdapter
from nodepool.driver.kubernetes.api.access import KubeconfigAccess
from nodepool.driver.kubernetes.api.client import Client, Cluster
from nodepool.driver.kubernetes.api.foreign import ForeignCluster
from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.driver.statemachine.provider import StateMachineProvider

log = logging.getLogger("nodepool.driver.kubernetes.provider")


def get_client(log: logging.Logger, context: str | None, constructor: object = None) -> tuple[str | None, str | None, Any, Any]:
    """Token and CA certificate of the kubeconfig, a client for the core API, and one for the rest. Makes no call.

    :raises NoAccess: the kubeconfig cannot be used.
    """
    access = KubeconfigAccess(context)
    client = Client(access, log)
    return access.token(), access.ca(), client, client


def as_cluster(core: Any, second: Any) -> Cluster:
    """What ``get_client`` has returned, with our calls."""
    return core if isinstance(core, Client) else ForeignCluster(core, second)


class KubernetesProvider(StateMachineProvider):
    def unmanagedQuotaUsed(self) -> QuotaInformation:
        """Limits are those of the configuration, which are for our nodes only (KUB-9)."""
        return QuotaInformation()


def make_adapter(provider_config: ProviderConfig) -> KubernetesAdapter:
    def connect() -> Cluster:
        _token, _ca, core, second = get_client(log, provider_config.context, None)  # type: ignore[attr-defined]
        return as_cluster(core, second)

    return KubernetesAdapter(provider_config, connect)

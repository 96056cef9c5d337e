"""The provider, and the connection to its cluster."""

from __future__ import annotations

import logging

from nodepool.driver.kubernetes.adapter import KubernetesAdapter
from nodepool.driver.kubernetes.api.access import KubeconfigAccess
from nodepool.driver.kubernetes.api.client import Client
from nodepool.driver.kubernetes.config import KubernetesProviderConfig
from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.driver.statemachine.provider import StateMachineProvider

log = logging.getLogger("nodepool.driver.kubernetes.provider")


def connect(provider_config: KubernetesProviderConfig) -> Client:
    """Return a client for the context of the kubeconfig, without calling the cluster.

    :raises NoAccess: the kubeconfig cannot be used.
    """
    return Client(KubeconfigAccess(provider_config.context), log)


class KubernetesProvider(StateMachineProvider):
    def unmanagedQuotaUsed(self) -> QuotaInformation:
        """Return no usage: the configured limits are for our nodes only (KUB-9)."""
        return QuotaInformation()


def make_adapter(provider_config: KubernetesProviderConfig) -> KubernetesAdapter:
    return KubernetesAdapter(provider_config, lambda: connect(provider_config))

"""The provider of projects."""

from __future__ import annotations

from nodepool.config.model import ProviderConfig
from nodepool.driver.kubernetes.provider import KubernetesProvider, connect
from nodepool.driver.openshift.adapter import OpenshiftAdapter


class OpenshiftProvider(KubernetesProvider):
    pass


def make_adapter(provider_config: ProviderConfig) -> OpenshiftAdapter:
    return OpenshiftAdapter(provider_config, lambda: connect(provider_config))

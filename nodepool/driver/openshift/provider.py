"""The provider of projects."""

from __future__ import annotations

from nodepool.driver.kubernetes.provider import KubernetesProvider, connect
from nodepool.driver.openshift.adapter import OpenshiftAdapter
from nodepool.driver.openshift.config import OpenshiftProviderConfig


class OpenshiftProvider(KubernetesProvider):
    pass


def make_adapter(provider_config: OpenshiftProviderConfig) -> OpenshiftAdapter:
    return OpenshiftAdapter(provider_config, lambda: connect(provider_config))

"""The provider of pods and the token for Zuul."""

from __future__ import annotations

from nodepool.driver.kubernetes import provider as kubernetes
from nodepool.driver.kubernetes.api.client import Client
from nodepool.driver.kubernetes.api.errors import NoAccess
from nodepool.driver.openshiftpods.adapter import OpenshiftPodsAdapter
from nodepool.driver.openshiftpods.config import OpenshiftPodsProviderConfig
from nodepool.driver.statemachine.deleter import StateMachineNodeDeleter
from nodepool.zk.records import Node


class OpenshiftPodsProvider(kubernetes.KubernetesProvider):
    adapter: OpenshiftPodsAdapter

    def startNodeCleanup(self, node: Node) -> StateMachineNodeDeleter:
        """Start the deletion of a pod, whose pool may no longer be configured."""
        if node.pool and node.external_id:
            self.adapter.pool_of[str(node.external_id)] = node.pool
        return super().startNodeCleanup(node)

    def nodeDeletedNotification(self, node: Node) -> None:
        super().nodeDeletedNotification(node)
        self.adapter.pool_of.pop(str(node.external_id), None)


def make_adapter(provider_config: OpenshiftPodsProviderConfig) -> OpenshiftPodsAdapter:
    def connect() -> Client:
        client = kubernetes.connect(provider_config)
        if client.access.token() is None:
            raise NoAccess(
                f"context {provider_config.context} of the kubeconfig has no token, and Zuul could not use its nodes; "
                "use a service account's token instead of client certificates"
            )
        return client

    return OpenshiftPodsAdapter(provider_config, connect)

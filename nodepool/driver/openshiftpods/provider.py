"""The provider of pods."""

from __future__ import annotations

from nodepool.driver.kubernetes.provider import KubernetesProvider
from nodepool.driver.openshiftpods.adapter import OpenshiftPodsAdapter
from nodepool.driver.statemachine.deleter import StateMachineNodeDeleter
from nodepool.zk.records import Node


class OpenshiftPodsProvider(KubernetesProvider):
    adapter: OpenshiftPodsAdapter

    def startNodeCleanup(self, node: Node) -> StateMachineNodeDeleter:
        """Start the deletion of a pod, whose pool may no longer be configured."""
        if node.pool and node.external_id:
            self.adapter.pool_of[str(node.external_id)] = node.pool
        return super().startNodeCleanup(node)

    def nodeDeletedNotification(self, node: Node) -> None:
        super().nodeDeletedNotification(node)
        self.adapter.pool_of.pop(str(node.external_id), None)

"""The provider, and the way to its cluster, which tests of others replace (OSH-11)."""

from __future__ import annotations

import logging
from typing import Any

from nodepool.config.model import ProviderConfig
from nodepool.driver.kubernetes import provider as kubernetes
from nodepool.driver.kubernetes.api.client import Cluster
from nodepool.driver.kubernetes.api.errors import NoAccess
from nodepool.driver.openshiftpods.adapter import OpenshiftPodsAdapter
from nodepool.driver.statemachine.deleter import StateMachineNodeDeleter
from nodepool.zk.records import Node

log = logging.getLogger("nodepool.driver.openshiftpods.provider")


def get_client(log: logging.Logger, context: str | None, constructor: object = None) -> tuple[str | None, str | None, Any, Any]:
    """As that of Kubernetes. Raises NoAccess."""
    return kubernetes.get_client(log, context, constructor)


class OpenshiftPodsProvider(kubernetes.KubernetesProvider):
    adapter: OpenshiftPodsAdapter

    def startNodeCleanup(self, node: Node) -> StateMachineNodeDeleter:
        """Pods are found by their pool, which may be configured no more."""
        if node.pool and node.external_id:
            self.adapter.pool_of[str(node.external_id)] = node.pool
        return super().startNodeCleanup(node)

    def nodeDeletedNotification(self, node: Node) -> None:
        super().nodeDeletedNotification(node)
        self.adapter.pool_of.pop(str(node.external_id), None)


def make_adapter(provider_config: ProviderConfig) -> OpenshiftPodsAdapter:
    given: list[tuple[str | None, str | None]] = []

    def connect() -> Cluster:
        context = provider_config.context  # type: ignore[attr-defined]
        token, ca, core, second = get_client(log, context, None)
        if token is None:
            raise NoAccess(
                f"context {context} of the kubeconfig has no token, and Zuul could not use its nodes; "
                "use a service account's token instead of client certificates"
            )
        given[:] = [(token, ca)]
        return kubernetes.as_cluster(core, second)

    adapter = OpenshiftPodsAdapter(provider_config, connect)
    if given:
        adapter.given = given[0]
    return adapter

"""Pods in existing projects, one per pool (OSH-6, OSH-7, OSH-9)."""

from __future__ import annotations

import contextlib
from typing import Any

from nodepool import exceptions
from nodepool.cloud.http import NoAccess
from nodepool.driver.kubernetes import bodies, trouble
from nodepool.driver.kubernetes.adapter import ContainerInstance, KubernetesAdapter, Leftover
from nodepool.driver.kubernetes.api.client import ClusterClient, Object
from nodepool.driver.kubernetes.api.errors import ApiError
from nodepool.driver.kubernetes.api.kinds import POD, Kind
from nodepool.driver.kubernetes.config import KubernetesLabel
from nodepool.driver.kubernetes.machines import Job, Target
from nodepool.driver.openshiftpods.config import OpenshiftPodsProviderConfig
from nodepool.driver.statemachine.model import Instance
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest


class OpenshiftPodsAdapter(KubernetesAdapter):
    def __init__(self, provider_config: OpenshiftPodsProviderConfig) -> None:
        #: Node's external id -> the pool in its record.
        self.pool_of: dict[str, str] = {}
        super().__init__(provider_config)

    def connect(self) -> ClusterClient:
        client = super().connect()
        if client.access.token() is None:
            raise NoAccess(
                f"context {self.provider.context} of the kubeconfig has no token, and Zuul could "
                "not use its nodes; "
                "use a service account's token instead of client certificates"
            )
        return client

    def plannedExternalId(self, label: KubernetesLabel, node_id: str) -> str:
        return f"{label.pool.name}-{label.name}-{node_id}"

    def _job(
        self, label: KubernetesLabel, metadata: dict[str, str], request: NodeRequest, log: Log
    ) -> Job:
        node_id = metadata[bodies.NODE_LABEL]
        labels = bodies.labels_of(label, metadata, request, log)
        external_id = self.plannedExternalId(label, node_id)
        self.pool_of[external_id] = label.pool.name
        return Job(
            external_id, label.pool.name, f"{label.name}-{node_id}", label, labels, log, token=None
        )

    def make(self, job: Job) -> None:
        try:
            self._make_pod(job, bodies.pod(str(job.pod), job.label, job.labels, pull_secrets=True))
        except ApiError as error:
            job.begun = error.status >= 500
            raise

    def instance(self, job: Job, secret: Object | None, pod: Object | None) -> Instance:
        access = self.cluster.access
        token = access.token()  # read it now: tokens are rotated
        if token is None:
            raise exceptions.LaunchNodepoolException(
                "the kubeconfig has no token (any more) that Zuul could use"
            )
        cluster = self.cluster
        port = {
            "pod": job.pod,
            "namespace": job.namespace,
            "host": cluster.host,
            "ca_crt": access.ca(),
            "skiptls": cluster.skip_tls,
            "token": token,
            "user": bodies.USER,
        }
        found = ContainerInstance(job, self.context, "kubectl", port)
        found.host_id = ((pod or {}).get("spec") or {}).get("nodeName")
        return found

    # -- deletion and lists

    def target(self, external_id: str) -> Target:
        """Return the target; without a record, the pool with the longest matching name."""
        pools = [pool for pool in self.provider.pools if external_id.startswith(f"{pool}-")]
        pool = self.pool_of.get(external_id) or max(pools, key=len, default=None)
        if pool is None:
            raise exceptions.LaunchNodepoolException(
                f"pod {external_id}: none of the pools of provider {self.provider.name} is its "
                "project (any more); "
                "configure the pool again until its nodes are deleted"
            )
        return Target(POD, external_id.removeprefix(f"{pool}-"), pool)

    def watched_place(self, kind: Kind, namespace: str | None) -> str | None:
        return namespace

    def listResources(self) -> list[Leftover]:
        found = []
        for pool in self.provider.pools:
            for pod in self._list(POD, pool):
                metadata = pod.get("metadata") or {}
                labels = metadata.get("labels") or {}
                if bodies.NODE_LABEL in labels and not metadata.get("deletionTimestamp"):
                    found.append(Leftover(Target(POD, str(metadata.get("name")), pool), labels))
        return found

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        targets = {}
        for each in external_ids:
            with contextlib.suppress(exceptions.LaunchNodepoolException):
                targets[each] = self.target(str(each))
        there = {
            (pool, (pod.get("metadata") or {}).get("name"))
            for pool in {target.namespace for target in targets.values()}
            for pod in self._list(POD, pool)
            if trouble.is_running(pod)
        }
        return [
            each for each, target in targets.items() if (target.namespace, target.name) not in there
        ]

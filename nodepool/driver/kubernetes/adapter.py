"""A Kubernetes cluster behind the state machine framework (KUB-7 to KUB-10)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nodepool import exceptions
from nodepool.base.backoff import Backoff
from nodepool.cloud import CallsStopped, CallTimeout, CloudCalls
from nodepool.cloud.http import NoAccess, NoAnswer, retry_after
from nodepool.driver.common import adapter as common
from nodepool.driver.common.adapter import MachineInstance
from nodepool.driver.kubernetes import bodies, trouble
from nodepool.driver.kubernetes.api.access import KubeconfigAccess
from nodepool.driver.kubernetes.api.client import ClusterClient, Object
from nodepool.driver.kubernetes.api.errors import ApiError, classify
from nodepool.driver.kubernetes.api.kinds import (
    DAEMON_SET,
    EVENT,
    LIMIT_RANGE,
    NAMESPACE,
    NETWORK_POLICY,
    POD,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE_ACCOUNT,
    Kind,
)
from nodepool.driver.kubernetes.api.watches import Waiting, Watcher
from nodepool.driver.kubernetes.config import KubernetesLabel, KubernetesProviderConfig
from nodepool.driver.kubernetes.machines import CreateMachine, DeleteMachine, Job, Target, token_of
from nodepool.driver.statemachine.model import Adapter, Instance, Resource
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.zk.cluster import same_owner
from nodepool.zk.records import NodeRequest

#: Threads per lane: a launch makes its calls sequentially on one thread of "write".
THREADS = {"read": 6, "write": 16, "delete": 8}
#: Seconds for one call with its retries.
DEADLINE = 60.0
#: A new namespace gets its account `default` a moment later, and accepts no pod before.
ACCOUNT_BACKOFF = Backoff(0.02, 1.0)
ACCOUNT_TRIES = 12
_NO_ACCOUNT = "error looking up service account"


class ContainerInstance(MachineInstance):
    """A namespace or pod."""

    def __init__(
        self, job: Job, cloud: str | None, connection_type: str, port: dict[str, Any]
    ) -> None:
        super().__init__(job.external_id, job.labels, bodies.quota(job.label))
        self.ready = True
        self.cloud = cloud
        self.connection_type = connection_type
        self.connection_port = port
        self.interface_ip = job.pod


class Leftover(common.Leftover):
    """A namespace, pod or project that has our labels."""

    def __init__(self, target: Target, labels: dict[str, str]) -> None:
        super().__init__(labels, "node", target.name)
        self.target = target


class KubernetesAdapter(Adapter):
    """Adapter for Kubernetes."""

    def __init__(self, provider_config: KubernetesProviderConfig) -> None:
        super().__init__(provider_config)
        self.provider = provider_config
        self.log = logging.getLogger(f"nodepool.{type(self).__name__}.{provider_config.name}")
        self.calls = CloudCalls(
            provider_config.name,
            classify,
            {},
            threads=THREADS,
            log=self.log,
            retry_after=retry_after,
        )
        self._cluster: ClusterClient | None = None
        self._watchers: dict[tuple[Kind, str | None], Watcher] = {}
        #: Why there is no client, for operators.
        self.problem: str | None = None
        self._open()

    @property
    def selector(self) -> str:
        return f"{bodies.PROVIDER_LABEL}={self.provider.name}"

    @property
    def context(self) -> str | None:
        """Name of the cloud for Zuul; None inside of the cluster."""
        return None if self.cluster.access.in_cluster else self.provider.context

    @property
    def cluster(self) -> ClusterClient:
        """Client of the cluster. Raises NoAccess: the kubeconfig cannot be used."""
        if self._cluster is None:
            raise NoAccess(self.problem or "not connected to the cluster")
        return self._cluster

    def connect(self) -> ClusterClient:
        """Return a client for the context of the kubeconfig, without calling the cluster.

        :raises NoAccess: the kubeconfig cannot be used; this is retried every minute.
        """
        return ClusterClient(KubeconfigAccess(self.provider.context), self.log)

    def _open(self) -> None:
        try:
            self._cluster = self.connect()
        except NoAccess as error:
            if self.problem != str(error):
                self.log.error("Provider %s cannot be used: %s", self.provider.name, error)
            self.problem = str(error)
        else:
            if self.problem is not None:
                self.log.info("Provider %s can be used again", self.provider.name)
            self.problem = None

    def periodic(self) -> None:
        if self._cluster is None:
            self._open()
        if self._cluster is not None and self.provider.pull:
            try:
                self._pull_images(self.provider.pull["namespace"])
            except (ApiError, NoAnswer, NoAccess, CallTimeout) as error:
                self.log.warning(
                    "Provider %s: images cannot be pulled beforehand: %s", self.provider.name, error
                )

    def _pull_images(self, namespace: str) -> None:
        """Create the daemon set for the present images, and delete our other ones."""
        provider = self.provider
        images = {
            image
            for pool in provider.pools.values()
            for label in pool.labels.values()
            if label.is_pod and label.name in provider.pulled_labels
            for image in bodies.images(label)
        }
        wanted = None
        if images:
            wanted = bodies.pull(
                sorted(images),
                {bodies.PROVIDER_LABEL: provider.name},
                provider.pull.get("node-selector") or {},
            )
        there = {
            str((each.get("metadata") or {}).get("name"))
            for each in self._list(DAEMON_SET, namespace)
        }
        name = wanted["metadata"]["name"] if wanted is not None else None
        if wanted is not None and name not in there:
            self.log.info(
                "Provider %s: pulling %s to all machines (daemon set %s)",
                provider.name,
                sorted(images),
                name,
            )
            self.calls.call(
                "create_daemon_set",
                self.cluster.create,
                DAEMON_SET,
                wanted,
                namespace,
                lane="write",
            )
        for other in there - {name}:
            self.remove(Target(DAEMON_SET, other, namespace))

    def stop(self) -> None:
        self.calls.stop()
        for watcher in list(self._watchers.values()):
            watcher.stop()
        if self._cluster is not None:
            self._cluster.close()

    def labelReady(self, label: KubernetesLabel) -> bool:
        return self.problem is None

    def whyNotReady(self, label: KubernetesLabel) -> str | None:
        return self.problem

    def getQuotaForLabel(self, label: KubernetesLabel) -> QuotaInformation:
        return bodies.quota(label)

    # -- launching

    def plannedExternalId(self, label: KubernetesLabel, node_id: str) -> str:
        return f"{label.pool.name}-{node_id}"

    def getCreateStateMachine(
        self,
        hostname: str,
        label: KubernetesLabel,
        image_external_id: object,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: Log,
    ) -> CreateMachine:
        return CreateMachine(self, self._job(label, metadata, request, log))

    def _job(
        self, label: KubernetesLabel, metadata: dict[str, str], request: NodeRequest, log: Log
    ) -> Job:
        name = self.plannedExternalId(label, metadata[bodies.NODE_LABEL])
        labels = bodies.labels_of(label, metadata, request, log)
        return Job(name, name, label.name if label.is_pod else None, label, labels, log)

    def make(self, job: Job) -> None:
        provider, name = self.provider, job.namespace
        pod = self._pod_body(job)  # before any call, in case it is invalid
        namespace_labels = {**provider.namespace_labels, **job.labels}
        self._make_namespace(
            job, bodies.namespace(name, namespace_labels, provider.namespace_annotations)
        )
        for number, given in enumerate(provider.network_policies):
            self._create(
                job,
                NETWORK_POLICY,
                bodies.applied("NetworkPolicy", NETWORK_POLICY.version, number, given),
            )
        for number, given in enumerate(provider.limit_range):
            self._create(
                job, LIMIT_RANGE, bodies.applied("LimitRange", LIMIT_RANGE.version, number, given)
            )
        self._create(job, SERVICE_ACCOUNT, bodies.service_account())
        self._create(job, SECRET, bodies.token(job.labels))
        # The pod takes longest. It waits for the namespace's account, which exists by now.
        if pod is not None:
            self._make_pod(job, pod)
        role = bodies.role(pod=job.pod is not None)
        self._create(job, ROLE, role)
        self._create(job, ROLE_BINDING, bodies.role_binding(name, role["metadata"]["name"]))

    def _pod_body(self, job: Job) -> Object | None:
        return bodies.pod(job.pod, job.label, job.labels) if job.pod is not None else None

    def _make_namespace(self, job: Job, body: Object) -> None:
        try:
            self._create(job, NAMESPACE, body)
        except (ApiError, NoAccess) as error:
            # Others may result from a retry after a lost answer.
            job.begun = isinstance(error, ApiError) and (error.status >= 500 or error.status == 409)
            raise

    def _create(self, job: Job, kind: Kind, body: Object) -> None:
        """Create an object; one that exists is from an earlier attempt of the same launch."""
        if job.given_up.is_set():
            raise CallsStopped(f"the launch of {job.external_id} was abandoned")
        namespace = job.namespace if kind.namespaced else None
        operation = f"create_{kind.name.replace(' ', '_')}"
        try:
            self.calls.call(
                operation,
                self.cluster.create,
                kind,
                body,
                namespace,
                lane="write",
                deadline=DEADLINE,
                idempotent=True,
            )
        except ApiError as error:
            if not error.exists:
                raise
            self._check_ours(job, kind, body, namespace)

    def _check_ours(self, job: Job, kind: Kind, body: Object, namespace: str | None) -> None:
        if kind is not NAMESPACE:
            return
        found = self.find(kind, body["metadata"]["name"], namespace)
        metadata = (found or {}).get("metadata") or {}
        labels = metadata.get("labels") or {}
        if not same_owner(labels, job.labels):
            job.begun = False  # the existing object must not be deleted
            raise exceptions.LaunchStatusException(
                f"{kind.name} {job.namespace} exists already, and is not this node's"
            )
        if metadata.get("deletionTimestamp"):
            raise exceptions.LaunchStatusException(
                f"{kind.name} {job.namespace} of an earlier attempt is still being deleted: "
                f"{trouble.stuck(found or {})}"
            )

    def _make_pod(self, job: Job, body: Object) -> None:
        account = job.label.options["service-account"]
        if account and account not in ("default", bodies.USER):
            self._create(job, SERVICE_ACCOUNT, bodies.service_account(account))
        for tried in range(1, ACCOUNT_TRIES + 1):
            try:
                self._create(job, POD, body)
                return
            except ApiError as error:
                if (
                    error.status != 403
                    or _NO_ACCOUNT not in error.message
                    or tried == ACCOUNT_TRIES
                ):
                    raise
                if self.calls.pause(ACCOUNT_BACKOFF.pause(tried)):
                    raise

    def instance(self, job: Job, secret: Object | None, pod: Object | None) -> Instance:
        port = {"name": job.namespace, **self._port(job, secret)}
        found = ContainerInstance(job, self.context, "kubectl" if job.pod else "namespace", port)
        if pod is not None:
            found.host_id = (pod.get("spec") or {}).get("nodeName")
        return found

    def _port(self, job: Job, secret: Object | None) -> dict[str, Any]:
        """Return how Zuul connects. Contains a token: never log it."""
        assert secret is not None
        cluster = self.cluster
        port: dict[str, Any] = {
            "namespace": job.namespace,
            "host": cluster.host,
            "skiptls": cluster.skip_tls,
            "token": token_of(secret),
            "user": bodies.USER,
        }
        if not cluster.skip_tls:
            port["ca_crt"] = secret["data"]["ca.crt"]
        if job.pod is not None:
            port["pod"] = job.pod
        return port

    # -- deleting

    def target(self, external_id: str) -> Target:
        return Target(NAMESPACE, external_id)

    def getDeleteStateMachine(self, external_id: object, log: Log) -> DeleteMachine:
        return DeleteMachine(self, external_id, log)

    def remove(self, target: Target) -> str | None:
        # Daemon sets are from our own list, and the account may lack the right to get single ones.
        listed = target.kind is DAEMON_SET
        found = {} if listed else self.find(target.kind, target.name, target.namespace)
        if found is None:
            return None
        if not listed and not self.is_ours(target, found):
            self.log.warning(
                "%s %s does not have the labels of this provider, ignoring it",
                target.kind.name.capitalize(),
                target.name,
            )
            return None

        if target.namespace is None:
            self._stop_pods(target.name)

        def ask() -> None:
            try:
                self.cluster.delete(
                    target.kind, target.name, target.namespace, bodies.grace(target.kind, found)
                )
            except ApiError as error:
                if error.status != 409:  # it is being deleted already
                    raise

        try:
            self.calls.call(
                f"delete_{target.kind.name.replace(' ', '_')}",
                ask,
                lane="delete",
                deadline=DEADLINE,
            )
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return str((found.get("metadata") or {}).get("uid") or "")

    def _stop_pods(self, namespace: str) -> None:
        """Shorten the end of our pod; deleting its namespace grants it what the pod says, 30 s."""
        try:
            for pod in self._list(POD, namespace):
                seconds = bodies.grace(POD, pod)
                name = (pod.get("metadata") or {}).get("name")
                if seconds is not None and name:
                    self.calls.call(
                        "delete_pod",
                        self.cluster.delete,
                        POD,
                        str(name),
                        namespace,
                        seconds,
                        lane="delete",
                        deadline=DEADLINE,
                    )
        except (ApiError, NoAnswer, CallTimeout) as error:
            # It ends with its namespace, only later.
            self.log.debug("Stopping the pods of %s failed: %s", namespace, error)

    def is_ours(self, target: Target, found: Object) -> bool:
        """Return whether the object is ours: another installation may use the same names."""
        labels = (found.get("metadata") or {}).get("labels") or {}
        return bool(labels.get(bodies.PROVIDER_LABEL) == self.provider.name)

    # -- looking

    def find(self, kind: Kind, name: str, namespace: str | None) -> Object | None:
        operation = f"get_{kind.name.replace(' ', '_')}"
        try:
            return self.calls.call(
                operation,
                self.cluster.get,
                kind,
                name,
                namespace,
                deadline=DEADLINE,
                missing_ok=True,
            )
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def warning(self, kind: Kind, name: str, namespace: str | None) -> str | None:
        """Return the latest warning about an object; None: none is known, or none may be read."""
        selector = f"involvedObject.kind={kind.name.capitalize()},involvedObject.name={name}"
        try:
            found = self.calls.call(
                "list_events", self.cluster.list, EVENT, "", namespace, selector, deadline=DEADLINE
            )
        except (ApiError, NoAnswer, CallTimeout) as error:
            self.log.debug("Reading the events of %s %s failed: %s", kind.name, name, error)
            return None
        return trouble.warning(found)

    def wait_for(
        self, kind: Kind, name: str, namespace: str | None, wake: Callable[[], None]
    ) -> Waiting:
        return self._watcher(kind, namespace).wait_for(f"{namespace or ''}/{name}", wake)

    def _watcher(self, kind: Kind, namespace: str | None) -> Watcher:
        place = self.watched_place(kind, namespace)
        watcher = self._watchers.get((kind, place))
        if watcher is None:
            watcher = self._watchers[kind, place] = Watcher(
                self.cluster,
                self.calls,
                kind,
                self.watched_selector(kind),
                _key,
                self.log,
                place,
                self.watchable(kind),
            )
        return watcher

    def watched_place(self, kind: Kind, namespace: str | None) -> str | None:
        """Return the namespace to watch; None: the whole cluster."""
        return None

    def watchable(self, kind: Kind) -> bool:
        """Return whether the account may watch these."""
        return True

    def watched_selector(self, kind: Kind) -> str:
        return self.selector

    def _list(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        return self.calls.call(
            f"list_{kind.plural}",
            self.cluster.list,
            kind,
            self.selector,
            namespace,
            deadline=DEADLINE,
        )

    def listInstances(self) -> Iterable[Instance]:
        found = []
        for resource in self.listResources():
            instance = Instance()
            instance.external_id, instance.metadata, instance.cloud = (
                resource.target.name,
                resource.metadata,
                self.context,
            )
            found.append(instance)
        return found

    def listResources(self) -> list[Leftover]:
        return [
            Leftover(Target(NAMESPACE, name), labels)
            for name, metadata in self._of_nodes(self._list(NAMESPACE))
            if bodies.NODE_LABEL in (labels := metadata.get("labels") or {})
        ]

    def _of_nodes(self, places: Iterable[Object]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and metadata of namespaces or projects that are named like our nodes.

        Those that are being deleted are omitted.
        """
        pools = tuple(f"{pool}-" for pool in self.provider.pools)
        for place in places:
            metadata = place.get("metadata") or {}
            name = str(metadata.get("name") or "")
            ending = (
                metadata.get("deletionTimestamp")
                or (place.get("status") or {}).get("phase") == "Terminating"
            )
            if name.startswith(pools) and name.rpartition("-")[2].isdigit() and not ending:
                yield name, metadata

    def deleteResource(self, resource: Resource) -> None:
        assert isinstance(resource, Leftover)
        self.remove(resource.target)

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        there = {resource.target.name: resource for resource in self.listResources()}
        pod_labels = {
            label.name
            for pool in self.provider.pools.values()
            for label in pool.labels.values()
            if label.is_pod
        }
        with_pod = {
            name
            for name, resource in there.items()
            if resource.metadata.get("nodepool_node_label") in pod_labels
        }
        stopped: set[str] = set()
        if with_pod & set(external_ids):
            pods = {(pod.get("metadata") or {}).get("namespace"): pod for pod in self._list(POD)}
            stopped = {
                name for name in with_pod if name not in pods or not trouble.is_running(pods[name])
            }
        return [each for each in external_ids if each not in there or each in stopped]


def _key(found: Object) -> str:
    metadata = found.get("metadata") or {}
    return f"{metadata.get('namespace') or ''}/{metadata.get('name')}"

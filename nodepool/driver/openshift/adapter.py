"""An OpenShift cluster, where nodes are projects (OSH-6, OSH-7, OSH-9)."""

from __future__ import annotations

from typing import Any

from cachetools import LRUCache

from nodepool.driver.kubernetes import bodies, trouble
from nodepool.driver.kubernetes.adapter import KubernetesAdapter, Leftover
from nodepool.driver.kubernetes.api.client import Object
from nodepool.driver.kubernetes.api.errors import ApiError
from nodepool.driver.kubernetes.api.kinds import (
    OPENSHIFT_ROLE_BINDING,
    POD,
    PROJECT,
    PROJECT_REQUEST,
    ROLE_BINDING,
    SECRET,
    SERVICE_ACCOUNT,
    Kind,
)
from nodepool.driver.kubernetes.machines import Job, Target
from nodepool.driver.openshift.config import OpenshiftProviderConfig
from nodepool.driver.statemachine.model import Instance

MARKS = 20_000
"""Maximum number of projects whose mark is cached."""


class OpenshiftAdapter(KubernetesAdapter):
    def __init__(self, provider_config: OpenshiftProviderConfig) -> None:
        #: Uid of a project -> labels of our account in it.
        self._marks: LRUCache[str, dict[str, str]] = LRUCache(MARKS)
        super().__init__(provider_config)

    def make(self, job: Job) -> None:
        pod = self._pod_body(job)
        metadata = {"name": job.namespace, "labels": job.labels}
        body = {
            "apiVersion": PROJECT_REQUEST.version,
            "kind": "ProjectRequest",
            "metadata": metadata,
        }
        self._make_project(job, body)
        # A project does not get the labels of its request: the account marks it as ours.
        self._create(job, SERVICE_ACCOUNT, bodies.service_account(labels=job.labels))
        self._create(job, SECRET, bodies.token(job.labels))
        self._bind(job)
        if pod is not None:
            self._make_pod(job, pod)

    def _pod_body(self, job: Job) -> Object | None:
        return (
            bodies.pod(job.pod, job.label, job.labels, pull_secrets=True)
            if job.pod is not None
            else None
        )

    def _make_project(self, job: Job, body: Object) -> None:
        try:
            self._create(job, PROJECT_REQUEST, body)
        except ApiError as error:
            job.begun = error.status >= 500
            raise

    def _check_ours(self, job: Job, kind: Kind, body: Object, namespace: str | None) -> None:
        """Accept an existing project, which has no mark yet: its name contains the node's id."""

    def _bind(self, job: Job) -> None:
        """Make Zuul's account an administrator of the project."""
        name = job.namespace
        subject = {"kind": "ServiceAccount", "name": bodies.USER, "namespace": name}
        metadata = {"name": "admin-0", "namespace": name}
        body = {
            "apiVersion": OPENSHIFT_ROLE_BINDING.version,
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"name": "admin"},
            "subjects": [subject],
            "userNames": [f"system:serviceaccount:{name}:{bodies.USER}"],
        }
        try:
            self._create(job, OPENSHIFT_ROLE_BINDING, body)
        except ApiError as error:
            if error.status != 404:
                raise
            role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"}
            plain = {
                "apiVersion": ROLE_BINDING.version,
                "kind": "RoleBinding",
                "metadata": metadata,
                "roleRef": role,
                "subjects": [subject],
            }
            self._create(job, ROLE_BINDING, plain)

    def instance(self, job: Job, secret: Object | None, pod: Object | None) -> Instance:
        found = super().instance(job, secret, pod)
        found.host_id = None
        found.connection_type = "kubectl" if job.pod else "project"  # type: ignore[attr-defined]
        found.connection_port.pop("name")  # type: ignore[attr-defined]
        return found

    # -- deletion and lists

    def is_ours(self, target: Target, found: Object) -> bool:
        """Return whether it is ours; others' projects cannot be deleted, and ours have no
        labels.
        """
        return True

    def target(self, external_id: str) -> Target:
        return Target(PROJECT, external_id)

    def find(self, kind: Kind, name: str, namespace: str | None) -> Object | None:
        """Find an object. Users see only their own projects; a missing one is refused (403)."""
        try:
            return super().find(kind, name, namespace)
        except ApiError as error:
            if kind is not PROJECT or error.status != 403:
                raise
        found = self.calls.call("list_projects", self.cluster.list, PROJECT)
        return next(
            (each for each in found if (each.get("metadata") or {}).get("name") == name), None
        )

    def watchable(self, kind: Kind) -> bool:
        """Return whether the kind can be watched: users may watch projects, but not across them."""
        return kind is PROJECT

    def watched_selector(self, kind: Kind) -> str:
        return "" if kind is PROJECT else self.selector

    def _projects(self) -> dict[str, str]:
        """Return uid by name of our projects that are not being deleted."""
        projects = self.calls.call("list_projects", self.cluster.list, PROJECT)
        return {
            name: str(metadata.get("uid") or name) for name, metadata in self._of_nodes(projects)
        }

    def _mark(self, project: str, uid: str) -> dict[str, str]:
        """Return the labels of our account in the project; queried once."""
        known = self._marks.get(uid)
        if known is None:
            account = self.find(SERVICE_ACCOUNT, bodies.USER, project)
            if account is None:  # it may still be created
                return {}
            known = self._marks[uid] = (account.get("metadata") or {}).get("labels") or {}
        return known

    def listResources(self) -> list[Leftover]:
        """Return the projects with a name and a mark of ours."""
        found = []
        for name, uid in self._projects().items():
            labels = self._mark(name, uid)
            if (
                labels.get(bodies.PROVIDER_LABEL) == self.provider.name
                and bodies.NODE_LABEL in labels
            ):
                found.append(Leftover(Target(PROJECT, name), labels))
        return found

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        projects = self._projects()
        with_pod = {
            name
            for pool in self.provider.pools.values()
            for name, label in pool.labels.items()
            if label.is_pod
        }
        missing = [each for each in external_ids if each not in projects]
        for name in set(external_ids) - set(missing):
            if self._mark(name, projects[name]).get("nodepool_node_label") in with_pod:
                pods = self._list(POD, name)
                if not pods or not trouble.is_running(pods[0]):
                    missing.append(name)
        return missing

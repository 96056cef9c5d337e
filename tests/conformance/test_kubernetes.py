"""The drivers of containers in the conformance suite, against a real Kubernetes."""

from __future__ import annotations

import math
import pathlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from nodepool.zk.zookeeper import BUILDING
from tests.conformance.cloud import LABEL, PROVIDER, CloudUnderTest
from tests.conformance.suite import CrashConformance, DriverConformance
from tests.integration.kubernetes.test_openshift import RIGHTS as OPENSHIFT_RIGHTS
from tests.support.fault_proxy import Fault, html
from tests.support.kubernetes.cluster import CONTEXT, KubernetesCluster, failure
from tests.support.kubernetes.openshift_api import OpenShiftApi

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]


class Kubernetes(CloudUnderTest):
    """An instance is a namespace with a pod, known by its uid: a further attempt has the same
    name.
    """

    outside = True
    patience = 60.0

    def __init__(self, cluster: KubernetesCluster, folder: pathlib.Path) -> None:
        self.cluster, self.proxy = cluster, cluster.proxy
        self.pool = f"c{uuid.uuid4().hex[:8]}"
        self.kubeconfig = cluster.kubeconfig(folder)
        self._allowed = math.inf
        self._throttling: Fault | None = None
        self._down: Fault | None = None
        message = f'{self.limited} "x" is forbidden: exceeded quota: all'
        self.proxy.fail(
            lambda each: (
                each.method == "POST"
                and each.path.endswith(f"/{self.limited}")
                and len(self._objects()) >= self._allowed
            ),
            failure(403, "Forbidden", message),
            math.inf,
        )

    def label(self) -> dict[str, Any]:
        return {"name": LABEL, "type": "pod", "image": "an/image"}

    driver = "kubernetes"
    #: What the quota is of.
    limited = "namespaces"

    def provider(self) -> dict[str, Any]:
        pools = [{"name": self.pool, "labels": [self.label()]}]
        return {"name": PROVIDER, "driver": self.driver, "context": CONTEXT, "pools": pools}

    def environment(self) -> dict[str, str]:
        return {"KUBECONFIG": self.kubeconfig}

    def _objects(self) -> dict[str, Any]:
        """Name in external ids -> what is there."""
        return self.cluster.namespaces(f"{self.pool}-")

    def instances(self) -> set[str]:
        return {str(each["metadata"]["uid"]) for each in self._objects().values()}

    def instance_of(self, external_id: Any) -> str:  # type: ignore[override]
        found = self._objects().get(str(external_id))
        return str(found["metadata"]["uid"]) if found else ""

    def _name(self, instance: str) -> str:
        return next(
            name for name, each in self._objects().items() if each["metadata"]["uid"] == instance
        )

    def metadata(self, instance: str) -> dict[str, str]:
        found: dict[str, str] = self._objects()[self._name(instance)]["metadata"]["labels"]
        return found

    def remove(self, instance: str) -> None:
        assert (
            self.cluster.admin.status("DELETE", f"/api/v1/namespaces/{self._name(instance)}") == 200
        )

    def _pod_path(self, instance: str) -> str:
        return f"/api/v1/namespaces/{self._name(instance)}/pods/{LABEL}"

    def halt(self, instance: str) -> None:
        path = f"{self._pod_path(instance)}/status"
        assert self.cluster.admin.status("PATCH", path, {"status": {"phase": "Failed"}}) == 200

    def limit(self, instances: int | None) -> None:
        self._allowed = math.inf if instances is None else instances

    def down(self, yes: bool) -> None:
        if yes:
            self._down = self.proxy.fail(lambda _request: True, html(502), math.inf)
            self.proxy.cut_streams()
        elif self._down is not None:
            self._down.left = 0

    def unanswered(self) -> int:
        return self._down.used if self._down is not None else 0

    def throttle(self, calls: int) -> int:
        slow = failure(429, "TooManyRequests", "slow down", 1)
        self._throttling = self.proxy.fail(lambda each: "watch=1" not in each.path, slow, calls)
        return calls

    def throttled(self) -> int:
        return self._throttling.used if self._throttling is not None else 0

    def pause(self, yes: bool) -> None:
        for node in self.cluster.admin.call("GET", "/api/v1/nodes")["items"]:
            path = f"/api/v1/nodes/{node['metadata']['name']}"
            assert (
                self.cluster.admin.status("PATCH", path, {"spec": {"unschedulable": yes or None}})
                == 200
            )

    _strays = 0

    def stray(self, metadata: dict[str, str]) -> str:
        self._strays += 1
        body = {"metadata": {"name": f"{self.pool}-000009999{self._strays}", "labels": metadata}}
        return str(self.cluster.admin.call("POST", "/api/v1/namespaces", body)["metadata"]["uid"])


class Projects(Kubernetes):
    driver = "openshift"
    limited = "projectrequests"

    def __init__(self, cluster: KubernetesCluster, folder: pathlib.Path) -> None:
        super().__init__(cluster, folder)
        cluster.apply(*yaml.safe_load_all(OPENSHIFT_RIGHTS.read_text()))
        self.user = "system:serviceaccount:nodepool-openshift:nodepool-launcher"
        token = cluster.token_of("nodepool-openshift", "nodepool-launcher")
        self.kubeconfig = cluster.kubeconfig(folder, token=token)

    def metadata(self, instance: str) -> dict[str, str]:
        found = self.cluster.pod(self._name(instance), LABEL)
        labels: dict[str, str] = found["metadata"]["labels"]
        return labels

    def stray(self, metadata: dict[str, str]) -> str:
        self._strays += 1
        name = f"{self.pool}-000009999{self._strays}"
        admin, rbac = self.cluster.admin, "rbac.authorization.k8s.io"
        body = {"metadata": {"name": name, "annotations": {"openshift.io/requester": self.user}}}
        made = admin.call("POST", "/api/v1/namespaces", body)
        bind = {
            "metadata": {"name": "admin"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "admin"},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": self.user}],
        }
        admin.call("POST", f"/apis/{rbac}/v1/namespaces/{name}/rolebindings", bind)
        account = {"metadata": {"name": "zuul-worker", "labels": metadata}}
        admin.call("POST", f"/api/v1/namespaces/{name}/serviceaccounts", account)
        return str(made["metadata"]["uid"])


class Pods(Kubernetes):
    """An instance is a pod."""

    driver = "openshiftpods"
    limited = "pods"

    def __init__(self, cluster: KubernetesCluster, folder: pathlib.Path) -> None:
        super().__init__(cluster, folder)
        assert (
            cluster.admin.status("POST", "/api/v1/namespaces", {"metadata": {"name": self.pool}})
            == 200
        )

    def label(self) -> dict[str, Any]:
        return {"name": LABEL, "image": "an/image"}

    def _objects(self) -> dict[str, Any]:
        return {f"{self.pool}-{name}": each for name, each in self.cluster.pods(self.pool).items()}

    def _pod_path(self, instance: str) -> str:
        return (
            f"/api/v1/namespaces/{self.pool}/pods/"
            f"{self._name(instance).removeprefix(f'{self.pool}-')}"
        )

    def remove(self, instance: str) -> None:
        assert (
            self.cluster.admin.status("DELETE", f"{self._pod_path(instance)}?gracePeriodSeconds=0")
            == 200
        )

    def stray(self, metadata: dict[str, str]) -> str:
        self._strays += 1
        body = {
            "metadata": {"name": f"stray-{self._strays}", "labels": metadata},
            "spec": {"containers": [{"name": "c", "image": "an/image"}]},
        }
        return str(
            self.cluster.admin.call("POST", f"/api/v1/namespaces/{self.pool}/pods", body)[
                "metadata"
            ]["uid"]
        )


@pytest.fixture
def kubernetes(cluster: KubernetesCluster, tmp_path: pathlib.Path) -> Iterator[Kubernetes]:
    made = Kubernetes(cluster, tmp_path)
    yield made
    made.pause(False)


@pytest.fixture
def projects(cluster: KubernetesCluster, tmp_path: pathlib.Path) -> Iterator[Projects]:
    api = OpenShiftApi(cluster.admin, cluster.dir)
    try:
        made = Projects(cluster, tmp_path)
        yield made
        made.pause(False)
    finally:
        api.close()


@pytest.fixture
def pods(cluster: KubernetesCluster, tmp_path: pathlib.Path) -> Iterator[Pods]:
    made = Pods(cluster, tmp_path)
    yield made
    made.pause(False)


class TestKubernetes(DriverConformance):
    @pytest.fixture
    def cloud(self, kubernetes: Kubernetes) -> Kubernetes:
        return kubernetes


@pytest.mark.slow
class TestOpenshift(DriverConformance):
    @pytest.fixture
    def cloud(self, projects: Projects) -> Projects:
        return projects


class TestOpenshiftPods(DriverConformance):
    @pytest.fixture
    def cloud(self, pods: Pods) -> Pods:
        return pods


def planned(node: dict[str, Any]) -> bool:
    """The name is in the record before the cluster is asked."""
    return node.get("state") == BUILDING


STATES: dict[str, Callable[[dict[str, Any]], bool]] = {
    **CrashConformance.STATES,
    "before the cloud has answered": planned,
}


class TestKubernetesCrashes(CrashConformance):
    STATES = STATES

    @pytest.fixture
    def cloud(self, kubernetes: Kubernetes) -> Kubernetes:
        return kubernetes


@pytest.mark.slow
class TestOpenshiftCrashes(CrashConformance):
    STATES = STATES

    @pytest.fixture
    def cloud(self, projects: Projects) -> Projects:
        return projects


@pytest.mark.slow
class TestOpenshiftPodsCrashes(CrashConformance):
    STATES = STATES

    @pytest.fixture
    def cloud(self, pods: Pods) -> Pods:
        return pods

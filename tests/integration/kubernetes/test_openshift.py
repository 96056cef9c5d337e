"""Projects, and pods in projects, of OpenShift; its own API is an imitation over real namespaces
and roles.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.kubernetes.cluster import CONTEXT, failure
from tests.support.kubernetes.openshift_api import OpenShiftApi
from tests.support.kubernetes.scene import Scene
from tests.support.node_ids import spend_node_ids

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

RIGHTS = REPOSITORY / "doc" / "examples" / "openshift-launcher.yaml"
SECRETS = [{"name": "registry"}]


class ProjectScene:
    """A scene with the driver openshift."""

    driver = "openshift"

    def __init__(self, scene: Scene) -> None:
        self.scene, self.bench, self.cluster = scene, scene.bench, scene.cluster
        scene.cluster.apply(*yaml.safe_load_all(RIGHTS.read_text()))
        token = scene.cluster.token_of("nodepool-openshift", "nodepool-launcher")
        path = pathlib.Path(scene.kubeconfig)
        document = yaml.safe_load(path.read_text())
        document["users"][0]["user"]["token"] = token
        path.write_text(yaml.safe_dump(document))
        self.token = token

    def start(self, *labels: dict[str, Any], **options: Any) -> Any:
        config = self.scene.config(*labels, **options)
        config["providers"][0]["driver"] = self.driver
        pool = self.bench.start(config, cleanup_interval=0.5, delete_interval=0.2)
        wait_for(lambda: pool.ready, 30, "a ready launcher")
        return pool

    def sent(self, plural: str = "pods") -> list[dict[str, Any]]:
        found = [
            each
            for each in self.cluster.proxy.requests
            if each.method == "POST" and each.path.endswith(f"/{plural}")
        ]
        return [json.loads(each.body) for each in found]


@pytest.fixture
def shift(scene: Scene) -> Iterator[ProjectScene]:
    api = OpenShiftApi(scene.cluster.admin, scene.cluster.dir)
    try:
        yield ProjectScene(scene)
    finally:
        scene.bench.stop()
        api.close()


@pytest.mark.spec("OSH-12.1, OSH-12.2, OSH-12.3, OSH-12.7")
def test_a_pod_in_a_project(shift: ProjectScene) -> None:
    scene = shift.scene
    shift.start(
        scene.label(),
        scene.label("secret", **{"image-pull-secrets": SECRETS}),
        pool={"node-attributes": {"a": "b"}},
    )
    (node,) = shift.bench.get("pod")
    name = f"{scene.pool}-{node.id}"
    assert (node.external_id, node.connection_type, node.interface_ip, node.cloud) == (
        name,
        "kubectl",
        "pod",
        CONTEXT,
    )
    assert (node.host_id, node.python_path, node.shell_type, node.attributes) == (
        None,
        "auto",
        None,
        {"a": "b"},
    )
    port = node.connection_port
    assert port.keys() == {"namespace", "host", "skiptls", "token", "user", "ca_crt", "pod"}
    (body,) = shift.sent()
    assert body["metadata"]["name"] == "pod" and body["metadata"]["annotations"] == {}
    labels = body["metadata"]["labels"]
    assert labels.pop("nodepool_cluster_id") and labels.pop("nodepool_node_created").isdecimal()
    assert labels == {
        "nodepool_node_id": node.id,
        "nodepool_provider_name": scene.name,
        "nodepool_pool_name": scene.pool,
        "nodepool_node_label": "pod",
    }
    assert (
        body["spec"].keys() == {"containers", "imagePullSecrets"}
        and body["spec"]["imagePullSecrets"] == []
    )
    zuul = scene.as_zuul(node)
    assert zuul.status("GET", f"/api/v1/namespaces/{name}/secrets") == 200
    assert zuul.status("GET", "/api/v1/namespaces/default/pods") == 403
    (other,) = shift.bench.get("secret")
    assert shift.sent()[-1]["spec"]["imagePullSecrets"] == SECRETS
    shift.bench.give_back(node, other)
    wait_for(lambda: not scene.namespaces(), 30, "no project")


@pytest.mark.spec("OSH-12.8")
def test_project_node_has_the_fields_of_the_contract(shift: ProjectScene) -> None:
    scene = shift.scene
    shift.start({"name": "space", "type": "project"})
    (node,) = shift.bench.get("space")
    assert (node.connection_type, node.interface_ip, node.host_id) == ("project", None, None)
    assert (node.python_path, node.shell_type) == ("auto", None)
    zuul = scene.as_zuul(node)
    pod = {
        "metadata": {"name": "mine"},
        "spec": {"containers": [{"name": "c", "image": "an/image"}]},
    }
    assert zuul.status("POST", f"/api/v1/namespaces/{node.external_id}/pods", pod) == 200
    shift.bench.give_back(node)
    shift.bench.wait_gone(node.id)
    wait_for(lambda: not scene.namespaces(), 30, "no project")


@pytest.mark.spec("OSH-12.4, OSH-12.5, OSH-12.6, OSH-12.11")
def test_labels_resources_and_specs(shift: ProjectScene) -> None:
    scene = shift.scene
    everything = {
        "python-path": "/usr/bin/python9",
        "shell-type": "csh",
        "labels": {"environment": "qa"},
        "dynamic-labels": {"tenant": "{request.tenant_name}"},
        "node-selector": {"kubernetes.io/os": "linux"},
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "volume-mounts": [{"name": "tmp", "mountPath": "/data"}],
        "memory": 2048,
        "cpu-limit": 8,
    }
    spec = {"containers": [{"name": "mine", "image": "my/image"}]}
    defaults = {"default-label-cpu": 2, "default-label-memory": 1024, "default-label-storage": 10}
    shift.start(scene.label(**everything), scene.label("given", spec=spec), pool=defaults)
    node, given = shift.bench.get("pod", "given", tenant_name="t1")
    assert (node.python_path, node.shell_type) == ("/usr/bin/python9", "csh")
    assert node.resources == {"instances": 1, "cores": 2, "ram": 2048, "ephemeral-storage": 10}
    bodies = {body["metadata"]["name"]: body for body in shift.sent()}
    assert (
        bodies["pod"]["metadata"]["labels"].items() >= {"environment": "qa", "tenant": "t1"}.items()
    )
    requests = {"cpu": 2, "memory": "2048Mi", "ephemeral-storage": "10M"}
    (container,) = bodies["pod"]["spec"]["containers"]
    assert container["resources"] == {"requests": requests, "limits": {**requests, "cpu": 8}}
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/data"}]
    assert bodies["given"]["spec"] == spec and given.host_id is None


@pytest.mark.spec("OSH-12.9, OSH-12.10")
def test_limits_of_projects(shift: ProjectScene) -> None:
    tenant = {"tenant-resource-limits": [{"tenant-name": "t", "max-servers": 1}]}
    pool = shift.start(
        {"name": "space", "type": "project"}, top=tenant, **{"max-projects": 2, "max-servers": 9}
    )
    first = shift.bench.get("space", tenant_name="t")
    waiting = shift.bench.submit("space", tenant_name="t")
    second = shift.bench.get("space")
    assert shift.bench.state(waiting) == "requested"
    third = shift.bench.submit("space")
    wait_for(
        lambda: any(worker.paused_handlers for worker in pool.getPoolWorkers(shift.scene.name)),
        20,
        "a paused handler",
    )
    shift.bench.give_back(*first, *second)
    shift.bench.give_back(*shift.bench.accept(third))
    shift.bench.give_back(*shift.bench.accept(waiting))


@pytest.mark.spec("OSH-6: a quota of the cluster is waited for")
def test_quota_of_projects(shift: ProjectScene) -> None:
    message = "projectrequests is forbidden: Exceeded quota: projects"
    fault = shift.cluster.proxy.fail(
        "POST /apis/project.openshift.io/v1/projectrequests", failure(403, "Forbidden", message), 2
    )
    shift.start({"name": "space", "type": "project"})
    shift.bench.get("space")
    assert fault.used == 2


@pytest.mark.spec("OSH-9: a project is ours when its account has our mark")
def test_only_projects_with_our_mark_are_deleted(shift: ProjectScene) -> None:
    scene = shift.scene
    spend_node_ids(shift.bench.zk)
    shift.start({"name": "space", "type": "project"})
    (node,) = shift.bench.get("space")
    admin = scene.cluster.admin
    user = "system:serviceaccount:nodepool-openshift:nodepool-launcher"
    for number, labels in (
        (98, None),
        (99, {"nodepool_provider_name": scene.name, "nodepool_node_id": "0000000099"}),
    ):
        name = f"{scene.pool}-00000000{number}"
        body = {"metadata": {"name": name, "annotations": {"openshift.io/requester": user}}}
        assert admin.status("POST", "/api/v1/namespaces", body) == 200
        bind = {
            "metadata": {"name": "admin"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "admin",
            },
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        }
        assert (
            admin.status(
                "POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{name}/rolebindings", bind
            )
            == 200
        )
        if labels:
            account = {"metadata": {"name": "zuul-worker", "labels": labels}}
            assert (
                admin.status("POST", f"/api/v1/namespaces/{name}/serviceaccounts", account) == 200
            )
    wait_for(
        lambda: set(scene.namespaces()) == {node.external_id, f"{scene.pool}-0000000098"},
        60,
        "the leak is gone",
    )


class PodScene(ProjectScene):
    driver = "openshiftpods"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        admin = scene.cluster.admin
        for name in (scene.pool, f"{scene.pool}-2"):
            assert admin.status("POST", "/api/v1/namespaces", {"metadata": {"name": name}}) == 200
            bind = {
                "metadata": {"name": "edit"},
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": "edit",
                },
                "subjects": [
                    {
                        "kind": "ServiceAccount",
                        "name": "nodepool-launcher",
                        "namespace": "nodepool-openshift",
                    }
                ],
            }
            assert (
                admin.status(
                    "POST",
                    f"/apis/rbac.authorization.k8s.io/v1/namespaces/{name}/rolebindings",
                    bind,
                )
                == 200
            )

    def label(self, name: str = "pod", **options: Any) -> dict[str, Any]:
        found = self.scene.label(name, **options)
        del found["type"]
        return found

    def pods(self) -> dict[str, Any]:
        return self.cluster.pods(self.scene.pool)


@pytest.fixture
def pods(scene: Scene) -> PodScene:
    return PodScene(scene)


@pytest.mark.spec("OSH-12.13, OSH-12.14, OSH-12.17")
def test_pods_in_a_project(pods: PodScene) -> None:
    spec = {"containers": [{"name": "mine", "image": "my/image"}]}
    pods.start(
        pods.label(**{"image-pull-secrets": SECRETS}),
        pods.label("given", spec=spec),
        pool={"node-attributes": {"a": "b"}},
    )
    node, given = pods.bench.get("pod", "given")
    name, project = f"pod-{node.id}", pods.scene.pool
    assert (node.external_id, node.interface_ip, node.connection_type) == (
        f"{project}-{name}",
        name,
        "kubectl",
    )
    assert (node.cloud, node.attributes) == (CONTEXT, {"a": "b"}) and str(node.host_id).startswith(
        "node-"
    )
    port = node.connection_port
    assert port.keys() == {"pod", "namespace", "host", "ca_crt", "skiptls", "token", "user"}
    assert (port["pod"], port["namespace"], port["token"], port["skiptls"]) == (
        name,
        project,
        pods.token,
        False,
    )
    assert (
        pods.scene.as_zuul(node).status("GET", f"/api/v1/namespaces/{project}/pods/{name}") == 200
    )
    bodies = {body["metadata"]["name"]: body for body in pods.sent()}
    assert bodies[name]["spec"]["imagePullSecrets"] == SECRETS
    assert bodies[f"given-{given.id}"]["spec"] == spec and given.host_id
    assert bodies[name]["metadata"]["labels"]["nodepool_node_id"] == node.id
    pods.bench.give_back(node, given)
    wait_for(lambda: not pods.pods(), 30, "no pods")


@pytest.mark.spec("OSH-12.15, OSH-12.16")
def test_limits_of_pods(pods: PodScene) -> None:
    pool = pods.start(pods.label(cpu=2, memory=512), pool={"max-servers": 2})
    first = pods.bench.get("pod", "pod")
    assert first[0].resources == {"instances": 1, "cores": 2, "ram": 512}
    third = pods.bench.submit("pod")
    wait_for(
        lambda: any(worker.paused_handlers for worker in pool.getPoolWorkers(pods.scene.name)),
        20,
        "a paused handler",
    )
    pods.bench.give_back(*first)
    pods.bench.give_back(*pods.bench.accept(third))
    never = pods.bench.submit("pod", "pod", "pod")
    pods.bench.wait_state(never, "failed")


@pytest.mark.spec("OSH-7: the longest pool name that fits, and pools that are configured no more")
def test_which_project_a_pod_is_in(pods: PodScene) -> None:
    project = pods.scene.pool
    config = pods.scene.config(pods.label())
    provider = config["providers"][0]
    provider["driver"] = "openshiftpods"
    provider["pools"].append({"name": f"{project}-2", "labels": [pods.label("second")]})
    config["labels"].append({"name": "second"})
    pool = pods.bench.start(config, cleanup_interval=0.5, delete_interval=0.2)
    wait_for(lambda: pool.ready, 30, "a ready launcher")
    (node,) = pods.bench.get("second")
    pods.bench.give_back(node)
    pods.bench.wait_gone(node.id)
    assert pods.cluster.pods(f"{project}-2") == {}
    (node,) = pods.bench.get("second")
    del provider["pools"][1]
    pods.bench.reconfigure(config)
    manager = pool.config.provider_managers[pods.scene.name]
    wait_for(
        lambda: pool.config.provider_managers[pods.scene.name] is not manager,
        30,
        "a new configuration",
    )
    pods.bench.give_back(node)
    pods.bench.wait_gone(node.id)
    assert pods.cluster.pods(f"{project}-2") == {}


@pytest.mark.spec("OSH-3: without a token Zuul could not use the nodes: not ready, and said so")
def test_provider_without_a_token_is_not_ready(pods: PodScene) -> None:
    path = pathlib.Path(pods.scene.kubeconfig)
    document = yaml.safe_load(path.read_text())
    folder = pods.cluster.dir
    document["users"][0]["user"] = {
        "client-certificate": str(folder / "proxy.crt"),
        "client-key": str(folder / "proxy.key"),
    }
    path.write_text(yaml.safe_dump(document))
    pool = pods.start(pods.label())
    pods.bench.wait_state(pods.bench.submit("pod"), "failed")
    (problem,) = pool.config.provider_managers[pods.scene.name].label_problems.listed()
    assert "has no token" in str(problem)


@pytest.mark.spec("OSH-9: leaked pods, by label, on two sightings")
def test_leaked_pods_are_deleted_after_two_sightings(pods: PodScene) -> None:
    spend_node_ids(pods.bench.zk)
    labels = {"nodepool_provider_name": pods.scene.name, "nodepool_node_id": "0000000099"}
    for name, marks in (("pod-0000000099", labels), ("other-0000000998", {})):
        body = {
            "metadata": {"name": name, "labels": marks},
            "spec": {"containers": [{"name": "c", "image": "an/image"}]},
        }
        assert (
            pods.cluster.admin.status("POST", f"/api/v1/namespaces/{pods.scene.pool}/pods", body)
            == 200
        )
    pods.start(pods.label())
    wait_for(lambda: set(pods.pods()) == {"other-0000000998"}, 60, "the leak is gone")


@pytest.mark.spec("OSH-7: [extra] a pod that chose no grace period is killed after one second")
def test_deleted_pod_of_a_shared_project_gets_one_second(pods: PodScene) -> None:
    pods.start()
    (node,) = pods.bench.get("pod")
    pods.bench.give_back(node)
    pods.bench.wait_gone(node.id)
    (request,) = [each for each in pods.cluster.proxy.requests if each.method == "DELETE"]
    assert json.loads(request.body)["gracePeriodSeconds"] == 1


@pytest.mark.spec("KUB-10: [extra] a ready node whose container waits for its restart")
@pytest.mark.parametrize("kind", ["shift", "pods"])
def test_ready_pod_that_crashes_again_and_again_is_replaced(
    kind: str, request: pytest.FixtureRequest
) -> None:
    scene: ProjectScene = request.getfixturevalue(kind)
    scene.start(min_ready=1)
    (node,) = scene.bench.wait_nodes("pod", 1)
    port = node.connection_port
    waiting = {
        "name": "pod",
        "image": "an/image",
        "imageID": "",
        "ready": False,
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    }
    path = f"/api/v1/namespaces/{port['namespace']}/pods/{port['pod']}/status"
    scene.cluster.admin.call("PATCH", path, {"status": {"containerStatuses": [waiting]}})
    scene.bench.wait_gone(node.id)
    (new,) = scene.bench.wait_nodes("pod", 1)
    assert new.id != node.id

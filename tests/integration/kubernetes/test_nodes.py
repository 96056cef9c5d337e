"""Namespaces and pods as nodes, as Zuul reads and uses them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import urllib.request
from typing import Any

import pytest
import yaml

from tests.conftest import wait_for
from tests.support.fault_proxy import Forward, Reply, Request
from tests.support.kubernetes.cluster import ACCOUNT, ACCOUNT_NAMESPACE, CONTEXT, Server, failure
from tests.support.kubernetes.scene import Scene

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


@pytest.mark.spec("KUB-6, KUB-13.1, KUB-13.2, KUB-13.5")
def test_pod_node_has_the_fields_of_the_contract(scene: Scene) -> None:
    scene.start(pool={"node-attributes": {"zone": "blue"}})
    (node,) = scene.bench.get("pod")
    name = f"{scene.pool}-{node.id}"
    assert node.external_id == name
    assert node.connection_type == "kubectl"
    assert node.attributes == {"zone": "blue"}
    assert node.cloud == CONTEXT
    assert node.interface_ip == "pod"
    assert str(node.host_id).startswith("node-")
    assert (node.username, node.region, node.az, node.image_id, node.host_keys) == (
        None,
        None,
        None,
        None,
        [],
    )
    port = node.connection_port
    assert port.keys() == {"name", "namespace", "host", "skiptls", "token", "user", "ca_crt", "pod"}
    assert (port["name"], port["namespace"], port["pod"], port["user"]) == (
        name,
        name,
        "pod",
        "zuul-worker",
    )
    assert port["skiptls"] is False and port["host"] == scene.cluster.proxy.url
    scene.bench.give_back(node)
    scene.bench.wait_gone(node.id)
    wait_for(lambda: not scene.namespaces(), 30, "no namespace")


ID = "nodepool_node_id"


def ours(scene: Scene, node: Any, label: str) -> dict[str, str]:
    return {
        ID: node.id,
        "nodepool_provider_name": scene.name,
        "nodepool_pool_name": scene.pool,
        "nodepool_node_label": label,
        "nodepool_cluster_id": scene.bench.zk.cluster.identity(),
        "nodepool_node_created": str(node.stat.ctime),
    }


def sent_pod(scene: Scene) -> dict[str, Any]:
    """The last one that the launcher has sent."""
    sent = [
        request
        for request in scene.cluster.proxy.requests
        if request.method == "POST" and request.path.endswith("/pods")
    ]
    found: dict[str, Any] = json.loads(sent[-1].body)
    return found


def plain_container(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "image": "an/image",
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c"],
        "args": ["while true; do sleep 30; done;"],
        "env": [],
        **more,
    }


@pytest.mark.spec("KUB-13.3, KUB-13.4")
def test_a_plain_pod_is_sent_so(scene: Scene) -> None:
    scene.start()
    (node,) = scene.bench.get("pod")
    body = sent_pod(scene)
    assert body == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod", "labels": ours(scene, node, "pod"), "annotations": {}},
        "spec": {"containers": [plain_container("pod")]},
    }
    namespace = scene.namespaces()[node.external_id]
    assert namespace["metadata"]["labels"].items() >= ours(scene, node, "pod").items()


@pytest.mark.spec("KUB-5, KUB-13.6")
def test_a_pod_with_everything(scene: Scene) -> None:
    label = scene.label(
        **{
            "labels": {"environment": "qa"},
            "dynamic-labels": {
                "tenant": "{request.tenant_name}",
                "broken": "{request.nothing}",
                "bad": "no/{request.id}",
            },
            "annotations": {"note": "here", "number": 3, "truth": True},
            "privileged": True,
            "node-selector": {"kubernetes.io/os": "linux"},
            "scheduler-name": "default-scheduler",
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            "volume-mounts": [{"name": "tmp", "mountPath": "/data"}],
            "env": [{"name": "A", "value": "b"}],
            "python-path": "/usr/bin/python9",
            "shell-type": "csh",
        }
    )
    scene.start(label)
    (node,) = scene.bench.get("pod", tenant_name="tenant-1")
    body = sent_pod(scene)
    assert body["metadata"]["labels"] == {
        "environment": "qa",
        "tenant": "tenant-1",
        **ours(scene, node, "pod"),
    }
    assert body["metadata"]["annotations"] == {"note": "here", "number": "3", "truth": "true"}
    assert body["spec"] == {
        "containers": [
            plain_container(
                "pod",
                env=[{"name": "A", "value": "b"}],
                volumeMounts=[{"name": "tmp", "mountPath": "/data"}],
                securityContext={"privileged": True},
            )
        ],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "schedulerName": "default-scheduler",
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    assert (node.python_path, node.shell_type) == ("/usr/bin/python9", "csh")
    assert scene.namespaces()[node.external_id]["metadata"]["labels"]["tenant"] == "tenant-1"


@pytest.mark.spec("KUB-13.7")
def test_namespace_node_has_the_fields_of_the_contract(scene: Scene) -> None:
    scene.start(scene.label("space", "namespace"))
    (node,) = scene.bench.get("space")
    assert node.connection_type == "namespace"
    assert node.cloud == CONTEXT
    assert (node.host_id, node.interface_ip) == (None, None)
    assert node.connection_port["token"] and "pod" not in node.connection_port
    scene.bench.give_back(node)
    scene.bench.wait_gone(node.id)
    wait_for(lambda: not scene.namespaces(), 30, "no namespace")


RESOURCES = {"cpu": 2, "memory": 1024, "storage": 10}


@pytest.mark.spec("KUB-13.8, KUB-13.9, KUB-13.10")
def test_resources_of_labels_and_of_the_pool_are_requested(scene: Scene) -> None:
    defaults = {f"default-label-{name}": value for name, value in RESOURCES.items()}
    labels = [
        scene.label("default"),
        scene.label("cpu", cpu=4),
        scene.label("memory", memory=2048),
        scene.label("storage", storage=20),
        scene.label("gpu", **{"gpu": 0.5, "gpu-resource": "example.com/gpu"}),
    ]
    # No gpu is shared on the machines of the test: what is sent counts here.
    scene.cluster.proxy.fail(
        lambda request: request.method == "POST" and request.path.endswith("/pods"), whole_gpu, 9
    )
    scene.start(*labels, pool=defaults)
    nodes = scene.bench.get("default", "cpu", "memory", "storage", "gpu")
    assert [node.type[0] for node in nodes] == ["default", "cpu", "memory", "storage", "gpu"]
    plain = {"instances": 1, "cores": 2, "ram": 1024, "ephemeral-storage": 10}
    assert [node.resources for node in nodes] == [
        plain,
        {**plain, "cores": 4},
        {**plain, "ram": 2048},
        {**plain, "ephemeral-storage": 20},
        {**plain, "example.com/gpu": 0.5},
    ]
    sent = {
        json.loads(request.body)["metadata"]["name"]: json.loads(request.body)["spec"][
            "containers"
        ][0]["resources"]
        for request in scene.cluster.proxy.requests
        if request.method == "POST" and request.path.endswith("/pods")
    }
    same = {"cpu": 2, "memory": "1024Mi", "ephemeral-storage": "10M"}
    for name, own in {
        "default": {},
        "cpu": {"cpu": 4},
        "memory": {"memory": "2048Mi"},
        "storage": {"ephemeral-storage": "20M"},
        "gpu": {"example.com/gpu": "0.50"},
    }.items():
        assert sent[name] == {"requests": {**same, **own}, "limits": {**same, **own}}


def whole_gpu(request: Request, forward: Forward) -> Reply:
    return forward(dataclasses.replace(request, body=request.body.replace(b'"0.50"', b'"1"')))


@pytest.mark.spec("KUB-13.11")
def test_limits_of_labels_and_of_the_pool_are_set(scene: Scene) -> None:
    defaults = {f"default-label-{name}": value for name, value in RESOURCES.items()}
    defaults |= {f"default-label-{name}-limit": 2 * value for name, value in RESOURCES.items()}
    labels = [
        scene.label("default"),
        scene.label("cpu", **{"cpu-limit": 8}),
        scene.label("memory", **{"memory-limit": 4096}),
    ]
    scene.start(*labels, pool=defaults)
    scene.bench.get("default", "cpu", "memory")
    sent = [
        json.loads(r.body)
        for r in scene.cluster.proxy.requests
        if r.method == "POST" and r.path.endswith("/pods")
    ]
    found = {each["metadata"]["name"]: each["spec"]["containers"][0]["resources"] for each in sent}
    requests = {"cpu": 2, "memory": "1024Mi", "ephemeral-storage": "10M"}
    limits = {"cpu": 4, "memory": "2048Mi", "ephemeral-storage": "20M"}
    assert found["default"] == {"requests": requests, "limits": limits}
    assert found["cpu"] == {"requests": requests, "limits": {**limits, "cpu": 8}}
    assert found["memory"] == {"requests": requests, "limits": {**limits, "memory": "4096Mi"}}


@pytest.mark.spec("KUB-13.12")
@pytest.mark.parametrize(
    "limits",
    [{"max-servers": 2}, {"max-cores": 4}, {"max-ram": 2048}, {"max-resources": {"licenses": 2}}],
    ids=str,
)
def test_request_waits_for_limits_of_the_pool(scene: Scene, limits: dict[str, Any]) -> None:
    label = scene.label(
        "space", "namespace", **{"cpu": 2, "memory": 1024, "extra-resources": {"licenses": 1}}
    )
    pool = scene.start(label, pool=limits)
    nodes = [*scene.bench.get("space"), *scene.bench.get("space")]
    third = scene.bench.submit("space")
    wait_for(
        lambda: any(worker.paused_handlers for worker in pool.getPoolWorkers(scene.name)),
        20,
        "a paused handler",
    )
    scene.bench.wait_state(third, "pending")
    scene.bench.give_back(*nodes)
    scene.bench.give_back(*scene.bench.accept(third))


@pytest.mark.spec("KUB-13.13")
@pytest.mark.parametrize(
    "limits", [{"max-servers": 2}, {"max-cores": 4}, {"max-ram": 2048}, {"licenses": 2}], ids=str
)
def test_request_waits_for_limits_of_its_tenant(scene: Scene, limits: dict[str, Any]) -> None:
    label = scene.label(
        "space", "namespace", **{"cpu": 2, "memory": 1024, "extra-resources": {"licenses": 1}}
    )
    scene.start(label, top={"tenant-resource-limits": [{"tenant-name": "t", **limits}]})
    nodes = [*scene.bench.get("space", tenant_name="t"), *scene.bench.get("space", tenant_name="t")]
    third = scene.bench.submit("space", tenant_name="t")
    scene.bench.give_back(*scene.bench.get("space", tenant_name="other"))
    assert scene.bench.state(third) == "requested"
    scene.bench.give_back(*nodes)
    scene.bench.give_back(*scene.bench.accept(third))


@pytest.mark.spec("KUB-13.14")
def test_a_record_is_deleted(scene: Scene) -> None:
    scene.start(scene.label("space", "namespace"), min_ready=1)
    (node,) = scene.bench.wait_nodes("space")
    scene.bench.zk.kazoo_client.delete(f"/nodepool/nodes/{node.id}", recursive=True)
    (other,) = scene.bench.wait_nodes("space")
    assert other.id != node.id
    wait_for(lambda: set(scene.namespaces()) == {other.external_id}, 30, "one namespace")


@pytest.mark.spec("KUB-13.15")
def test_tokens_are_not_shown(scene: Scene) -> None:
    from nodepool.webapp import WebApp

    pool = scene.start()
    scene.bench.get("pod")
    web = WebApp(pool, port=0, listen_address="127.0.0.1")
    web.start()
    try:
        request = urllib.request.Request(
            f"http://127.0.0.1:{web.server.socket.getsockname()[1]}/node-list",
            headers={"Accept": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("application/json")
            (shown,) = json.loads(answer.read())
    finally:
        web.stop()
    assert shown["connection_port"] == "redacted"


@pytest.mark.spec("KUB-13.16")
def test_a_given_spec(scene: Scene) -> None:
    spec = {
        "containers": [{"name": "mine", "image": "my/image", "args": ["x"]}],
        "hostname": "here",
    }
    scene.start(scene.label(spec=spec), pool={"default-label-cpu": 2})
    (node,) = scene.bench.get("pod")
    body = sent_pod(scene)
    assert body["spec"] == spec
    assert body["metadata"] == {
        "name": "pod",
        "labels": ours(scene, node, "pod"),
        "annotations": {},
    }
    assert node.resources == {"instances": 1, "cores": 2, "ram": 0}


@pytest.mark.spec("KUB-7: what Zuul may do with the pod's token, and what not")
def test_rights_in_a_pod_node(scene: Scene) -> None:
    scene.start()
    (node,) = scene.bench.get("pod")
    zuul, place = scene.as_zuul(node), f"/api/v1/namespaces/{node.external_id}"
    assert zuul.status("GET", f"{place}/pods") == 200
    assert zuul.status("GET", f"{place}/pods/pod") == 200
    for path, verb in (
        ("pods/pod/exec", "create"),
        ("pods/pod/log", "get"),
        ("pods/pod/portforward", "create"),
    ):
        assert allowed(zuul, node.external_id, verb, path), path
    for path, verb in (
        ("secrets", "list"),
        ("configmaps", "get"),
        ("pods", "create"),
        ("pods", "delete"),
    ):
        assert not allowed(zuul, node.external_id, verb, path), path
    assert zuul.status("POST", f"{place}/configmaps", {"metadata": {"name": "x"}}) == 403
    assert zuul.status("GET", "/api/v1/namespaces") == 403
    assert zuul.status("GET", "/api/v1/namespaces/default/pods") == 403


@pytest.mark.spec("KUB-7: what Zuul may do in a namespace of its own, and nowhere else")
def test_rights_in_a_namespace_node(scene: Scene) -> None:
    scene.start(scene.label("space", "namespace"))
    (node,) = scene.bench.get("space")
    zuul, place = scene.as_zuul(node), f"/api/v1/namespaces/{node.external_id}"
    pod = {
        "metadata": {"name": "mine"},
        "spec": {"containers": [{"name": "c", "image": "an/image"}]},
    }
    assert zuul.status("POST", f"{place}/pods", pod) == 200
    wait_for(
        lambda: zuul.call("GET", f"{place}/pods/mine")["status"].get("phase") == "Running",
        20,
        "the pod of a job",
    )
    assert (
        zuul.status("POST", f"{place}/configmaps", {"metadata": {"name": "x"}, "data": {"a": "b"}})
        == 200
    )
    assert zuul.status("PATCH", f"{place}/configmaps/x", {"data": {"a": "c"}}) == 200
    assert zuul.status("DELETE", f"{place}/configmaps/x") == 200
    assert zuul.status("GET", f"{place}/secrets") == 200
    binding = {
        "metadata": {"name": "more"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "cluster-admin",
        },
    }
    assert (
        zuul.status(
            "POST",
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{node.external_id}/rolebindings",
            binding,
        )
        == 403
    )
    assert zuul.status("GET", "/api/v1/namespaces/default/secrets") == 403
    assert zuul.status("DELETE", place) == 403


def allowed(server: Server, namespace: str, verb: str, path: str) -> bool:
    """What the API server says about itself: a kubelet that runs things is not there."""
    resource, _, rest = path.partition("/")
    subresource = rest.rpartition("/")[2]
    attributes = {
        "namespace": namespace,
        "verb": verb,
        "resource": resource,
        "subresource": subresource,
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = server.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    return bool(answer["status"]["allowed"])


@pytest.mark.spec("KUB-4: what 11.0.0 does not have")
def test_what_is_applied_to_each_namespace(scene: Scene) -> None:
    deny = {"podSelector": {}, "policyTypes": ["Ingress"]}
    scene.start(
        scene.label("space", "namespace"),
        **{
            "namespace-labels": {"pod-security.kubernetes.io/enforce": "baseline"},
            "namespace-annotations": {"owner": "ci"},
            "network-policies": [deny],
            "limit-range": [{"limits": [{"type": "Container", "default": {"cpu": "1"}}]}],
        },
    )
    (node,) = scene.bench.get("space")
    metadata = scene.namespaces()[node.external_id]["metadata"]
    assert metadata["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"
    assert metadata["annotations"]["owner"] == "ci"
    admin, name = scene.cluster.admin, node.external_id
    policies = admin.call("GET", f"/apis/networking.k8s.io/v1/namespaces/{name}/networkpolicies")[
        "items"
    ]
    assert [each["spec"] for each in policies] == [deny]
    ranges = admin.call("GET", f"/api/v1/namespaces/{name}/limitranges")["items"]
    assert [each["spec"]["limits"][0]["default"] for each in ranges] == [{"cpu": "1"}]


@pytest.mark.spec("KUB-4: what 11.0.0 does not have")
def test_options_of_pods(scene: Scene) -> None:
    label = scene.label(
        **{
            "service-account": "builder",
            "automount-token": False,
            "tolerations": [{"key": "ci", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "topology-spread": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"a": "b"}},
                }
            ],
            "priority-class": "system-cluster-critical",
            "image-pull-secrets": [{"name": "registry"}],
            "security-context": {"runAsUser": 1000},
            "pod-security-context": {"fsGroup": 1000},
            "init-containers": [{"name": "first", "image": "an/init"}],
            "sidecars": [{"name": "beside", "image": "a/sidecar"}],
            "os": "linux",
        }
    )
    scene.start(label)
    (node,) = scene.bench.get("pod")
    pod = scene.cluster.pod(node.external_id, "pod")
    spec = pod["spec"]
    assert [each["name"] for each in spec["containers"]] == ["pod", "beside"]
    assert pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] == "pod"
    assert [each["name"] for each in spec["initContainers"]] == ["first"]
    assert spec["containers"][0]["securityContext"] == {"runAsUser": 1000}
    assert spec["securityContext"] == {"fsGroup": 1000}
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("builder", False)
    assert spec["priorityClassName"] == "system-cluster-critical"
    assert {"key": "ci", "operator": "Exists"} in spec["tolerations"]
    assert spec["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["os"] == {"name": "linux"} and spec["nodeSelector"] == {"kubernetes.io/os": "linux"}


@pytest.mark.spec("KUB-4: images of labels with min-ready are on all machines beforehand")
def test_images_are_pulled(scene: Scene) -> None:
    admin = scene.cluster.admin
    place = f"/apis/apps/v1/namespaces/{scene.pool}/daemonsets"
    assert admin.status("POST", "/api/v1/namespaces", {"metadata": {"name": scene.pool}}) == 200
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{scene.pool}"
    rules = [
        {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["create", "list", "delete"]}
    ]
    assert (
        admin.status("POST", f"{rbac}/roles", {"metadata": {"name": "pull"}, "rules": rules}) == 200
    )
    binding = {
        "metadata": {"name": "pull"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "pull"},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": ACCOUNT_NAMESPACE}],
    }
    assert admin.status("POST", f"{rbac}/rolebindings", binding) == 200

    def pulled() -> list[list[str]]:
        return [
            [each["image"] for each in found["spec"]["template"]["spec"]["initContainers"]]
            for found in admin.call("GET", place)["items"]
        ]

    options = {"pre-pull": {"namespace": scene.pool}}
    scene.start(min_ready=1, **options)
    wait_for(lambda: pulled() == [["an/image"]], 30, "a daemon set")
    machines = len(admin.call("GET", "/api/v1/nodes")["items"])
    wait_for(
        lambda: admin.call("GET", place)["items"][0]["status"].get("numberReady") == machines,
        60,
        "pods everywhere",
    )
    scene.bench.reconfigure(scene.config(scene.label(image="new/image"), min_ready=1, **options))
    wait_for(lambda: pulled() == [["new/image"]], 30, "another daemon set")
    scene.bench.reconfigure(scene.config(scene.label(image="new/image"), **options))
    wait_for(lambda: pulled() == [], 30, "none")


@pytest.mark.spec("KUB-6, KUB-3: certificates that are not verified, as the kubeconfig says")
def test_unverified_certificates_are_accepted_if_kubeconfig_allows_them(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    path = pathlib.Path(scene.kubeconfig)
    document = yaml.safe_load(path.read_text())
    document["clusters"][0]["cluster"] = {
        "server": scene.cluster.proxy.url,
        "insecure-skip-tls-verify": True,
    }
    path.write_text(yaml.safe_dump(document))
    scene.start(scene.label("space", "namespace"))
    (node,) = scene.bench.get("space")
    assert node.connection_port["skiptls"] is True and "ca_crt" not in node.connection_port
    assert sum("are not verified" in record.getMessage() for record in caplog.records) == 1


def deletions(scene: Scene) -> list[tuple[str, int | None]]:
    """The paths of what the launcher has deleted, with the seconds that it granted."""
    return [
        (request.path, json.loads(request.body or b"{}").get("gracePeriodSeconds"))
        for request in scene.cluster.proxy.requests
        if request.method == "DELETE"
    ]


@pytest.mark.spec("KUB-8: [extra] a pod that chose no grace period is killed after one second")
@pytest.mark.parametrize("chosen", [None, 5])
def test_deleted_pod_gets_one_second_or_the_period_of_its_spec(
    scene: Scene, chosen: int | None
) -> None:
    spec: dict[str, Any] = {"containers": [{"name": "main", "image": "an/image"}]}
    if chosen is not None:
        spec["terminationGracePeriodSeconds"] = chosen
    scene.start(scene.label(spec=spec))
    (node,) = scene.bench.get("pod")
    scene.bench.give_back(node)
    scene.bench.wait_gone(node.id)
    namespace = f"/api/v1/namespaces/{node.external_id}"
    shortened = [(f"{namespace}/pods/pod", 1)] if chosen is None else []
    assert deletions(scene) == [*shortened, (namespace, None)]


@pytest.mark.spec("KUB-8: [extra] a pod that may not be deleted ends with its namespace")
def test_node_is_deleted_without_the_right_to_delete_pods(scene: Scene) -> None:
    refuse = scene.cluster.proxy.fail(
        lambda each: each.method == "DELETE" and "/pods/" in each.path,
        failure(403, "Forbidden", "pods is forbidden"),
        10**6,
    )
    scene.start()
    (node,) = scene.bench.get("pod")
    scene.bench.give_back(node)
    scene.bench.wait_gone(node.id)
    assert refuse.used == 1 and scene.namespaces() == {}

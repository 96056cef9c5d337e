"""What goes wrong: refusals, quota, lost answers, cut watches, bad kubeconfigs; and who gets which
message.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.conftest import wait_for
from tests.support.fault_proxy import cut_off, drop, html, lose_answer
from tests.support.kubernetes.cluster import CONTEXT, failure, kubeconfig
from tests.support.kubernetes.scene import Scene
from tests.support.node_ids import spend_node_ids

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


def problems(pool: Any, label: str = "pod") -> str:
    """What operators see of a label."""
    found = [
        str(problem)
        for manager in pool.config.provider_managers.values()
        for problem in manager.label_problems.listed()
    ]
    return "\n".join(each for each in found if f"label {label}" in each)


def creates(plural: str) -> Any:
    return lambda request: (
        request.method == "POST" and request.path.partition("?")[0].endswith(f"/{plural}")
    )


@pytest.mark.spec("KUB-7: quota of the cluster is the quota outcome; the request waits")
def test_exceeded_quota_of_the_cluster_makes_the_request_wait(scene: Scene) -> None:
    message = (
        'pods "pod" is forbidden: exceeded quota: compute, requested: pods=1, used: pods=5, '
        "limited: pods=5"
    )
    fault = scene.cluster.proxy.fail(creates("pods"), failure(403, "Forbidden", message), 3)
    scene.start()
    request = scene.bench.submit("pod")
    wait_for(lambda: fault.used == 3, 60, "three refusals")
    (node,) = scene.bench.accept(request)
    assert set(scene.namespaces()) == {node.external_id}


@pytest.mark.spec("KUB-7: a real ResourceQuota of the cluster")
def test_a_real_quota(scene: Scene) -> None:
    """Made in the namespace as soon as it is there, it admits no pod."""
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    refused = []

    def with_quota(request: Any, forward: Any) -> Any:
        namespace = request.path.split("/")[4]
        scene.cluster.admin.status("POST", f"/api/v1/namespaces/{namespace}/resourcequotas", quota)
        place = f"/api/v1/namespaces/{namespace}/resourcequotas/none"
        wait_for(
            lambda: scene.cluster.admin.call("GET", place)["status"].get("hard"), 20, "the quota"
        )
        answer = forward(request)
        refused.append((answer.status, answer.body))
        return answer

    scene.cluster.proxy.fail(creates("pods"), with_quota, 1)
    scene.start()
    (node,) = scene.bench.get("pod")
    assert refused[0][0] == 403 and b"exceeded quota" in refused[0][1]
    assert scene.cluster.pod(node.external_id, "pod")["status"]["phase"] == "Running"


@pytest.mark.spec("KUB-7: waiting reasons are told at once; so is a pod that has failed")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"image": "missing/image"}, "ImagePullBackOff"),
        ({"node-selector": {"no": "such-node"}}, "Unschedulable"),
        ({"image": "failing/image"}, "exit code 3"),
    ],
    ids=["image", "node", "exit"],
)
def test_a_pod_that_does_not_start(scene: Scene, options: dict[str, Any], told: str) -> None:
    pool = scene.start(scene.label(**options), **{"launch-retries": 1})
    request = scene.bench.submit("pod")
    wait_for(lambda: told in problems(pool), 20, f"{told} among the problems")
    if told == "exit code 3":
        assert scene.bench.wait_state(request, "failed").state == "failed"
    else:
        assert scene.bench.state(request) == "pending"
        scene.bench.zk.deleteNodeRequest(scene.bench.zk.getNodeRequest(request.id))
    # What others do not get does not harm this one.
    assert problems(pool, "other") == ""


@pytest.mark.spec("KUB-7: [extra] events that may not be read change nothing")
def test_launch_without_the_right_to_read_events_names_the_silent_machine(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.driver.kubernetes.machines.SILENCE", 0.5)
    monkeypatch.setattr("nodepool.driver.kubernetes.machines.POD_TIMEOUT", 2.0)
    refuse = scene.cluster.proxy.fail(
        lambda each: "/events?" in each.path, failure(403, "Forbidden", "no events"), 10**6
    )
    label = scene.label(annotations={"test/runs-after": "1h"})
    pool = scene.start(label, **{"launch-retries": 1})
    scene.bench.wait_state(scene.bench.submit("pod"), "failed")
    assert refuse.used == 1
    assert re.search("after 2 s: the kubelet of machine node-. does not react", problems(pool))


@pytest.mark.spec("KUB-7: a body that the server refuses: its message, with the label")
def test_an_invalid_spec(scene: Scene) -> None:
    spec = {"containers": [{"name": "UPPER", "image": "an/image"}]}
    pool = scene.start(scene.label(spec=spec), scene.label("good"), **{"launch-retries": 1})
    request = scene.bench.submit("pod")
    scene.bench.wait_state(request, "failed")
    assert "spec.containers[0].name" in problems(pool)
    scene.bench.give_back(*scene.bench.get("good"))


@pytest.mark.spec("KUB-3: no permission: which verb on what")
def test_missing_permission_is_reported_with_verb_and_resource(scene: Scene) -> None:
    message = (
        'roles.rbac.authorization.k8s.io is forbidden: User "x" cannot create resource '
        '"roles" in API group'
    )
    scene.cluster.proxy.fail(creates("roles"), failure(403, "Forbidden", message), 9)
    pool = scene.start(**{"launch-retries": 1})
    scene.bench.wait_state(scene.bench.submit("pod"), "failed")
    assert 'cannot create resource "roles"' in problems(pool)
    wait_for(lambda: not scene.namespaces(), 30, "no namespace")


@pytest.mark.spec(
    "KUB-7: answers that are lost, cut off or no answers make no second object and no failed "
    "attempt"
)
@pytest.mark.parametrize(
    "plural", ["namespaces", "serviceaccounts", "secrets", "roles", "rolebindings", "pods"]
)
def test_lost_answers_create_no_second_object(scene: Scene, plural: str) -> None:
    proxy = scene.cluster.proxy
    for action in (lose_answer(), html(502), drop(), failure(429, "TooManyRequests", "slow", 1)):
        proxy.fail(creates(plural), action, 1)
    pool = scene.start()
    (node,) = scene.bench.get("pod")
    assert set(scene.namespaces()) == {node.external_id}
    assert node.external_id.endswith(str(node.id)) and problems(pool) == ""


@pytest.mark.spec("KUB-7: a watch that breaks off, is too old or cannot be had")
def test_broken_watches_are_opened_again(scene: Scene) -> None:
    label = scene.label(annotations={"test/runs-after": "700ms"})
    proxy = scene.cluster.proxy
    scene.start(label)
    scene.bench.give_back(*scene.bench.get("pod"))
    for number in range(3):
        request = scene.bench.submit("pod")
        scene.bench.wait_state(request, "pending")
        if number == 1:
            proxy.fail(
                lambda each: "watch=1" in each.path,
                failure(410, "Expired", "too old resource version"),
                3,
            )
        if number == 2:
            proxy.fail(lambda each: "watch=1" in each.path, cut_off(), 3)
        wait_for(lambda: proxy.cut_streams() > 0, 10, "watches to cut")
        scene.bench.give_back(*scene.bench.accept(request))
    wait_for(lambda: not scene.namespaces(), 30, "no namespace")


@pytest.mark.spec("KUB-3: an account that may not watch is told so, and served by asking")
def test_watching_is_refused(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    message = 'pods is forbidden: User "x" cannot watch resource "pods"'
    scene.cluster.proxy.fail(
        lambda each: "watch=1" in each.path, failure(403, "Forbidden", message), 10**6
    )
    scene.start(scene.label(annotations={"test/runs-after": "300ms"}))
    (node,) = scene.bench.get("pod")
    scene.bench.give_back(node)
    scene.bench.wait_gone(node.id)
    assert "allow the account of this launcher to list and watch pods" in caplog.text


@pytest.mark.spec("KUB-3: credentials that are refused are read again, once")
def test_a_token_that_has_changed(scene: Scene) -> None:
    path = pathlib.Path(scene.kubeconfig)
    good = path.read_text()
    scene.start()
    scene.bench.give_back(*scene.bench.get("pod"))
    # The old one has ended: the server knows none of it.
    old = scene.cluster.token
    refuse = scene.cluster.proxy.fail(
        lambda each: each.headers.get("authorization") == f"Bearer {old}",
        failure(401, "Unauthorized", "Unauthorized"),
        10**6,
    )
    document = yaml.safe_load(good)
    document["users"][0]["user"]["token"] = scene.cluster.token_of("nodepool", "nodepool-launcher")
    path.write_text(yaml.safe_dump(document))
    scene.bench.give_back(*scene.bench.get("pod"))
    assert refuse.used >= 1


@pytest.mark.spec(
    "KUB-3: a kubeconfig that cannot be used: only this provider suffers, and its requests are "
    "declined"
)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: path.unlink(), "the kubeconfig file does not exist"),
        (lambda path: path.write_text("{nonsense: ["), "cannot be used"),
        (
            lambda path: path.write_text(path.read_text().replace(CONTEXT, "another")),
            "cannot be used",
        ),
    ],
    ids=["missing", "broken", "no context"],
)
def test_a_bad_kubeconfig(
    scene: Scene, change: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = pathlib.Path(scene.kubeconfig)
    good = path.read_text()
    change(path)
    config = scene.config()
    config["labels"].append({"name": "space"})
    pool = scene.bench.start(config, cleanup_interval=0.5, delete_interval=0.2)
    wait_for(lambda: pool.ready, 30, "a ready launcher")
    request = scene.bench.submit("pod")
    scene.bench.wait_state(request, "failed")
    assert told in problems(pool)
    assert (
        sum(
            1
            for record in caplog.records
            if record.levelname == "ERROR" and told in record.getMessage()
        )
        == 1
    )
    assert scene.bench.nodes(state=None) == []
    path.write_text(good)
    manager = pool.config.provider_managers[scene.name]
    wait_for(lambda: manager.adapter.problem is None, 30, "a repaired provider")
    scene.bench.give_back(*scene.bench.get("pod"))


@pytest.mark.spec("KUB-3: a server with another certificate authority")
def test_a_wrong_ca(scene: Scene, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other.crt"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=other",
            "-keyout",
            str(tmp_path / "k"),
            "-out",
            str(other),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    document = kubeconfig(scene.cluster.proxy.url, str(other), {"token": "x"})
    pathlib.Path(scene.kubeconfig).write_text(yaml.safe_dump(document))
    pool = scene.start(**{"launch-retries": 1})
    scene.bench.wait_state(scene.bench.submit("pod"), "failed")
    assert "correct certificate-authority" in problems(pool)


@pytest.mark.spec(
    "KUB-8: only 404 means gone; a refused deletion leaves the record for the next round"
)
def test_deletion_is_refused(scene: Scene) -> None:
    scene.start(scene.label("space", "namespace"))
    (node,) = scene.bench.get("space")
    refuse = scene.cluster.proxy.fail(
        lambda each: each.method == "DELETE",
        failure(403, "Forbidden", "namespaces is forbidden"),
        2,
    )
    scene.bench.give_back(node)
    wait_for(lambda: refuse.used == 2, 30, "refused deletions")
    scene.bench.wait_gone(node.id)
    assert scene.namespaces() == {}


@pytest.mark.spec(
    "KUB-8: a namespace that hangs in Terminating is told of, with its conditions, and its record "
    "stays"
)
def test_a_namespace_that_does_not_go(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nodepool.driver.kubernetes.machines.STUCK", 3.0)
    monkeypatch.setattr("nodepool.driver.kubernetes.api.watches.QUIET", 0.5)
    scene.start(scene.label("space", "namespace"))
    (node,) = scene.bench.get("space")
    holds = {"metadata": {"name": "holds", "finalizers": ["example.com/never"]}}
    place = f"/api/v1/namespaces/{node.external_id}/configmaps"
    assert scene.cluster.admin.status("POST", place, holds) == 200
    scene.bench.give_back(node)
    wait_for(
        lambda: "is still being deleted" in caplog.text and "example.com/never" in caplog.text,
        60,
        "a warning",
    )
    assert scene.bench.zk.getNode(node.id).state == "deleting"
    # Asked for once more, the server says that it is at it.
    adapter = scene.bench.pools[0].config.provider_managers[scene.name].adapter
    assert adapter.remove(adapter.target(node.external_id))
    assert (
        scene.cluster.admin.status("PATCH", f"{place}/holds", {"metadata": {"finalizers": None}})
        == 200
    )
    scene.bench.wait_gone(node.id)


@pytest.mark.spec(
    "KUB-10: leaks are found by label, on two sightings; what is not ours is left alone"
)
def test_leaks_are_deleted_after_two_sightings(scene: Scene) -> None:
    admin = scene.cluster.admin

    def make(name: str, labels: dict[str, str]) -> None:
        assert (
            admin.status(
                "POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}}
            )
            == 200
        )

    ours = {
        "nodepool_provider_name": scene.name,
        "nodepool_node_id": "0000000099",
        "nodepool_pool_name": scene.pool,
    }
    spend_node_ids(scene.bench.zk)
    make(f"{scene.pool}-0000000099", ours)
    others = {
        f"{scene.pool}-0000000998": {},
        f"{scene.pool}-0000000997": {**ours, "nodepool_provider_name": "another"},
        f"{scene.pool}-name": ours,
        f"x{scene.pool}-0000000996": ours,
    }
    for name, labels in others.items():
        make(name, labels)
    scene.start(scene.label("space", "namespace"))
    wait_for(lambda: f"{scene.pool}-0000000099" not in scene.namespaces(), 30, "the leak is gone")
    assert set(scene.namespaces()) == set(others) - {f"x{scene.pool}-0000000996"}
    assert f"x{scene.pool}-0000000996" in scene.cluster.namespaces("x")


@pytest.mark.spec("KUB-10: nodes whose namespace or pod is gone are not handed out")
@pytest.mark.parametrize("what", ["namespace", "pod"])
def test_ready_nodes_that_vanish(scene: Scene, what: str) -> None:
    scene.start(min_ready=1)
    (node,) = scene.bench.wait_nodes("pod")
    path = f"/api/v1/namespaces/{node.external_id}" + (
        "" if what == "namespace" else "/pods/pod?gracePeriodSeconds=0"
    )
    assert scene.cluster.admin.status("DELETE", path) == 200
    wait_for(
        lambda: [each.id for each in scene.bench.nodes("pod")] not in ([node.id], []),
        60,
        "another node",
    )


@pytest.mark.spec(
    "KUB-8: LAU-13.3: a node that got the id of a lost one does not use its namespace"
)
def test_a_namespace_of_a_lost_node_is_not_used(scene: Scene) -> None:
    name = f"{scene.pool}-0000000000"
    labels = {
        "nodepool_provider_name": scene.name,
        "nodepool_node_id": "0000000000",
        "nodepool_node_created": "1000",
    }
    assert (
        scene.cluster.admin.status(
            "POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}}
        )
        == 200
    )
    pool = scene.start(scene.label("space", "namespace"), **{"launch-retries": 1})
    scene.bench.wait_state(scene.bench.submit("space"), "failed")
    assert "exists already, and is not this node's" in problems(pool, "space")
    wait_for(lambda: not scene.bench.nodes(state=None), 30, "no record")
    assert set(scene.namespaces()) == {name}


@pytest.mark.spec("KUB-8: what another installation has given the same name is not touched")
def test_a_namespace_of_others(scene: Scene) -> None:
    admin = scene.cluster.admin
    name = f"{scene.pool}-0000000000"
    labels = {"nodepool_provider_name": "theirs", "nodepool_node_id": "0000000000"}
    assert (
        admin.status("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
        == 200
    )
    pool = scene.start(scene.label("space", "namespace"), **{"launch-retries": 1})
    request = scene.bench.submit("space")
    scene.bench.wait_state(request, "failed")
    assert "exists already, and is not this node's" in problems(pool, "space")
    wait_for(lambda: not scene.bench.nodes(state=None), 30, "no record")
    assert set(scene.namespaces()) == {name}
    (node,) = scene.bench.get("space")
    assert node.external_id != name
    # A record that names it, as a crash may leave one.
    adapter = pool.config.provider_managers[scene.name].adapter
    assert adapter.remove(adapter.target(name)) is None
    assert name in scene.namespaces()

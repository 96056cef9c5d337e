"""Pods as nodes on a machine that really runs containers: a kubelet, containerd and runc."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import kubernetes
import pytest
from kubernetes.stream import stream

from nodepool.zk.records import DELETING
from tests.conftest import wait_for
from tests.integration.kubernetes.test_faults import problems
from tests.integration.kubernetes.test_openshift import PodScene
from tests.support.kubernetes.cluster import REAL_IMAGE as IMAGE
from tests.support.kubernetes.cluster import require_real_node, running
from tests.support.kubernetes.scene import Scene

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(280)]

EATS = "head -c 100M /dev/zero | tail"
"""Needs 100 MiB, as tail keeps the last line."""


@pytest.fixture(scope="module")
def kubernetes_server() -> Iterator[tuple[pathlib.Path, str, str]]:
    """One with a real machine, which the server of the other tests lacks."""
    require_real_node()
    with running("--node") as found:
        yield found


def real(scene: Scene, name: str = "pod", **options: Any) -> dict[str, Any]:
    """A label whose pods run on the real machine."""
    return scene.label(
        name,
        **{
            "image": IMAGE,
            "node-selector": {"kubernetes.io/hostname": "real-0"},
            "tolerations": [{"key": "test/real", "operator": "Exists"}],
            **options,
        },
    )


def run_as_zuul(scene: Scene, node: Any, command: str) -> str:
    """Run a command with what the record of the node says, as Zuul's connection "kubectl" does."""
    port = node.connection_port
    settings = kubernetes.client.Configuration()
    settings.host = scene.cluster.admin.url
    settings.ssl_ca_cert = scene.cluster.ca
    settings.api_key = {"authorization": f"Bearer {port['token']}"}
    with kubernetes.client.ApiClient(settings) as client:
        return str(
            stream(
                kubernetes.client.CoreV1Api(client).connect_get_namespaced_pod_exec,
                port["pod"],
                port["namespace"],
                command=["/bin/sh", "-c", command],
                stdout=True,
                stderr=True,
                stdin=False,
                tty=False,
                _request_timeout=30,
            )
        )


def processes(scene: Scene, uid: str) -> list[str]:
    """Return the processes of a pod on this machine."""
    name = f"pod{uid}"
    folders = pathlib.Path("/sys/fs/cgroup").glob(f"**/npk8s*/**/{name}")
    files = [file for folder in folders for file in folder.glob("**/cgroup.procs")]
    found: list[str] = []
    for file in files:
        try:
            found += file.read_text().split()
        except FileNotFoundError:
            continue  # it has just ended
    return found


@pytest.mark.spec("KUB-6, KUB-7, KUB-8: the container runs, serves Zuul and ends with the node")
def test_zuul_runs_commands_in_a_ready_node_until_it_is_deleted(scene: Scene) -> None:
    scene.start(real(scene))
    (node,) = scene.bench.get("pod")
    pod = scene.cluster.pod(node.external_id, "pod")
    assert "running" in pod["status"]["containerStatuses"][0]["state"]
    assert node.host_id == "real-0"
    run_as_zuul(scene, node, "sleep 1000 >/dev/null 2>&1 & echo kept > /tmp/file")
    assert run_as_zuul(scene, node, "cat /tmp/file; id -u").split() == ["kept", "0"]
    uid = pod["metadata"]["uid"]
    assert len(processes(scene, uid)) >= 3  # the loop, its sleep and ours
    scene.bench.give_back(node)
    wait_for(lambda: scene.bench.zk.getCachedNode(node.id) is None, 100, "deletion of the node")
    assert not processes(scene, uid)
    assert not scene.namespaces()


def first(command: str, **container: Any) -> dict[str, Any]:
    """Options of a label with an init container."""
    words = {"name": "first", "image": IMAGE, "command": ["/bin/sh", "-c", command]}
    return {"init-containers": [{**words, **container}]}


BROKEN = {
    "absent": ({"image": "nodepool.test/none:1", "image-pull": "Never"}, "ErrImageNeverPull"),
    "unknown": ({"image": "nodepool.invalid/none:1"}, "nodepool.invalid/none:1"),
    "ends": (first("exit 4"), "container first: .*Error: exit code 4"),
    "hungry": (
        first(EATS, resources={"limits": {"memory": "16Mi"}}),
        # The container may end before containerd (1.6) has noticed why.
        "container first: .*(OOMKilled|Error): exit code 137",
    ),
    "folder": (first("exit 0", workingDir="/bin/sh"), "container first: .*RunContainerError"),
    "volume": (
        {
            "volumes": [{"name": "v", "configMap": {"name": "no-such"}}],
            "volume-mounts": [{"name": "v", "mountPath": "/v"}],
        },
        'FailedMount: .*configmap "no-such" not found',
    ),
    "huge": ({"cpu": 1000}, "Unschedulable: .*Insufficient cpu"),
    "intolerant": ({"tolerations": []}, "Unschedulable: .*untolerated taint"),
}


@pytest.mark.spec("KUB-7: why a pod does not run is in the list of problems and the final error")
def test_failed_launch_names_what_keeps_its_container_from_running(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.driver.kubernetes.machines.SILENCE", 5.0)
    monkeypatch.setattr("nodepool.driver.kubernetes.machines.POD_TIMEOUT", 20.0)
    labels = [real(scene, name, **options) for name, (options, _) in BROKEN.items()]
    pool = scene.start(*labels, **{"launch-retries": 1})
    requests = {name: scene.bench.submit(name) for name in BROKEN}
    for name, request in requests.items():
        scene.bench.wait_state(request, "failed", timeout=60)
        told = problems(pool, name)
        assert "does not run after 20 s" in told
        assert re.search(BROKEN[name][1], told), told
    wait_for(lambda: not scene.namespaces(), 60, "no namespace")


def kubelet(scene: Scene) -> int:
    """Return the process id of the kubelet."""
    option = f"--kubeconfig={scene.cluster.dir}/admin.kubeconfig"
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if words[0].endswith("/kubelet") and option in words:
            return int(path.parent.name)
    raise AssertionError("no kubelet runs")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.spec("KUB-7, KUB-8: a machine that does not react is named; then all continues")
def test_stopped_kubelet_is_named_by_the_launch_and_the_deletion_it_delays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nodepool.driver.kubernetes.machines.SILENCE", 2.0)
    monkeypatch.setattr("nodepool.driver.kubernetes.machines.STUCK", 3.0)
    monkeypatch.setattr("nodepool.driver.kubernetes.api.watches.QUIET", 0.5)
    pool = scene.start(real(scene))
    pid = kubelet(scene)
    with stopped(pid):
        request = scene.bench.submit("pod")
        text = "the kubelet of machine real-0 does not react"
        wait_for(lambda: text in problems(pool), 30, "a message about the launch")
    (node,) = scene.bench.accept(request)
    with stopped(pid):
        scene.bench.give_back(node)
        text = f"Namespace {node.external_id} is still being deleted: .*pods"
        wait_for(lambda: re.search(text, caplog.text), 60, "a message about the deletion")
    wait_for(lambda: scene.bench.zk.getCachedNode(node.id) is None, 100, "deletion of the node")
    assert not scene.namespaces()


def replaced(scene: Scene, node: Any) -> Any:
    """Wait until the launcher has replaced a ready node, and return the new one."""
    wait_for(lambda: scene.bench.zk.getCachedNode(node.id) is None, 100, "deletion of the node")
    (new,) = scene.bench.wait_nodes("pod", 1, timeout=60)
    return new


@pytest.mark.spec("KUB-10: [extra] a ready node whose container is restarted again and again")
def test_ready_node_whose_container_keeps_running_out_of_memory_is_replaced(scene: Scene) -> None:
    volume = {"name": "kept", "emptyDir": {}}
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", f"until [ -e /kept/eat ]; do sleep 0.1; done; {EATS}"],
        "resources": {"limits": {"memory": "16Mi"}},
        "volumeMounts": [{"name": "kept", "mountPath": "/kept"}],
    }
    there = real(scene)
    spec = {
        "containers": [container],
        "volumes": [volume],
        "nodeSelector": there["node-selector"],
        "tolerations": there["tolerations"],
    }
    scene.start(scene.label(spec=spec), min_ready=1)
    (node,) = scene.bench.wait_nodes("pod", 1)
    run_as_zuul(scene, node, "touch /kept/eat")
    assert replaced(scene, node).id != node.id


@pytest.mark.spec("KUB-10: a ready node whose pod the machine evicts")
def test_evicted_ready_node_is_replaced(scene: Scene) -> None:
    scene.start(real(scene, **{"storage": 5, "storage-limit": 5}), min_ready=1)
    (node,) = scene.bench.wait_nodes("pod", 1)
    run_as_zuul(scene, node, "head -c 50M /dev/zero > /tmp/big")
    assert replaced(scene, node).id != node.id


@pytest.mark.spec("KUB-10: [extra] a ready node whose machine the cluster misses")
def test_ready_node_of_a_stopped_machine_is_replaced(scene: Scene) -> None:
    scene.start(real(scene), min_ready=1)
    (node,) = scene.bench.wait_nodes("pod", 1)
    with stopped(kubelet(scene)):
        known = scene.bench.zk.getCachedNode
        wait_for(lambda: known(node.id).state == DELETING, 120, "deletion of the node")
    assert replaced(scene, node).id != node.id


@pytest.mark.spec("KUB-10: a ready node in which a process was killed for its memory")
def test_ready_node_survives_a_process_that_is_killed_for_its_memory(scene: Scene) -> None:
    scene.start(real(scene, memory=32), min_ready=1)
    (node,) = scene.bench.wait_nodes("pod", 1)
    killed = run_as_zuul(scene, node, f"touch /tmp/kept; {EATS} >/dev/null; echo $?")
    assert killed.split()[-1] == "137"
    assert run_as_zuul(scene, node, "ls /tmp").split() == ["kept"]
    (same,) = scene.bench.wait_nodes("pod", 1)
    assert same.id == node.id


@pytest.mark.spec("OSH-6, OSH-7: the container of a shared project runs, and ends with the node")
def test_zuul_runs_commands_in_a_pod_of_a_shared_project(scene: Scene) -> None:
    project = PodScene(scene)
    label = real(scene)
    del label["type"]
    project.start(label)
    (node,) = scene.bench.get("pod")
    port = node.connection_port
    uid = scene.cluster.pod(port["namespace"], port["pod"])["metadata"]["uid"]
    assert run_as_zuul(scene, node, "cat /proc/1/cmdline").startswith("/bin/sh")
    assert processes(scene, uid)
    scene.bench.give_back(node)
    scene.bench.wait_gone(node.id)
    wait_for(lambda: not processes(scene, uid), 20, "the end of its processes")

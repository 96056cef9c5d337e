"""Pods as nodes on a machine that really runs containers: a kubelet, containerd and runc."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import kubernetes
import pytest
from kubernetes.stream import stream

from tests.conftest import wait_for
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

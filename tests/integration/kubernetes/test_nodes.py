"""Namespaces and pods as nodes, as Zuul reads and uses them."""

from __future__ import annotations

import pytest

from tests.conftest import wait_for
from tests.support.kubernetes.cluster import CONTEXT
from tests.support.kubernetes.scene import Scene

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


@pytest.mark.spec("KUB-13.1, KUB-13.2, KUB-13.5")
def test_a_pod(scene: Scene) -> None:
    scene.start(pool={"node-attributes": {"zone": "blue"}})
    (node,) = scene.bench.get("pod")
    name = f"{scene.pool}-{node.id}"
    assert node.external_id == name
    assert node.connection_type == "kubectl"
    assert node.attributes == {"zone": "blue"}
    assert node.cloud == CONTEXT
    assert node.interface_ip == "pod"
    assert str(node.host_id).startswith("node-")
    assert (node.username, node.region, node.az, node.image_id, node.host_keys) == (None, None, None, None, [])
    port = node.connection_port
    assert port.keys() == {"name", "namespace", "host", "skiptls", "token", "user", "ca_crt", "pod"}
    assert (port["name"], port["namespace"], port["pod"], port["user"]) == (name, name, "pod", "zuul-worker")
    assert port["skiptls"] is False and port["host"] == scene.cluster.proxy.url
    scene.bench.give_back(node)
    scene.bench.wait_gone(node.id)
    wait_for(lambda: not scene.namespaces(), 30, "no namespace")

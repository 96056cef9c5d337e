"""Nodes of the openstack driver in a whole launcher, against a real OpenStack (driver-openstack.md)."""

from __future__ import annotations

import ipaddress

import pytest

from tests.integration.launcher_bench import LauncherBench
from tests.integration.openstack_bench import one, start, use_up
from tests.openstack_cloud import OpenStackCloud

pytestmark = pytest.mark.openstack


@pytest.mark.spec("driver-openstack.md 3.4, 3.5: cloud metadata and the fields of a node")
def test_node(bench: LauncherBench, openstack_cloud: OpenStackCloud) -> None:
    start(bench, openstack_cloud)
    request_id, node = one(bench)
    (server,) = openstack_cloud.servers()
    assert (server["name"], server["status"], server["id"]) == (f"np{node.id}", "ACTIVE", node.external_id)
    assert server["metadata"] == {
        "groups": "cloud-1,base,small", "nodepool_node_id": node.id, "nodepool_pool_name": "main",
        "nodepool_provider_name": "cloud-1"}
    assert ipaddress.ip_address(node.private_ipv4) in ipaddress.ip_network("10.11.0.0/16")
    assert (node.cloud, node.region, node.az, node.host_id) == ("test", None, "nova", server["hostId"])
    assert (node.username, node.python_path, node.connection_type, node.connection_port) == ("zuul", "auto", "ssh", 22)
    assert node.resources == {"cores": 1, "instances": 1, "ram": 512}
    use_up(bench, request_id)
    assert openstack_cloud.servers() == []


def test_calls(bench: LauncherBench, openstack_cloud: OpenStackCloud) -> None:
    """A node's life costs at most half of the calls of 11.0.0 (driver-openstack.md 2.9 lists ten and more)."""
    start(bench, openstack_cloud)
    for _ in range(4):
        # What is asked once (flavors, networks, zones, limits), and how long this cloud takes.
        request_id, _ = one(bench)
        use_up(bench, request_id)
    openstack_cloud.forget_calls()
    request_id, _ = one(bench)
    use_up(bench, request_id)
    calls = openstack_cloud.calls()
    print(calls)
    assert calls["compute POST /servers"] == calls["compute DELETE /servers/{id}"] == 1
    assert set(calls) == {"compute POST /servers", "compute DELETE /servers/{id}", "compute GET /servers/{id}"}
    assert calls.total() <= 6

"""Slivers on nodes of another provider: a launcher with driver ``nodemanager`` and ``backing-label`` (nodemanager.md C.8)."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.nodemanager.rpc_client import RpcError
from tests.conftest import wait_for
from tests.integration.backing_bench import BackingHosts, make_hosts
from tests.integration.launcher_bench import LauncherBench

pytestmark = pytest.mark.timeout(180)
OWNER = "NodePool:metastatic:metal"


@pytest.fixture
def hosts(tmp_path: pathlib.Path) -> Iterator[BackingHosts]:
    yield from make_hosts(tmp_path)


def get(bench: LauncherBench, timeout: float = 40) -> dict[str, Any]:
    """One node, in use."""
    request = bench.zuul.submit("small")
    bench.wait_request(request, "fulfilled", timeout=timeout)
    (node_id,) = bench.zuul.accept(request)
    return {**bench.zuul.node(node_id), "id": node_id}


def backing(bench: LauncherBench) -> list[Any]:
    """Backing nodes that are ours."""
    return sorted(bench.nodes(provider="racks", state="in-use"), key=lambda node: node.id)


def end(bench: LauncherBench, hosts: BackingHosts, *nodes: dict[str, Any]) -> None:
    """All is given back; nothing stays."""
    bench.zuul.give_back(*[node["id"] for node in nodes])
    bench.wait_gone(*[node["id"] for node in nodes])
    wait_for(lambda: not backing(bench) and not hosts.places(), 40, "the backing nodes to be given back")


@pytest.mark.spec("nodemanager.md C.8: backing-label takes whole nodes as metastatic does, pushes the daemon, hands out slivers")
def test_life(bench: LauncherBench, hosts: BackingHosts) -> None:
    bench.start(hosts.config())
    node = get(bench)
    (owner,) = backing(bench)
    assert node["external_id"] == {"host": owner.id, "sliver": f"np{node['id']}"} and node["host_id"] == owner.id
    assert node["driver_data"]["backing_node"] == owner.id and node["driver_data"]["node"] == node["id"]
    assert node["slot"] == node["driver_data"]["slot"] == 0 and node["driver_data"]["rspec"]["nm_mem_limit"] == 128
    assert node["interface_ip"] == owner.interface_ip and node["username"] == "root" and len(node["host_keys"]) == 1
    assert node["host_keys"][0] not in owner.host_keys
    assert hosts.log_in(node) == f"np{node['id']}"
    data = json.loads(owner.user_data)
    assert (data["owner"], data["label"], data["slots"], data["failed"]) == (OWNER, "big", 40, False)
    assert data["allocations"] == {"0": node["id"]}
    assert bench.zk.getNodeLockContenders(owner) == [OWNER] and owner.requestor == OWNER
    client = hosts.client(owner.id)
    (sliver,) = client.call("ListSlivers")
    assert sliver["metadata"]["nodepool_node_id"] == node["id"]
    end(bench, hosts, node)
    with pytest.raises(RpcError):
        client.call("GetCapacity", timeout=2)
    wait_for(lambda: len(bench.nodes(provider="racks", state="ready")) == 2, what="the machine to be ready for others")
    assert not hosts.directory.exists()


@pytest.mark.spec("nodemanager.md C.8: slivers share a backing node as long as it has room")
def test_two_share_and_a_third_needs_another(bench: LauncherBench, hosts: BackingHosts) -> None:
    bench.start(hosts.config(config={"max-slivers": 2}))
    first, second = get(bench), get(bench)
    assert first["host_id"] == second["host_id"] and {first["slot"], second["slot"]} == {0, 1}
    third = get(bench)
    assert third["host_id"] != first["host_id"] and third["interface_ip"] != first["interface_ip"]
    assert {hosts.log_in(n) for n in (first, second, third)} == {f"np{n['id']}" for n in (first, second, third)}
    bench.zuul.give_back(third["id"])
    wait_for(lambda: [n.id for n in backing(bench)] == [first["host_id"]], 30, "the second backing node to go")
    end(bench, hosts, first, second)

"""Slivers on nodes of another provider: a launcher with driver ``nodemanager`` and
``backing-label`` (NM-C.8).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.exceptions import NotEmptyError

from nodepool.nodemanager.client.rpc import RpcError
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench
from tests.support.nodemanager.backing_scene import BackingHosts, make_hosts

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
    """All is returned; nothing stays."""
    bench.zuul.give_back(*[node["id"] for node in nodes])
    bench.wait_gone(*[node["id"] for node in nodes])
    wait_for(
        lambda: not backing(bench) and not hosts.places(), 40, "the backing nodes to be given back"
    )


@pytest.mark.spec(
    "NM-C.8: backing-label takes whole nodes as metastatic does, pushes the daemon, hands out "
    "slivers"
)
def test_backing_node_gets_a_daemon_slivers_and_is_released(
    bench: LauncherBench, hosts: BackingHosts
) -> None:
    bench.start(hosts.config())
    node = get(bench)
    (owner,) = backing(bench)
    assert (
        node["external_id"] == {"host": owner.id, "sliver": f"np{node['id']}"}
        and node["host_id"] == owner.id
    )
    assert (
        node["driver_data"]["backing_node"] == owner.id
        and node["driver_data"]["node"] == node["id"]
    )
    assert (
        node["slot"] == node["driver_data"]["slot"] == 0
        and node["driver_data"]["rspec"]["nm_mem_limit"] == 128
    )
    assert (
        node["interface_ip"] == owner.interface_ip
        and node["username"] == "root"
        and len(node["host_keys"]) == 1
    )
    assert node["host_keys"][0] not in owner.host_keys
    provider = bench.pools[0].getProviderManager("metal")
    running = provider.execute(bench.pools[0].zk.getNode(node["id"]), ["hostname"])
    assert running.read(20) == (1, f"np{node['id']}\n".encode())
    running.close()
    assert hosts.log_in(node) == f"np{node['id']}"
    data = json.loads(owner.user_data)
    assert (data["owner"], data["label"], data["slots"], data["failed"]) == (
        OWNER,
        "big",
        40,
        False,
    )
    assert data["allocations"] == {"0": node["id"]}
    assert bench.zk.getNodeLockContenders(owner) == [OWNER] and owner.requestor == OWNER
    client = hosts.client(owner.id)
    (sliver,) = client.call("ListSlivers")
    assert sliver["metadata"]["nodepool_node_id"] == node["id"]
    end(bench, hosts, node)
    with pytest.raises(RpcError):
        client.call("GetCapacity", timeout=2)
    wait_for(
        lambda: len(bench.nodes(provider="racks", state="ready")) == 2,
        what="the machine to be ready for others",
    )
    assert not hosts.directory.exists()


@pytest.mark.spec("NM-C.8: slivers share a backing node as long as it has room")
def test_two_share_and_a_third_needs_another(bench: LauncherBench, hosts: BackingHosts) -> None:
    bench.start(hosts.config(config={"max-slivers": 2}))
    first, second = get(bench), get(bench)
    assert first["host_id"] == second["host_id"] and {first["slot"], second["slot"]} == {0, 1}
    third = get(bench)
    assert third["host_id"] != first["host_id"] and third["interface_ip"] != first["interface_ip"]
    assert {hosts.log_in(n) for n in (first, second, third)} == {
        f"np{n['id']}" for n in (first, second, third)
    }
    bench.zuul.give_back(third["id"])
    wait_for(
        lambda: [n.id for n in backing(bench)] == [first["host_id"]],
        30,
        "the second backing node to go",
    )
    end(bench, hosts, first, second)


@pytest.mark.spec("NM-C.8: what fits is decided by GetCapacity of the backing node")
def test_free_slots_of_a_backing_node(
    bench: LauncherBench, hosts: BackingHosts, caplog: pytest.LogCaptureFixture
) -> None:
    """Many requests concurrently ask for as many backing nodes as they need, once it is known how
    large these are.
    """
    cores = os.cpu_count() or 1
    bench.start(hosts.config(label={"cpus": cores * 0.4}))
    requests = [bench.zuul.submit("small") for _ in range(4)]
    for request in requests:
        bench.wait_request(request, "fulfilled", timeout=60)
    nodes = [
        {**bench.zuul.node(i), "id": i} for request in requests for i in bench.zuul.accept(request)
    ]
    assert Counter(node["host_id"] for node in nodes) == Counter(
        {node.id: 2 for node in backing(bench)}
    )
    end(bench, hosts, *nodes)


def test_too_large_for_any(
    bench: LauncherBench, hosts: BackingHosts, caplog: pytest.LogCaptureFixture
) -> None:
    bench.start(hosts.config(label={"cpus": (os.cpu_count() or 1) * 0.97}))
    bench.wait_request(bench.zuul.submit("small"), "failed", timeout=40)
    assert "label small is too large for backing nodes of label big: they have" in caplog.text
    wait_for(lambda: not backing(bench) and not hosts.places(), 40)


@pytest.mark.spec("NM-C.8: quota comes from the backing nodes and the pool")
def test_requests_wait_when_no_more_backing_nodes_may_be_had(
    bench: LauncherBench, hosts: BackingHosts
) -> None:
    # A request that was refused is checked each second or less often: the host must not go
    # before.
    pool = bench.start(
        hosts.config(config={"max-slivers": 1}, **{"max-backing-nodes": 1, "grace-time": 10})
    )
    adapter = bench.adapter("metal", pool)
    assert adapter.getQuotaLimits().get_resources().get("instances") == float("inf")
    node = get(bench)
    wait_for(lambda: adapter.getQuotaLimits().get_resources()["instances"] == 1)
    request = bench.zuul.submit("small")
    wait_for(lambda: any(w.paused for w in pool.state.workers.values()), what="the pool to pause")
    assert len(backing(bench)) == 1
    bench.zuul.give_back(node["id"])
    bench.wait_request(request, "fulfilled", timeout=40)
    (second,) = bench.zuul.accept(request)
    assert bench.zuul.node(second)["host_id"] == node["host_id"]
    end(bench, hosts, {"id": second})


@pytest.mark.spec(
    "NM-C.8: the SSH connection may break: slivers and sessions live on, the launcher connects "
    "again"
)
def test_broken_connection_and_killed_daemon(bench: LauncherBench, hosts: BackingHosts) -> None:
    pool = bench.start(hosts.config(**{"grace-time": 300}))
    node = get(bench)
    number, adapter = hosts.number(node["interface_ip"]), bench.adapter("metal", pool)
    before = hosts.connections(number)
    assert len(before) == 1
    hosts.cut(number)
    wait_for(lambda: hosts.connections(number) not in ([], before), 20, "another connection")
    assert hosts.log_in(node) == f"np{node['id']}"
    other = get(bench)
    assert other["host_id"] == node["host_id"]
    # Nobody else keeps the daemon running where there is no systemd.
    pid = hosts.pid(node["host_id"])
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: hosts.pid(node["host_id"]) not in (None, pid), 20, "another daemon")
    third = get(bench)
    assert third["host_id"] == node["host_id"] and len(hosts.slivers()) == 3
    assert hosts.log_in(node) == f"np{node['id']}"
    bench.zuul.give_back(node["id"], other["id"], third["id"])
    bench.wait_gone(node["id"], other["id"], third["id"], timeout=40)
    adapter.provider.backing.grace_time = 0
    wait_for(
        lambda: not backing(bench) and not hosts.places(), 40, "the backing node to be given back"
    )


@pytest.mark.spec(
    "NM-C.8: a backing node that was deleted takes its nodes along; the next request gets another"
)
def test_backing_node_that_was_deleted(bench: LauncherBench, hosts: BackingHosts) -> None:
    bench.start(hosts.config(config={"max-slivers": 1}))
    node = get(bench)
    with contextlib.suppress(NotEmptyError):
        bench.zk.deleteRawNode(node["host_id"])
    # Whoever gets the machine next finds what is left there, and removes it first.
    others = [get(bench), get(bench)]
    assert node["host_id"] not in {other["host_id"] for other in others}
    assert hosts.slivers() == sorted(other["external_id"]["sliver"] for other in others)
    bench.zuul.give_back(node["id"])
    bench.wait_gone(node["id"])
    end(bench, hosts, *others)


def test_backing_node_that_was_deleted_while_no_launcher_ran(
    bench: LauncherBench, hosts: BackingHosts
) -> None:
    settings = hosts.config(config={"max-slivers": 1})
    pool = bench.start(settings)
    request = bench.zuul.submit("small")
    bench.wait_request(request, "fulfilled", timeout=40)
    (idle,) = bench.zuul.request(request)["nodes"]
    bench.zuul.cancel(request)
    wait_for(lambda: bench.zuul.node(idle)["allocated_to"] is None)
    bench.stop(pool)
    with contextlib.suppress(NotEmptyError):
        bench.zk.deleteRawNode(bench.zuul.node(idle)["host_id"])
    bench.start(settings)
    bench.wait_gone(idle, timeout=40)
    # What is left on the machine goes with the next use.
    end(bench, hosts, get(bench), get(bench))


@pytest.mark.spec(
    "NM-C.8: a silent backing node: ready nodes go, requests get another, it is given back"
)
def test_silent_backing_node(
    bench: LauncherBench,
    hosts: BackingHosts,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nodepool.driver.nodemanager.machines.GIVE_UP", 1.5)
    bench.start(hosts.config(**{"boot-timeout": 2}))
    request = bench.zuul.submit("small", "small")
    bench.wait_request(request, "fulfilled", timeout=40)
    first, idle = bench.zuul.request(request)["nodes"]
    bench.zuul.lock(first)
    bench.zuul.cancel(request)  # the other one is anybody's from now on
    bench.zuul.write_node(first, state="in-use")
    wait_for(lambda: bench.zuul.node(idle)["allocated_to"] is None)
    lost = bench.zuul.node(first)
    number = hosts.number(lost["interface_ip"])
    hosts.lose(number)
    bench.wait_gone(idle, timeout=60)
    assert (
        f"Backing node {lost['host_id']} cannot be used any more; its ready nodes are deleted"
        in caplog.text
    )
    assert bench.zuul.node(first)["state"] == "in-use"
    other = get(bench)
    assert other["host_id"] != lost["host_id"]
    bench.zuul.give_back(first)
    bench.wait_gone(first, timeout=60)
    wait_for(
        lambda: lost["host_id"] not in [n.id for n in backing(bench)],
        40,
        "the silent backing node to be given back",
    )
    assert "cannot be removed" in caplog.text
    bench.zuul.give_back(other["id"])
    wait_for(lambda: not backing(bench), 40)
    hosts.clear(lost["interface_ip"])


@pytest.mark.spec("NM-C.8: the host key of the backing node is verified")
def test_another_machine_at_the_address(
    bench: LauncherBench, hosts: BackingHosts, caplog: pytest.LogCaptureFixture
) -> None:
    settings = hosts.config(**{"boot-timeout": 2, "launch-retries": 1})
    for machine in settings["providers"][0]["pools"][0]["nodes"]:
        machine["host-key-checking"] = (
            False  # the static driver itself would see the other keys, and register them
        )
    bench.start(settings)
    machines = bench.wait_nodes(2, provider="racks", state="ready")
    for machine in machines:
        bench.zk.lockNode(machine, blocking=False)
        machine.host_keys = [(hosts.key.with_suffix(".pub")).read_text().rsplit(" ", 1)[0]]
        bench.zk.storeNode(machine)
        bench.zk.unlockNode(machine)
    request = bench.zuul.submit("small")
    wait_for(lambda: "Host key verification failed" in caplog.text, 20)
    assert not hosts.places()
    wait_for(lambda: "sliver np" in caplog.text and "is moved to another" in caplog.text, 30)
    bench.zuul.cancel(request)


@pytest.mark.spec("MST-6.6: two launchers with one provider use no backing node twice")
def test_two_launchers_use_no_backing_node_twice(bench: LauncherBench, hosts: BackingHosts) -> None:
    settings = hosts.config(config={"max-slivers": 3}, **{"grace-time": 1})
    for name in ("one.yaml", "two.yaml"):
        bench.start(settings, name=name)
    for _ in range(2):
        requests = [bench.zuul.submit("small") for _ in range(6)]
        for request in requests:
            bench.wait_request(request, "fulfilled", timeout=60)
        nodes = [
            {**bench.zuul.node(i), "id": i}
            for request in requests
            for i in bench.zuul.accept(request)
        ]
        assert len({(node["host_id"], node["slot"]) for node in nodes}) == 6
        assert {node["host_id"] for node in nodes} == {node.id for node in backing(bench)} and len(
            backing(bench)
        ) == 2
        assert hosts.slivers() == sorted(node["external_id"]["sliver"] for node in nodes)
        end(bench, hosts, *nodes)

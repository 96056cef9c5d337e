"""One request becomes nodes: every field, order, metadata, what is found at start (LAU-5)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, StatsdReceiver, config, provider


@pytest.mark.spec("LAU-21.1; OST-3.4, OST-3.5")
def test_request_and_node_are_as_zuul_and_the_cloud_expect(
    bench: LauncherBench, statsd: StatsdReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request and its node as Zuul and the cloud see them."""
    monkeypatch.setattr("nodepool.launcher.LOCK_CLEANUP", 1)
    upload = bench.store_image("fake-image", "fake-provider", username="zuul", python_path="auto")
    fake = provider(
        diskimages=[{"name": "fake-image", "meta": {"key": "value"}}],
        **{
            "region-name": "fake-region",
            "boot-timeout": 10,
            "pools": [
                {
                    "name": "main",
                    "max-servers": 96,
                    "node-attributes": {"key1": "value1"},
                    "availability-zones": ["az1"],
                    "networks": ["net-name"],
                    "labels": [
                        {
                            "name": "fake-label",
                            "diskimage": "fake-image",
                            "min-ram": 8192,
                            "flavor-name": "Fake",
                            "instance-properties": {"a_key": "a_value"},
                            "dynamic-instance-properties": {
                                "dynamic-tenant": "Tenant is {request.tenant_name}"
                            },
                        },
                        {"name": "unused", "diskimage": "fake-image", "min-ram": 8192},
                    ],
                }
            ],
        },
    )
    bench.start(
        config(
            fake,
            diskimages=[
                {
                    "name": "fake-image",
                    "elements": ["fedora"],
                    "username": "zuul",
                    "python-path": "auto",
                }
            ],
            **{"elements-dir": ".", "images-dir": str(bench.tmp)},
        )
    )
    request_id = bench.submit("fake-label", tenant_name="tenant-1", event_id="e1")
    request = bench.wait_request(request_id, "fulfilled")
    assert len(request["nodes"]) == 1
    assert request["declined_by"] == []
    node = bench.node(request["nodes"][0])
    assert node.state == "ready"
    assert not bench.zuul.contenders(node.id)
    assert node.allocated_to == request_id
    assert (node.provider, node.pool, node.type) == ("fake-provider", "main", ["fake-label"])
    assert (node.cloud, node.region, node.az) == ("fake", "fake-region", "az1")
    assert (node.username, node.connection_type, node.connection_port) == ("zuul", "ssh", 22)
    assert (node.python_path, node.shell_type) == ("auto", None)
    assert (node.tenant_name, node.requestor) == ("tenant-1", request["requestor"])
    assert node.resources == {"cores": 4, "instances": 1, "ram": 8192}
    assert node.attributes == {"key1": "value1"}
    assert node.host_keys == ["ssh-rsa FAKEKEY"]
    assert node.image_id == (
        f"{bench.zk._imageUploadPath('fake-image', upload.build_id, 'fake-provider')}/{upload.id}"
    )
    assert node.interface_ip == "fake"
    assert node.created_time is not None and node.external_id is not None
    server = bench.cloud("fake-provider").get_server(node.external_id)
    metadata = server["metadata"]
    assert metadata["nodepool_provider_name"] == "fake-provider"
    assert metadata["nodepool_pool_name"] == "main"
    assert metadata["nodepool_node_id"] == node.id
    assert metadata["groups"] == "fake-provider,fake-image,fake-label"
    assert metadata["a_key"] == "a_value"
    assert metadata["dynamic-tenant"] == "Tenant is tenant-1"
    assert server["name"] == f"np{node.id}"
    statsd.wait("nodepool.label.fake-label.nodes.ready", "1|g")
    statsd.wait("nodepool.label.unused.nodes.ready", "0|g")
    statsd.wait("nodepool.label.unused.nodes.building", "0|g")
    statsd.wait("nodepool.provider.fake-provider.nodes.ready", "1|g")
    statsd.wait("nodepool.provider.fake-provider.max_servers", "96|g")
    statsd.wait("nodepool.launch.ready", "1|c")
    statsd.wait_any("nodepool.launch.provider.fake-provider.az1.ready")
    statsd.wait_line(r"nodepool\.launcher\.[^.]+\.zk\.client\.connection_queue:\d+\|g")
    for cache in ("node_cache", "request_cache", "image_cache"):
        for queue in ("event_queue", "playback_queue"):
            statsd.wait_line(rf".*\.zk\.{cache}\.{queue}:.*")
    # The lock directory outlives the request, and is swept.
    assert request_id in bench.zk.getNodeRequestLockIDs()
    bench.zuul.give_back(*bench.zuul.accept(request_id))
    wait_for(
        lambda: request_id not in bench.zk.getNodeRequestLockIDs(), what="lock directory swept"
    )


@pytest.mark.spec("LAU-21.2; DRV-14.7; ZK-10.3")
def test_nodes_are_in_the_order_of_the_labels(bench: LauncherBench) -> None:
    labels = ["l1", "l2", "l3", "l4"]
    bench.start(config(provider(labels=labels)))
    idle = {
        label: bench.ready_node("fake-provider", "main", label).id for label in reversed(labels)
    }
    _id, nodes = bench.fulfilled("l3", "l1", "l4", "l2")
    assert [n.type for n in nodes] == [["l3"], ["l1"], ["l4"], ["l2"]]
    request_id = next(iter({n.allocated_to for n in nodes}))
    assert bench.zuul.request(request_id)["nodes"] == [idle[x] for x in ("l3", "l1", "l4", "l2")]
    # Partly new ones, and a label twice.
    spare = bench.ready_node("fake-provider", "main", "l2")
    _id, nodes = bench.fulfilled("l1", "l2", "l1")
    assert [n.type for n in nodes] == [["l1"], ["l2"], ["l1"]]
    request = bench.zuul.request(nodes[0].allocated_to)
    assert request["nodes"][1] == spare.id
    assert len(set(request["nodes"])) == 3


@pytest.mark.spec("ZK-10: rules 1, 4, 7, 10, 11")
def test_records_keep_what_zuul_relies_on(bench: LauncherBench) -> None:
    """What Zuul wrote stays; at the moment of fulfilment the nodes are unlocked, allocated and
    complete.
    """
    bench.start(config(provider()))
    seen: list[dict[str, Any]] = []

    def look() -> bool:
        record = bench.zuul.request(request_id)
        assert record is not None
        if record["state"] == "fulfilled" and not seen:
            for node_id in record["nodes"]:
                assert not bench.zuul.contenders(node_id)
                node = bench.zuul.node(node_id)
                assert node is not None
                seen.append(node)
        return bool(seen)

    submitted = {
        "requestor_data": {"anything": [1, {"deep": None}]},
        "event_id": "e-77",
        "created_time": 12.5,
        "provider": None,
        "tenant_name": "t",
        "requestor": "f" * 32,
    }
    request_id = bench.submit("fake-label", "fake-label", **submitted)
    wait_for(look)
    record = bench.zuul.request(request_id)
    assert record is not None
    for key, value in submitted.items():
        assert record[key] == value, key
    allowed = {
        "state",
        "state_time",
        "declined_by",
        "node_types",
        "nodes",
        "reuse",
        "requestor",
        "requestor_data",
        "provider",
        "relative_priority",
        "event_id",
        "created_time",
        "tenant_name",
    }
    assert set(record) == allowed
    forbidden = {
        "name",
        "aliases",
        "label",
        "lock",
        "stat",
        "reuse",
        "kubernetes_connection",
        "uuid",
        "private_ipv6",
    }
    for node in seen:
        assert node["allocated_to"] == request_id and node["state"] == "ready"
        assert isinstance(node["connection_port"], int) and isinstance(node["host_keys"], list)
        assert not forbidden & set(node) and not any(key.startswith("_") for key in node)
    assert bench.zuul.client.get_children(f"/nodepool/requests/{request_id}") == []
    # Kept until Zuul takes them, request and nodes.
    versions = {
        i: bench.zuul.client.get(f"/nodepool/nodes/{i}")[1].version for i in record["nodes"]
    }
    request_version = bench.zuul.client.get(f"/nodepool/requests/{request_id}")[1].version
    other = bench.fulfilled("fake-label")[0]
    bench.use_up(other)
    assert versions == {
        i: bench.zuul.client.get(f"/nodepool/nodes/{i}")[1].version for i in record["nodes"]
    }
    assert bench.zuul.client.get(f"/nodepool/requests/{request_id}")[1].version == request_version


@pytest.mark.spec("ZK-10.8; LAU-7: request znode gone")
def test_a_request_cancelled_during_the_launch_leaves_reusable_nodes(bench: LauncherBench) -> None:
    bench.start(config(provider(pool={"max-servers": 2})))
    bench.cloud("fake-provider").pause_creates = True
    request_id = bench.submit("fake-label", "fake-label")
    bench.wait_request(request_id, "pending")
    servers = bench.cloud("fake-provider")._server_list
    wait_for(lambda: len(servers) == 2)
    bench.zuul.cancel(request_id)
    bench.cloud("fake-provider").pause_creates = False
    for server in list(servers):
        server.event.set()
    nodes = bench.wait_nodes(2, state="ready", allocated_to=None)
    wait_for(lambda: not any(bench.zuul.contenders(n.id) for n in nodes))
    second, reused = bench.fulfilled("fake-label", "fake-label")
    assert {bench.zuul.request(second)["nodes"][0], bench.zuul.request(second)["nodes"][1]} == {
        n.id for n in nodes
    }
    assert len(reused) == 2


@pytest.mark.spec("LAU-6: drop a paused handler as soon as its request disappears")
def test_a_paused_request_that_is_cancelled_unpauses_the_pool(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    first, _nodes = bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    bench.wait_request(waiting, "pending")
    worker = pool.getPoolWorkers("fake-provider")[0]
    wait_for(lambda: worker.paused_handlers)
    bench.zuul.cancel(waiting)
    wait_for(lambda: not worker.paused_handlers and not worker.request_handlers)
    bench.use_up(first)
    bench.fulfilled("fake-label")


@pytest.mark.spec("ZK-10.14; LAU-2.10: a lock held by Zuul is tried again")
def test_a_request_locked_by_zuul_is_served_afterwards(bench: LauncherBench) -> None:
    pool = bench.make(config(provider()))
    request_id = bench.submit("fake-label")
    directory = f"/nodepool/requests-lock/{request_id}"
    bench.zuul.client.ensure_path(directory)
    lock = bench.zuul.client.create(
        f"{directory}/{'b' * 32}__lock__", ephemeral=True, sequence=True
    )
    pool.start()
    bench.wait_ready(pool)
    # Another one passes by meanwhile.
    bench.fulfilled("fake-label")
    record = bench.zuul.request(request_id)
    assert record is not None and record["state"] == "requested"
    # Zuul revises it under its lock.
    bench.zuul.client.set(
        f"/nodepool/requests/{request_id}", json.dumps({**record, "relative_priority": 3}).encode()
    )
    bench.zuul.client.delete(lock)
    assert bench.wait_request(request_id, "fulfilled")["relative_priority"] == 3


@pytest.mark.spec("LAU-21.63")
def test_pending_request_of_a_dead_launcher_is_served_again(bench: LauncherBench) -> None:
    """A pending request of a dead launcher is served again, with the node that was ready for it."""
    request_id = bench.submit("fake-label", "fake-label", state="pending")
    node = bench.ready_node("fake-provider", "main", "fake-label", allocated_to=request_id)
    init = bench.ready_node(
        "fake-provider", "main", "fake-label", allocated_to=request_id, state="init"
    )
    bench.start(config(provider()))
    request = bench.wait_request(request_id, "fulfilled")
    assert node.id in request["nodes"] and len(set(request["nodes"])) == 2
    assert init.id not in request["nodes"]
    bench.wait_gone(init.id)


@pytest.mark.spec("LAU-21.64")
def test_a_ready_node_of_a_missing_request_is_freed(bench: LauncherBench) -> None:
    lost = bench.ready_node("fake-provider", "main", "fake-label", allocated_to="200-0000009999")
    bench.start(config(provider()))
    wait_for(lambda: bench.node(lost.id).allocated_to is None)
    request_id, _nodes = bench.fulfilled("fake-label")
    # Zuul cancels without taking it: freed again.
    assert bench.zuul.request(request_id)["nodes"] == [lost.id]
    bench.zuul.cancel(request_id)
    wait_for(lambda: bench.node(lost.id).allocated_to is None)


@pytest.mark.spec("ZK-10.4, ZK-10.5; ZK-8.8")
def test_an_allocated_node_is_not_touched_while_zuul_holds_it(bench: LauncherBench) -> None:
    """Between Zuul's removal of the request and ``in-use`` the node is ready, locked and
    allocated to nobody.
    """
    bench.start(
        config(
            provider(labels=["fake-label", "other"], pool={"max-servers": 1}),
            labels={"fake-label": {"max-ready-age": 1}, "other": {"max-ready-age": 1}},
        )
    )
    request_id, nodes = bench.fulfilled("fake-label")
    node_id = bench.zuul.request(request_id)["nodes"][0]
    bench.zuul.lock(node_id)
    bench.zuul.cancel(request_id)
    second = bench.submit("fake-label")
    bench.wait_request(second, "pending")
    bench.zuul.write_node(node_id, state="ready", state_time=1.0)
    # Something else that the reconciler expires, so that we know that it has been at work.
    expired = bench.ready_node("fake-provider", "main", "other", state_time=1.0)
    bench.wait_gone(expired.id)
    assert bench.zuul.node(node_id)["allocated_to"] == request_id == nodes[0].allocated_to
    bench.zuul.write_node(node_id, state="in-use")
    bench.zuul.give_back(node_id)
    assert node_id not in bench.wait_request(second, "fulfilled")["nodes"]


@pytest.mark.spec("LAU-21.65; label_provider")
def test_pools_of_a_provider_serve_their_own_labels(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider(
                pools=[
                    {
                        "name": "pool1",
                        "availability-zones": ["az1"],
                        "max-servers": 1,
                        "labels": ["fake-label1"],
                    },
                    {
                        "name": "pool2",
                        "availability-zones": ["az2"],
                        "max-servers": 1,
                        "labels": ["fake-label2"],
                    },
                ]
            )
        )
    )
    _id, first = bench.fulfilled("fake-label1")
    _id, second = bench.fulfilled("fake-label2")
    assert [(n.az, n.pool, n.type) for n in (*first, *second)] == [
        ("az1", "pool1", ["fake-label1"]),
        ("az2", "pool2", ["fake-label2"]),
    ]


@pytest.mark.spec(
    "LAU-21.27, LAU-21.37, LAU-21.38, LAU-21.36node_ipv6, node_auto_floating_ip; OST-3.8 to "
    "OST-3.10"
)
def test_what_reaches_the_cloud(bench: LauncherBench) -> None:
    image = {"cloud-image": "fake-image"}
    bench.start(
        config(
            provider(
                pools=[
                    {
                        "name": "plain",
                        "labels": [
                            {"name": "flavor", "flavor-name": "Fake Flavor", **image},
                            {
                                "name": "ipv6",
                                "min-ram": 1,
                                "networks": ["fake-ipv6-network-name"],
                                **image,
                            },
                            {
                                "name": "props",
                                "min-ram": 1,
                                "instance-properties": {"a": "b", "nodepool_pool_name": "lie"},
                                "dynamic-instance-properties": {
                                    "t": "{request.tenant_name}",
                                    "bad": "{request.nothing}",
                                },
                                **image,
                            },
                        ],
                    },
                    {
                        "name": "secure",
                        "security-groups": ["sg"],
                        "networks": ["no-auto-ip-network-name"],
                        "labels": [{"name": "secure", "min-ram": 1, **image}],
                    },
                ]
            )
        )
    )
    nodes = {label: bench.fulfilled(label)[1][0] for label in ("flavor", "ipv6", "props", "secure")}
    servers = {
        label: bench.cloud("fake-provider").get_server(n.external_id) for label, n in nodes.items()
    }
    assert servers["flavor"]["flavor"]["id"] == "f1"
    assert (nodes["ipv6"].public_ipv6, nodes["ipv6"].interface_ip) == ("fake_v6", "fake_v6")
    assert (nodes["flavor"].public_ipv6, nodes["flavor"].interface_ip) == ("", "fake")
    assert (nodes["secure"].public_ipv4, nodes["secure"].interface_ip) == ("", "fake")
    assert (servers["secure"]["security_groups"], servers["flavor"]["security_groups"]) == (
        ["sg"],
        [],
    )
    metadata = servers["props"]["metadata"]
    assert (metadata["a"], metadata["t"], metadata["nodepool_pool_name"]) == ("b", "None", "plain")
    assert "bad" not in metadata


@pytest.mark.spec("LAU-21.29, LAU-21.28; DRV-14.22")
def test_host_keys_are_scanned_for_ssh_connections_only(bench: LauncherBench) -> None:
    cloud_images = [
        {"name": "fake-image", "image-name": "Fake Precise"},
        {"name": "cli", "image-name": "Fake Precise", "connection-type": "network_cli"},
        {"name": "win", "image-name": "Fake Precise", "connection-type": "winrm"},
        {
            "name": "win2",
            "image-name": "Fake Precise",
            "connection-type": "winrm",
            "connection-port": 99,
        },
    ]
    off = {"host-key-checking": False}
    bench.start(
        config(
            provider(
                **{"cloud-images": cloud_images},
                pools=[
                    {
                        "name": "on",
                        "labels": [
                            {"name": "keys", "cloud-image": "fake-image", "min-ram": 1},
                            {"name": "label-off", "cloud-image": "fake-image", "min-ram": 1, **off},
                            {"name": "cli", "cloud-image": "cli", "min-ram": 1},
                            {"name": "win", "cloud-image": "win", "min-ram": 1},
                            {"name": "win2", "cloud-image": "win2", "min-ram": 1},
                        ],
                    },
                    {
                        "name": "off",
                        **off,
                        "labels": [{"name": "pool-off", "cloud-image": "fake-image", "min-ram": 1}],
                    },
                ],
            )
        )
    )
    expected = {
        "keys": ("ssh", 22, ["ssh-rsa FAKEKEY"]),
        "label-off": ("ssh", 22, []),
        "pool-off": ("ssh", 22, []),
        "cli": ("network_cli", 22, ["ssh-rsa FAKEKEY"]),
        "win": ("winrm", 5986, []),
        "win2": ("winrm", 99, []),
    }
    for label, wanted in expected.items():
        node = bench.fulfilled(label)[1][0]
        assert (node.connection_type, node.connection_port, node.host_keys) == wanted, label
        assert node.username is None


@pytest.mark.spec("DRV-14.2; FAK-4.1")
def test_the_test_driver_serves_through_the_classic_api(bench: LauncherBench) -> None:
    bench.start(
        {
            "labels": [{"name": "fake-label"}, {"name": "test-label", "min-ready": 1}],
            "providers": [
                provider(),
                {
                    "name": "tp",
                    "driver": "test",
                    "pools": [{"name": "main", "labels": ["test-label"]}],
                },
            ],
        }
    )
    ready = bench.wait_nodes(1, state="ready", allocated_to=None, provider="tp")
    request_id, nodes = bench.fulfilled("test-label")
    assert bench.zuul.request(request_id)["nodes"] == [ready[0].id]
    assert nodes[0].external_id.startswith("test-900-")
    two, _nodes = bench.fulfilled("test-label", "test-label")
    bench.use_up(request_id, two)


@pytest.mark.spec("DRV-14.32: attributes replaced on a handler are honoured")
def test_handler_attributes_may_be_replaced(bench: LauncherBench) -> None:
    pool = bench.start(config(provider(pool={"max-servers": 1})))
    first, _nodes = bench.fulfilled("fake-label")
    waiting = bench.submit("fake-label")
    worker = pool.getPoolWorkers("fake-provider")[0]
    wait_for(lambda: worker.paused_handlers)
    handler = next(iter(worker.paused_handlers))

    def broken(_node_types: list[str]) -> bool:
        raise RuntimeError("induced")

    handler.hasProviderQuota = broken
    assert bench.wait_request(waiting, "failed")["declined_by"] == [worker.launcher_id]
    wait_for(lambda: not worker.paused_handlers and not worker.request_handlers)
    bench.use_up(first)

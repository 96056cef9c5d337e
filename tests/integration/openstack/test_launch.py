"""Nodes of the openstack driver in a whole launcher, against a real OpenStack (OST)."""

from __future__ import annotations

import base64
import ipaddress
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.launcher import LauncherBench
from tests.support.openstack.cloud import OpenStackCloud
from tests.support.openstack.scene import failed, label, one, provider, start, use_up

pytestmark = pytest.mark.openstack


@pytest.mark.spec("OST-3.4, OST-3.5: cloud metadata and the fields of a node")
@pytest.mark.core
def test_node_has_cloud_metadata_and_its_fields(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    start(bench, openstack_cloud)
    request_id, node = one(bench)
    (server,) = openstack_cloud.servers()
    assert (server["name"], server["status"], server["id"]) == (
        f"np{node.id}",
        "ACTIVE",
        node.external_id,
    )
    marks = server["metadata"]
    assert marks.pop("nodepool_cluster_id") and marks.pop("nodepool_node_created").isdecimal()
    assert marks == {
        "groups": "cloud-1,base,small",
        "nodepool_node_id": node.id,
        "nodepool_pool_name": "main",
        "nodepool_provider_name": "cloud-1",
    }
    assert ipaddress.ip_address(node.private_ipv4) in ipaddress.ip_network("10.11.0.0/16")
    assert (node.cloud, node.region, node.az, node.host_id) == (
        "test",
        None,
        "nova",
        server["hostId"],
    )
    assert (node.username, node.python_path, node.connection_type, node.connection_port) == (
        "zuul",
        "auto",
        "ssh",
        22,
    )
    assert node.resources == {"cores": 1, "instances": 1, "ram": 512}
    use_up(bench, request_id)
    assert openstack_cloud.servers() == []


slow = pytest.mark.slow


@pytest.mark.core
def test_life_of_a_node_costs_half_of_the_old_calls(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    """A node's life costs at most half of the calls of 11.0.0 (OST-2.9 lists ten and more)."""
    start(bench, openstack_cloud)
    for _ in range(4):
        # What is asked once (flavors, networks, zones, limits), and how long this cloud takes.
        request_id, _ = one(bench)
        use_up(bench, request_id)
    totals = []
    for _ in range(5):
        openstack_cloud.forget_calls()
        request_id, _ = one(bench)
        use_up(bench, request_id)
        calls = openstack_cloud.calls()
        assert calls["compute POST /servers"] == calls["compute DELETE /servers/{id}"] == 1
        assert set(calls) == {
            "compute POST /servers",
            "compute DELETE /servers/{id}",
            "compute GET /servers/{id}",
        }
        totals.append(calls.total())
        # A server that takes longer than the ones before is checked more often: a busy machine
        # gets some chances.
        if totals[-1] <= 6:
            return
    raise AssertionError(f"calls of each node: {totals}")


def requests_of(cloud: OpenStackCloud, shape: str = "POST /servers") -> list[dict[str, Any]]:
    """Bodies of these calls to the compute service."""
    import json

    from tests.support.openstack.cloud import shape as shape_of

    return [
        json.loads(request.body) for request in cloud.compute.requests if shape_of(request) == shape
    ]


@slow
@pytest.mark.spec("OST-3.9: auto-floating-ip gives the interface address; it goes with the node")
def test_floating_ip_exists_as_long_as_its_node(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    start(bench, openstack_cloud, provider(pool={"auto-floating-ip": True}))
    request_id, node = one(bench)
    (ip,) = openstack_cloud.floating_ips()
    assert node.public_ipv4 == node.interface_ip == ip.floating_ip_address
    assert node.private_ipv4 == ip.fixed_ip_address
    assert ip.status == "ACTIVE"
    tag, *marks = ip.description.split()
    own = {
        f"nodepool_node_id={node.id}",
        "nodepool_pool_name=main",
        "nodepool_provider_name=cloud-1",
    }
    assert tag == "nodepool:" and own <= set(marks)
    others = {mark.partition("=")[0] for mark in marks if mark not in own}
    assert others == {"nodepool_cluster_id", "nodepool_node_created"}
    use_up(bench, request_id)
    assert openstack_cloud.floating_ips() == []


@slow
@pytest.mark.spec(
    "OST-3.9: auto-floating-ip false leaves public_ipv4 empty and the private address"
)
def test_no_floating_ip(bench: LauncherBench, openstack_cloud: OpenStackCloud) -> None:
    start(bench, openstack_cloud)
    _, node = one(bench)
    assert (node.public_ipv4, node.public_ipv6) == ("", "")
    assert node.interface_ip == node.private_ipv4


@slow
def test_use_internal_ip(bench: LauncherBench, openstack_cloud: OpenStackCloud) -> None:
    start(
        bench, openstack_cloud, provider(pool={"auto-floating-ip": True, "use-internal-ip": True})
    )
    _, node = one(bench)
    assert node.public_ipv4.startswith("203.0.113.")
    assert node.interface_ip == node.private_ipv4


@slow
@pytest.mark.spec(
    "OST-3.8: label networks replace pool networks; an IPv6 network gives public_ipv6"
)
def test_label_networks_replace_pool_networks(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    openstack_cloud.entry["force_ipv4"] = False
    start(
        bench,
        openstack_cloud,
        provider(
            label(),
            label("dual", networks=["dual"]),
            label("by-id", networks=[openstack_cloud.network_id("dual")]),
        ),
    )
    for name in ("dual", "by-id"):
        _, node = one(bench, name)
        assert list(openstack_cloud.server(node.external_id)["addresses"]) == ["dual"]
        assert node.public_ipv6.startswith("2001:db8:12:")
        assert ipaddress.ip_address(node.private_ipv4) in ipaddress.ip_network("10.12.0.0/16")
    _, node = one(bench, "small")
    assert list(openstack_cloud.server(node.external_id)["addresses"]) == ["private"]


@slow
@pytest.mark.spec(
    "OST-1.4: networks that clouds.yaml names as default are used when the pool has none"
)
def test_default_network_of_clouds_yaml_is_used(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    openstack_cloud.entry["networks"] = [{"name": "private", "default_interface": True}]
    start(bench, openstack_cloud, provider(pool={"networks": []}))
    _, node = one(bench)
    assert list(openstack_cloud.server(node.external_id)["addresses"]) == ["private"]
    assert node.interface_ip == node.private_ipv4


@slow
@pytest.mark.spec(
    "OST-3.4, OST-3.10, OST-2.3: properties, groups, key, userdata, config drive arrive"
)
def test_options_of_the_label_arrive_in_the_request(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    group = openstack_cloud.sdk.network.create_security_group(name="label-group")
    try:
        start(
            bench,
            openstack_cloud,
            provider(
                label(
                    "all",
                    key_name="key",
                    userdata="#!/bin/true",
                    instance_properties={"a": "b", "number": 5},
                    dynamic_instance_properties={"tenant": "{request.tenant_name}"},
                    security_groups=["label-group"],
                ),
                label("small"),
                cloud_images=[{"name": "base", "username": "zuul", "config-drive": True}],
            ),
        )
        _, node = one(bench, "all")
        server = openstack_cloud.server(node.external_id)
        assert (server["key_name"], server["config_drive"]) == ("key", "True")
        assert [item["name"] for item in server["security_groups"]] == ["label-group"]
        assert server["metadata"]["a"] == "b"
        assert server["metadata"]["number"] == "5"
        assert server["metadata"]["tenant"] == "None"
        (body,) = requests_of(openstack_cloud)
        assert base64.b64decode(body["server"]["user_data"]) == b"#!/bin/true"
        one(bench, "small")
        assert "security_groups" not in requests_of(openstack_cloud)[1]["server"]
        bench.stop(bench.pools[0])
        openstack_cloud.clean()
    finally:
        openstack_cloud.sdk.network.delete_security_group(group)


@slow
@pytest.mark.spec("OST-3.23: boot from volume, of a type; the volume is gone with the node")
def test_boot_from_volume(bench: LauncherBench, openstack_cloud: OpenStackCloud) -> None:
    volumes = openstack_cloud.admin.block_storage
    kind = volumes.find_type("fast") or volumes.create_type(name="fast")
    start(
        bench,
        openstack_cloud,
        provider(
            label("plain", boot_from_volume=True, volume_size=2),
            label("typed", boot_from_volume=True, volume_size=3, volume_type="fast"),
        ),
    )
    requests = []
    for name, size in (("plain", 2), ("typed", 3)):
        request_id, node = one(bench, name)
        requests.append(request_id)
        assert node.resources == {
            "cores": 1,
            "instances": 1,
            "ram": 512,
            "volumes": 1,
            "volume-gb": size,
        }
        (volume,) = [volume for volume in openstack_cloud.volumes() if volume.size == size]
        assert volume.metadata["nodepool_node_id"] == node.id
        assert volume.metadata["nodepool_provider_name"] == "cloud-1"
        if name == "typed":
            assert volume.volume_type == kind.name
    use_up(bench, *requests)
    wait_for(lambda: not openstack_cloud.volumes(), 30, "no volume left")


@slow
def test_server_group_and_hints(bench: LauncherBench, openstack_cloud: OpenStackCloud) -> None:
    group = openstack_cloud.sdk.compute.create_server_group(
        name="spread", policies=["soft-anti-affinity"]
    )
    start(
        bench,
        openstack_cloud,
        provider(
            label("grouped", server_group="spread"),
            label("hinted", scheduler_hints={"group": group.id}),
            label("missing", server_group="nowhere"),
        ),
    )
    for name in ("grouped", "hinted"):
        _, node = one(bench, name)
        answer = openstack_cloud.sdk.compute.get(f"/os-server-groups/{group.id}").json()[
            "server_group"
        ]
        assert node.external_id in answer["members"]
    failed(bench, "missing")


@slow
@pytest.mark.spec("OST-3.6: cloud images by name, by image-name, by image-id; winrm ports")
def test_cloud_images_are_found_by_name_and_by_id(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    image = openstack_cloud.sdk.image.find_image("base")
    start(
        bench,
        openstack_cloud,
        provider(
            label("by-id", cloud_image="id"),
            label("by-name", cloud_image="name"),
            label("windows", cloud_image="windows"),
            cloud_images=[
                {"name": "id", "image-id": image.id},
                {"name": "name", "image-name": "base", "username": "u"},
                {"name": "windows", "image-name": "base", "connection-type": "winrm"},
            ],
        ),
    )
    for name, username, port in (
        ("by-id", None, 22),
        ("by-name", "u", 22),
        ("windows", None, 5986),
    ):
        _, node = one(bench, name)
        assert openstack_cloud.server(node.external_id)["image"]["id"] == image.id
        assert (node.username, node.connection_port) == (username, port)


@slow
@pytest.mark.spec("OST-3.19: availability-zones is honoured, of pool and label")
def test_availability_zones_of_pool_and_label_are_used(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    start(
        bench,
        openstack_cloud,
        provider(
            label("pool-zone"),
            label("own-zone", availability_zones=["nova"]),
            label("bad-zone", availability_zones=["moon"]),
            pool={"availability-zones": ["nova"]},
        ),
    )
    for name in ("pool-zone", "own-zone"):
        _, node = one(bench, name)
        assert node.az == "nova"
    assert {body["server"]["availability_zone"] for body in requests_of(openstack_cloud)} == {
        "nova"
    }
    failed(bench, "bad-zone")


@slow
@pytest.mark.spec("OST-2.2: flavors by min-ram and part of the name")
def test_flavors_are_found_by_min_ram_and_name(
    bench: LauncherBench, openstack_cloud: OpenStackCloud
) -> None:
    start(
        bench,
        openstack_cloud,
        provider(
            label("ram", min_ram=1000),
            label("both", min_ram=100, flavor_name="medi"),
            label("name", flavor_name="large"),
        ),
    )
    for name, resources in (("ram", (1, 2048)), ("both", (2, 4096)), ("name", (4, 8192))):
        _, node = one(bench, name)
        assert (node.resources["cores"], node.resources["ram"]) == resources

"""What is left over in a real OpenStack is found and removed (OST-2.6)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, StatsdReceiver
from tests.support.node_ids import spend_node_ids
from tests.support.openstack.cloud import OpenStackCloud
from tests.support.openstack.scene import cleanup, label, manager, one, provider, start

pytestmark = pytest.mark.openstack
slow = pytest.mark.slow
MARKS = {
    "nodepool_provider_name": "cloud-1",
    "nodepool_node_id": "0000000042",
    "nodepool_pool_name": "main",
}


def server(cloud: OpenStackCloud, **metadata: str) -> Any:
    body = {
        "server": {
            "name": "np0000000042",
            "flavorRef": cloud.sdk.compute.find_flavor("tiny").id,
            "imageRef": cloud.sdk.image.find_image("base").id,
            "networks": [{"uuid": cloud.network_id("private")}],
            "metadata": metadata,
        }
    }
    answer = cloud.sdk.compute.post("/servers", json=body)
    assert answer.status_code == 202, answer.text
    server_id = answer.json()["server"]["id"]
    wait_for(lambda: cloud.server(server_id)["status"] == "ACTIVE", 60, "server active")
    return server_id


@pytest.mark.spec("OST-3.22: a leaked server is removed at the second sighting and counted")
@pytest.mark.core
def test_leaked_server_is_deleted_at_the_second_sighting(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    spend_node_ids(bench.zk)
    start(bench, openstack_cloud)
    _, node = one(bench)
    leaked = server(openstack_cloud, **MARKS)
    others = server(openstack_cloud, **{**MARKS, "nodepool_provider_name": "other"})
    cleanup(bench)
    assert openstack_cloud.server(leaked)["status"] == "ACTIVE"
    cleanup(bench)
    wait_for(
        lambda: {item["id"] for item in openstack_cloud.servers()} == {node.external_id, others},
        30,
        "the leak is gone",
    )
    statsd.wait("nodepool.provider.cloud-1.leaked.instances", "1|c")


@slow
def test_only_leaked_floating_ips_are_deleted(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    """Those whose server vanished; not those of others."""
    spend_node_ids(bench.zk)
    start(bench, openstack_cloud, provider(pool={"auto-floating-ip": True}))
    _, node = one(bench)
    network = openstack_cloud.network_id("external")
    create = openstack_cloud.sdk.network.create_ip
    create(
        floating_network_id=network,
        description="nodepool: " + " ".join(f"{k}={v}" for k, v in MARKS.items()),
    )
    foreign = create(floating_network_id=network, description="somebody's")
    cleanup(bench, 2)
    left = {ip.id: ip.floating_ip_address for ip in openstack_cloud.floating_ips()}
    assert sorted(left.values()) == sorted([node.public_ipv4, foreign.floating_ip_address])
    statsd.wait("nodepool.provider.cloud-1.leaked.floatingips", "1|c")


@slow
@pytest.mark.spec("OST-2.6: clean-floating-ips removes all unattached floating IPs of the project")
def test_clean_floating_ips(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    start(
        bench, openstack_cloud, provider(pool={"auto-floating-ip": True}, clean_floating_ips=True)
    )
    _, node = one(bench)
    for _ in range(2):
        openstack_cloud.sdk.network.create_ip(
            floating_network_id=openstack_cloud.network_id("external")
        )
    cleanup(bench)
    assert [ip.floating_ip_address for ip in openstack_cloud.floating_ips()] == [node.public_ipv4]
    statsd.wait("nodepool.provider.cloud-1.leaked.floatingips", "2|c")


@slow
@pytest.mark.spec("OST-3.22: DOWN ports are removed after two sightings and the interval")
def test_down_ports_are_removed_after_two_sightings(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    start(bench, openstack_cloud, provider(port_cleanup_interval=1))
    one(bench)
    network = openstack_cloud.sdk.network
    ports = [
        network.create_port(network_id=openstack_cloud.network_id("private")) for _ in range(2)
    ]
    leaks = manager(bench).adapter.leaks
    cleanup(bench)
    assert {port.id for port in ports} <= leaks.down_ports
    leaks.last_port_cleanup -= 1
    kept = network.create_port(network_id=openstack_cloud.network_id("private"))
    try:
        cleanup(bench)
        assert not {port.id for port in ports} & {port.id for port in network.ports()}
        assert kept.id in {port.id for port in network.ports()}
    finally:
        network.delete_port(kept)
    statsd.wait("nodepool.provider.cloud-1.leaked.ports", "2|c")


@slow
def test_only_leaked_volumes_are_deleted(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    spend_node_ids(bench.zk)
    start(bench, openstack_cloud, provider(label(boot_from_volume=True, volume_size=2)))
    one(bench)
    storage = openstack_cloud.sdk.block_storage
    leaked = storage.create_volume(size=1, metadata=MARKS)
    foreign = storage.create_volume(size=1)
    for volume in (leaked, foreign):
        storage.wait_for_status(volume, "available", interval=0.3, wait=60)
    cleanup(bench, 2)
    wait_for(
        lambda: leaked.id not in {volume.id for volume in openstack_cloud.volumes()},
        30,
        "the leaked volume is gone",
    )
    assert {volume.size for volume in openstack_cloud.volumes()} == {1, 2}
    statsd.wait("nodepool.provider.cloud-1.leaked.volumes", "1|c")


@slow
def test_only_images_without_upload_record_are_deleted(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, statsd: StatsdReceiver
) -> None:
    """An image without upload record; one with a record stays, so does a protected one."""
    spend_node_ids(bench.zk)
    top = {"diskimages": [{"name": "disk"}]}
    start(
        bench,
        openstack_cloud,
        provider(label(), label("disk", diskimage="disk"), diskimages=[{"name": "disk"}]),
        top=top,
    )

    def image(name: str, **values: Any) -> Any:
        return openstack_cloud.sdk.image.create_image(
            name=name,
            data=b"x" * 100,
            disk_format="raw",
            container_format="bare",
            allow_duplicates=True,
            validate_checksum=False,
            nodepool_provider_name="cloud-1",
            nodepool_upload_id=values.pop("upload", "0000000001"),
            nodepool_build_id=values.pop("build", "0000000009"),
            **values,
        )

    known = bench.store_image("disk", "cloud-1")
    kept = image("known", build=known.build_id, upload=known.id)
    protected = image("protected", is_protected=True)
    image("leaked")
    cleanup(bench, 2)
    assert {item.id for item in openstack_cloud.images()} == {kept.id, protected.id}
    statsd.wait("nodepool.provider.cloud-1.leaked.images", "1|c")

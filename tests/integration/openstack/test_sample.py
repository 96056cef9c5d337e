"""The sample that operators begin with, etc/openstack.yaml, works as it is (manual,
"OpenStack").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from nodepool.cmd.config_validator import ConfigValidator
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.launcher import LauncherBench
from tests.support.openstack.cloud import OpenStackCloud
from tests.support.openstack.scene import Zone, one, use_up

pytestmark = [pytest.mark.openstack, pytest.mark.slow, pytest.mark.timeout(400)]
SAMPLE = REPOSITORY / "etc" / "openstack.yaml"


@pytest.fixture
def prepared(openstack_cloud: OpenStackCloud) -> Iterator[None]:
    """What the sample names is in the project, as the manual says."""
    admin, sdk = openstack_cloud.admin, openstack_cloud.sdk
    with contextlib.ExitStack() as later:
        flavor = admin.compute.create_flavor(name="m1.small", vcpus=1, ram=2048, disk=20)
        later.callback(admin.compute.delete_flavor, flavor)
        kind = admin.block_storage.create_type(name="ssd")
        later.callback(admin.block_storage.delete_type, kind)
        zone = Zone(admin, "az1")
        later.callback(zone.remove)
        network = sdk.network.create_network(name="ci")
        later.callback(sdk.network.delete_network, network)
        sdk.network.create_subnet(network_id=network.id, ip_version=4, cidr="10.98.0.0/24")
        group = sdk.network.create_security_group(name="ssh-from-executors")
        later.callback(sdk.network.delete_security_group, group)
        key = sdk.compute.create_keypair(
            name="nodepool", public_key=sdk.compute.find_keypair("key").public_key
        )
        later.callback(sdk.compute.delete_keypair, key)
        sdk.compute.create_server_group(name="ci-spread", policies=["soft-anti-affinity"])
        sdk.image.create_image(
            name="Debian 12",
            data=b"x" * 100,
            disk_format="raw",
            container_format="bare",
            validate_checksum=False,
        )
        later.callback(openstack_cloud.clean)
        yield


def test_sample_validates() -> None:
    assert ConfigValidator(str(SAMPLE)).validate() == 0


def test_sample_launches(
    bench: LauncherBench, openstack_cloud: OpenStackCloud, prepared: None
) -> None:
    """Only ZooKeeper, the images' directory and the check of host keys (no system is inside) are
    others.
    """
    content: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    del content["zookeeper-servers"], content["zookeeper-tls"]
    content["images-dir"] = str(bench.tmp / "images")
    content["providers"][0]["pools"][0]["host-key-checking"] = False
    image = openstack_cloud.sdk.image.find_image("Debian 12")
    bench.store_image("debian-12", "mycloud-west", external_id=image.id)
    bench.write_clouds({"clouds": {"mycloud": {**openstack_cloud.entry, "region_name": "west"}}})
    pool = bench.start(content, cleanup_interval=600)
    (ready,) = bench.wait_nodes(1, timeout=90, state="ready")
    assert (ready.type, ready.cloud, ready.region, ready.username) == (
        ["debian-small"],
        "mycloud",
        "west",
        "zuul",
    )
    small, node = one(bench, "debian-small")
    assert node.id == ready.id
    server = openstack_cloud.server(node.external_id)
    assert (server["key_name"], list(server["addresses"])) == ("nodepool", ["ci"])
    assert [group["name"] for group in server["security_groups"]] == ["ssh-from-executors"]
    assert node.interface_ip == node.private_ipv4

    large, node = one(bench, "debian-large")
    server = openstack_cloud.server(node.external_id)
    assert (node.az, node.username, node.resources["volume-gb"]) == ("az1", "debian", 80)
    assert server["metadata"]["purpose"] == "ci"
    (volume,) = openstack_cloud.volumes()
    assert (volume.size, volume.volume_type) == (80, "ssd")
    (group,) = openstack_cloud.sdk.compute.server_groups()
    assert node.external_id in group.member_ids
    assert pool.problems() == []
    use_up(bench, small, large)
    bench.stop(pool)
    wait_for(lambda: not openstack_cloud.volumes(), 60, "no volume left")

"""Create the initial content of the cloud of tools/openstack: content.py identities|content DIR."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import openstack
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

PATHS = {
    "compute": ("nova", "/v2.1"),
    "network": ("neutron", ""),
    "image": ("glance", ""),
    "placement": ("placement", ""),
    "block-storage": ("cinder", "/v3/%(tenant_id)s"),
}
FLAVORS = {
    "tiny": (1, 512, 1),
    "small": (1, 2048, 10),
    "medium": (2, 4096, 20),
    "large": (4, 8192, 40),
}
DEADLINE = 120


def identities(cloud: Any, state: dict[str, Any]) -> None:
    """Create the catalog, and the project and the user of tests."""
    known = {(service.type, service.name) for service in cloud.identity.services()}
    for kind, (name, path) in PATHS.items():
        if (kind, name) not in known:
            service = cloud.identity.create_service(name=name, type=kind)
            cloud.identity.create_endpoint(
                service_id=service.id,
                interface="public",
                region_id=cloud.config.get_region_name(),
                url=f"http://127.0.0.1:{state['ports'][name]}{path}",
            )
    project = cloud.identity.find_project("nodepool") or cloud.identity.create_project(
        name="nodepool", domain_id="default"
    )
    user = cloud.identity.find_user("nodepool") or cloud.identity.create_user(
        name="nodepool",
        password=state["password"],
        domain_id="default",
        default_project_id=project.id,
    )
    for role in ("member", "reader"):
        found = cloud.identity.find_role(role)
        cloud.identity.assign_project_role_to_user(project, user, found)
    # The services act as the administrator.
    cloud.identity.assign_project_role_to_user(
        cloud.identity.find_project("admin"),
        cloud.identity.find_user("admin"),
        cloud.identity.find_role("service"),
    )


def content(cloud: Any, admin: Any) -> None:
    """Create flavors, networks and an image.

    Waits until the stand-ins of the network's agents have reported.
    """
    deadline = time.monotonic() + DEADLINE
    while sum(agent.is_alive for agent in admin.network.agents()) < 2:
        if time.monotonic() > deadline:
            sys.exit(f"no network agents within {DEADLINE} s: see logs/agents.log")
        time.sleep(0.3)
    for name, (cores, ram, disk) in FLAVORS.items():
        if not admin.compute.find_flavor(name):
            admin.compute.create_flavor(name=name, vcpus=cores, ram=ram, disk=disk)
    external = admin.network.find_network("external") or admin.network.create_network(
        name="external",
        is_router_external=True,
        provider_network_type="flat",
        provider_physical_network="external",
    )
    if not admin.network.find_subnet("external4"):
        admin.network.create_subnet(
            name="external4",
            network_id=external.id,
            ip_version=4,
            cidr="203.0.113.0/24",
            is_dhcp_enabled=False,
        )
    private = cloud.network.find_network("private") or cloud.network.create_network(name="private")
    subnet = cloud.network.find_subnet("private4") or cloud.network.create_subnet(
        name="private4", network_id=private.id, ip_version=4, cidr="10.11.0.0/16"
    )
    if not cloud.network.find_network("dual"):
        dual = cloud.network.create_network(name="dual")
        cloud.network.create_subnet(
            name="dual4", network_id=dual.id, ip_version=4, cidr="10.12.0.0/16"
        )
        cloud.network.create_subnet(
            name="dual6",
            network_id=dual.id,
            ip_version=6,
            cidr="2001:db8:12::/64",
            ipv6_address_mode="slaac",
            ipv6_ra_mode="slaac",
        )
    if not cloud.network.find_router("router"):
        router = cloud.network.create_router(
            name="router", external_gateway_info={"network_id": external.id}
        )
        cloud.network.add_interface_to_router(router, subnet_id=subnet.id)
    if not cloud.image.find_image("base"):
        image = cloud.image.create_image(
            name="base", container_format="bare", disk_format="raw", data=b"\0" * 65536
        )
        cloud.image.wait_for_status(
            image, "active", failures=["killed"], interval=0.2, wait=DEADLINE
        )
    if not cloud.compute.find_keypair("key"):
        public = (
            ed25519.Ed25519PrivateKey.generate()
            .public_key()
            .public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        )
        cloud.compute.create_keypair(name="key", public_key=public.decode())


def main() -> None:
    what, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    state = json.loads((directory / "state.json").read_text())
    config = openstack.config.OpenStackConfig(config_files=[str(directory / "clouds.yaml")])
    admin = openstack.connection.Connection(config=config.get_one("admin"))
    if what == "identities":
        identities(admin, state)
    else:
        content(openstack.connection.Connection(config=config.get_one("test")), admin)


if __name__ == "__main__":
    main()

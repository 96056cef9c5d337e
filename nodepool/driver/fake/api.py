"""The fake cloud's API for the OpenStack driver; answers are never cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodepool.driver.fake.cloud import FakeOpenStackCloud
from nodepool.driver.openstack.api.client import CloudApi
from nodepool.driver.openstack.api.networks import Networks, Rules


class FakeNetworks(Networks):
    """Networks of the fake cloud: any name is valid."""

    def find(self, name: str | None) -> dict[str, Any] | None:
        return super().find(name) or (self.all[0] if name else None)


def _same(name: str) -> Callable[..., Any]:
    """Return a call of the cloud's method at call time: tests replace them at runtime."""

    def call(self: FakeApi, *args: object, **kw: object) -> Any:
        return getattr(self.cloud, name)(*args, **kw)

    return call


class FakeApi(CloudApi):
    """Replaces every call of the OpenStack driver."""

    def __init__(self, cloud: FakeOpenStackCloud) -> None:
        self.cloud = cloud

    def close(self) -> None:
        pass

    def has(self, service: str) -> bool:
        return True

    def project(self) -> str:
        return "fake"

    # -- servers

    create_server = _same("create_server")
    list_servers = _same("list_servers")
    delete_server = _same("delete_server")
    get_server_console = _same("get_server_console")

    def get_server_by_id(self, server_id: str, repeat: bool = True) -> Any:
        return self.cloud.get_server_by_id(server_id)

    def find_servers(self, name: str) -> list[Any]:
        return [server for server in self.cloud.list_servers() if server.get("name") == name]

    def expand_server(self, server: object, networks: Networks) -> Any:
        return server

    def get_server_group(self, name_or_id: str) -> Any:
        return {"id": name_or_id, "name": name_or_id}

    # -- inputs of servers

    list_flavors = _same("list_flavors")
    list_availability_zone_names = _same("list_availability_zone_names")
    get_compute_limits = _same("get_compute_limits")

    # -- volumes

    get_volume_limits = _same("get_volume_limits")
    list_volumes = _same("list_volumes")

    def tag_volume(self, volume_id: str, metadata: dict[str, Any]) -> None:
        for volume in self.cloud.list_volumes():
            if volume["id"] == volume_id:
                volume["metadata"] = metadata

    def delete_volume(self, volume_id: str) -> bool:
        raise NotImplementedError  # deleted with their servers

    # -- images

    get_image = _same("get_image")
    create_image = _same("create_image")
    delete_image = _same("delete_image")

    def list_images(self, **filters: object) -> list[Any]:
        return self.cloud.list_images()

    def discard_image(self, image_id: str, delete: Callable[[str], Any] | None = None) -> None:
        (delete or self.delete_image)(image_id)

    # -- networks

    delete_port = _same("delete_port")

    def list_networks(self) -> Networks:
        return FakeNetworks(Rules(), self.cloud.networks)

    def list_ports(self, filters: dict[str, Any] | None = None) -> list[Any]:
        return self.cloud.list_ports(filters=filters)

    def ports_of(self, server_id: str) -> list[Any]:
        return self.list_ports({"device_id": server_id})

    # -- floating IPs

    has_floating_ips = _same("_has_floating_ips")
    list_floating_ips = _same("list_floating_ips")
    delete_floating_ip = _same("delete_floating_ip")
    delete_unattached_floating_ips = _same("delete_unattached_floating_ips")

    def needs_floating_ip(self, server: Any, networks: Networks) -> bool:
        return self.cloud._needs_floating_ip(server)

    def create_floating_ip(self, server: Any, networks: Networks) -> Any:
        return self.cloud.create_floating_ip(server=server, wait=True)

    def get_floating_ip_by_id(self, floating_ip_id: str) -> Any:
        return next(
            (
                address
                for address in self.cloud.list_floating_ips()
                if address["id"] == floating_ip_id
            ),
            None,
        )

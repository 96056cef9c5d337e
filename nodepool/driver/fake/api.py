"""The fake cloud as the OpenStack driver asks it: each answer is the cloud's own of that moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodepool.driver.fake.cloud import FakeOpenStackCloud
from nodepool.driver.openstack.networks import Networks, Rules


class FakeNetworks(Networks):
    """Any name is that of a network."""

    def find(self, name: str | None) -> dict[str, Any] | None:
        return super().find(name) or (self.all[0] if name else None)


class FakeApi:
    """Calls the cloud by the names of the SDK's cloud layer, which tests replace while it runs."""

    def __init__(self, cloud: FakeOpenStackCloud) -> None:
        self.cloud = cloud

    def close(self) -> None:
        pass

    def has(self, service: str) -> bool:
        return True

    def project(self) -> str:
        return "fake"

    # -- servers

    def create_server(self, *args: Any, **kw: Any) -> Any:
        return self.cloud.create_server(*args, **kw)

    def get_server_by_id(self, server_id: str, repeat: bool = True) -> Any:
        return self.cloud.get_server_by_id(server_id)

    def list_servers(self) -> list[Any]:
        return self.cloud.list_servers()

    def find_servers(self, name: str) -> list[Any]:
        return [server for server in self.list_servers() if server.get("name") == name]

    def delete_server(self, server_id: str) -> bool:
        return self.cloud.delete_server(server_id)

    def expand_server(self, server: Any, networks: Networks) -> Any:
        return server

    def get_server_console(self, server_id: str) -> str | None:
        return self.cloud.get_server_console(server_id)

    def get_server_group(self, name_or_id: str) -> Any:
        return {"id": name_or_id, "name": name_or_id}

    # -- what servers are made of

    def list_flavors(self) -> list[Any]:
        return self.cloud.list_flavors(get_extra=False)

    def list_availability_zone_names(self) -> list[str]:
        return self.cloud.list_availability_zone_names()

    def get_compute_limits(self) -> Any:
        return self.cloud.get_compute_limits()

    # -- volumes

    def get_volume_limits(self) -> Any:
        return self.cloud.get_volume_limits()

    def list_volumes(self) -> list[Any]:
        return self.cloud.list_volumes()

    def tag_volume(self, volume_id: str, metadata: dict[str, Any]) -> None:
        for volume in self.list_volumes():
            if volume["id"] == volume_id:
                volume["metadata"] = metadata

    def delete_volume(self, volume_id: str) -> bool:
        raise NotImplementedError  # servers take theirs with them

    # -- images

    def list_images(self, **filters: Any) -> list[Any]:
        return self.cloud.list_images()

    def get_image(self, name_or_id: str, filters: dict[str, Any] | None = None) -> Any:
        return self.cloud.get_image(name_or_id, filters=filters)

    def create_image(self, *args: Any, **kw: Any) -> Any:
        return self.cloud.create_image(*args, **kw)

    def delete_image(self, image_id: str) -> bool:
        return self.cloud.delete_image(image_id)

    def discard_image(self, image_id: str, delete: Callable[[str], Any] | None = None) -> None:
        (delete or self.delete_image)(image_id)

    # -- networks

    def list_networks(self) -> Networks:
        return FakeNetworks(Rules(), self.cloud.networks)

    def list_ports(self, filters: dict[str, Any] | None = None) -> list[Any]:
        return self.cloud.list_ports(filters=filters)

    def ports_of(self, server_id: str) -> list[Any]:
        return self.list_ports({"device_id": server_id})

    def delete_port(self, port_id: str) -> bool:
        return self.cloud.delete_port(port_id)

    # -- floating IPs

    def has_floating_ips(self) -> bool:
        return self.cloud._has_floating_ips()

    def needs_floating_ip(self, server: Any, networks: Networks) -> bool:
        return self.cloud._needs_floating_ip(server)

    def create_floating_ip(self, server: Any, networks: Networks) -> Any:
        return self.cloud.create_floating_ip(server=server, wait=True)

    def get_floating_ip_by_id(self, floating_ip_id: str) -> Any:
        return next((address for address in self.list_floating_ips() if address["id"] == floating_ip_id), None)

    def list_floating_ips(self) -> list[Any]:
        return self.cloud.list_floating_ips()

    def delete_floating_ip(self, floating_ip_id: str) -> bool:
        return self.cloud.delete_floating_ip(floating_ip_id)

    def delete_unattached_floating_ips(self) -> int:
        return int(self.cloud.delete_unattached_floating_ips())

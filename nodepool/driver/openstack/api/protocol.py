"""Interface of a cloud for the driver, implemented by api.py and driver/fake/api.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nodepool.driver.openstack.api.networks import Networks
from nodepool.driver.openstack.servers import NodepoolOpenStackServer


class Api(Protocol):
    """Objects are mappings with the keys of OpenStack's JSON.

    A query by id returns None, and a deletion False, when the object does not exist."""

    def close(self) -> None: ...

    def has(self, service: str) -> bool:
        """Return whether the cloud has the service (``network``, ``block_storage``)."""

    def project(self) -> str:
        """Return the id of our project."""

    # -- servers

    def create_server(
        self, name: str, image: Mapping[str, Any], flavor: Mapping[str, Any], config_drive: bool | None = None,
        wait: bool = False,
        boot_from_volume: bool = False, volume_size: int = 50, terminate_volume: bool = True, volume_type: str | None = None,
        key_name: str | None = None, availability_zone: str | None = None, security_groups: list[str] | None = None,
        userdata: str | None = None, nics: list[dict[str, str]] | None = None, meta: dict[str, Any] | None = None,
        scheduler_hints: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Start a server; the answer has little more than its id."""

    def get_server_by_id(self, server_id: str, repeat: bool = True) -> Any:
        """Return the current server.

        :param repeat: retry after errors; not needed when the caller polls anyway.
        """

    def list_servers(self) -> list[Any]: ...
    def find_servers(self, name: str) -> list[Any]: ...
    def delete_server(self, server_id: str) -> bool: ...

    def expand_server(self, server: NodepoolOpenStackServer, networks: Networks) -> Any:
        """Return the server with its addresses."""

    def get_server_console(self, server_id: str) -> str | None: ...
    def get_server_group(self, name_or_id: str) -> Any: ...

    # -- inputs of servers

    def list_flavors(self) -> list[Any]:
        """Return the flavors, whose values are also attributes."""

    def list_availability_zone_names(self) -> list[str]: ...
    def get_compute_limits(self) -> Any: ...

    # -- volumes

    def get_volume_limits(self) -> Any:
        """Return the limits; None without a volume service."""

    def list_volumes(self) -> list[Any]: ...
    def tag_volume(self, volume_id: str, metadata: dict[str, Any]) -> None: ...
    def delete_volume(self, volume_id: str) -> bool: ...

    # -- images

    def list_images(self, **filters: object) -> list[Any]:
        """Return the images; our own properties are also in the mapping ``properties``."""

    def get_image(self, name_or_id: str, filters: dict[str, Any] | None = None) -> Any: ...

    def create_image(
        self, name: str, filename: str, disk_format: str, md5: str | None = None, sha256: str | None = None,
        timeout: float = 3600, wait: bool = True, is_public: bool = False, **metadata: dict[str, str],
    ) -> Any:  # fmt: skip
        """Upload the file and wait until the image is active. A failure leaves no image."""

    def delete_image(self, image_id: str) -> bool: ...

    def discard_image(self, image_id: str, delete: Callable[[str], Any] | None = None) -> None:
        """Delete the remains of an unfinished upload, also when it is protected.

        :param delete: instead of :meth:`delete_image`.
        """

    # -- networks

    def list_networks(self) -> Networks: ...
    def list_ports(self, filters: dict[str, Any] | None = None) -> list[Any]: ...
    def ports_of(self, server_id: str) -> list[Any]: ...
    def delete_port(self, port_id: str) -> bool: ...

    # -- floating IPs

    def has_floating_ips(self) -> bool: ...
    def needs_floating_ip(self, server: NodepoolOpenStackServer, networks: Networks) -> bool: ...

    def create_floating_ip(self, server: NodepoolOpenStackServer, networks: Networks) -> Any:
        """Create a floating IP with the server's tags; None when no port can have one."""

    def get_floating_ip_by_id(self, floating_ip_id: str) -> Any: ...
    def list_floating_ips(self) -> list[Any]: ...
    def delete_floating_ip(self, floating_ip_id: str) -> bool: ...

    def delete_unattached_floating_ips(self) -> int:
        """Delete them, also those of others in the project; return how many there were."""

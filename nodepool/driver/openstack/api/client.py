"""Requests of the driver to OpenStack: few and small.

The names are those of the SDK's cloud layer; most methods are one call (and its pages).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from nodepool.cloud import ErrorKind
from nodepool.driver.openstack.api.errors import classify
from nodepool.driver.openstack.api.images import ImageApi
from nodepool.driver.openstack.api.networks import (
    FIXED,
    Networks,
    Rules,
    addresses,
    fill_in,
    has_floating,
)
from nodepool.driver.openstack.servers import NodepoolOpenStackServer

FIP_TAG = "nodepool:"
"""Start of the description of the floating IPs that we create:
``nodepool: key=value key=value``.
"""
NETWORKS_AUTO = (2, 37)
"""Compute microversion from which a server must explicitly ask for the existing networks."""
VOLUME_TYPE = (2, 67)
AGAIN = (0.5, 2.0, 5.0)
"""Pauses in seconds between attempts to create a floating IP."""


class CloudApi(ImageApi):
    """Client whose calls are named by purpose, as in the metrics.

    Objects are mappings with the keys of OpenStack's JSON. A query by id returns None, and a
    deletion False, when the object does not exist. The driver ``fake`` replaces all methods of this
    class.
    """

    def close(self) -> None:
        self.client.close()

    # -- servers

    def create_server(
        self,
        name: str,
        image: Mapping[str, Any],
        flavor: Mapping[str, Any],
        config_drive: bool | None = None,
        boot_from_volume: bool = False,
        volume_size: int = 50,
        volume_type: str | None = None,
        key_name: str | None = None,
        availability_zone: str | None = None,
        security_groups: list[str] | None = None,
        userdata: str | None = None,
        nics: list[dict[str, str]] | None = None,
        meta: dict[str, Any] | None = None,
        scheduler_hints: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Start a server; the answer has little more than its id. One call, never repeated."""
        body: dict[str, Any] = {
            "name": name,
            "flavorRef": flavor["id"],
            "imageRef": image["id"],
            "min_count": 1,
            "max_count": 1,
        }
        version: tuple[int, int] | None = None
        if boot_from_volume:
            volume = {
                "boot_index": 0,
                "source_type": "image",
                "destination_type": "volume",
                "uuid": image["id"],
                "volume_size": volume_size,
                "delete_on_termination": True,
            }
            if volume_type:
                volume["volume_type"] = volume_type
                version = VOLUME_TYPE
            body.update(imageRef="", block_device_mapping_v2=[volume])
        optional = {
            "config_drive": config_drive,
            "key_name": key_name,
            "availability_zone": availability_zone,
            "security_groups": [{"name": group} for group in security_groups or ()],
            "user_data": base64.b64encode(userdata.encode()).decode() if userdata else None,
            "networks": [{"uuid": nic["net-id"]} for nic in nics or ()],
            "metadata": {key: str(value) for key, value in (meta or {}).items()},
        }
        body.update({key: value for key, value in optional.items() if value})
        if "networks" not in body:
            version = version or (
                NETWORKS_AUTO if self._compute_version() >= NETWORKS_AUTO else None
            )
            if version:
                body["networks"] = "auto"
        request: dict[str, Any] = {"server": body}
        if scheduler_hints:
            request["os:scheduler_hints"] = scheduler_hints
        more: dict[str, Any] = {"microversion": "{}.{}".format(*version)} if version else {}
        return self.single(
            "create_server",
            "compute",
            "/servers",
            "server",
            "POST",
            lane="write",
            json=request,
            **more,
        )

    def _compute_version(self) -> tuple[int, int]:
        """Return compute's newest microversion from its version document; (0, 0): none."""
        data = self.service("compute").get_endpoint_data()
        version = getattr(data, "max_microversion", None)
        return (int(version[0]), int(version[1])) if version else (0, 0)

    def get_server_by_id(self, server_id: str, repeat: bool = True) -> dict[str, Any] | None:
        """Return the current server; None when it does not exist.

        :param repeat: retry after errors; not needed when the caller polls anyway.
        """
        return self.find(
            "get_server", "compute", f"/servers/{server_id}", "server", idempotent=repeat
        )

    def list_servers(self) -> list[NodepoolOpenStackServer]:
        """Return all servers of the project, without filters and SDK objects, which are slow."""
        return [
            NodepoolOpenStackServer(item)
            for item in self.many("list_servers", "compute", "/servers/detail", "servers")
        ]

    def expand_server(self, server: NodepoolOpenStackServer, networks: Networks) -> Any:
        """Return the server with its addresses."""
        return fill_in(NodepoolOpenStackServer(server), networks)

    def find_servers(self, name: str) -> list[dict[str, Any]]:
        return self.many(
            "find_server", "compute", "/servers/detail", "servers", {"name": f"^{name}$"}
        )

    def delete_server(self, server_id: str) -> bool:
        """Delete the server; return False when it does not exist."""
        return self.delete("delete_server", "compute", f"/servers/{server_id}", lane="delete")

    def get_server_console(self, server_id: str) -> str | None:
        answer = self.request(
            "get_console",
            "compute",
            "POST",
            f"/servers/{server_id}/action",
            wanted="output",
            idempotent=True,
            json={"os-getConsoleOutput": {}},
        )
        return str(answer["output"])

    def get_server_group(self, name_or_id: str) -> dict[str, Any] | None:
        groups = self.many("list_server_groups", "compute", "/os-server-groups", "server_groups")
        return next((group for group in groups if name_or_id in (group["id"], group["name"])), None)

    # -- inputs of servers

    def list_flavors(self) -> list[dict[str, Any]]:
        return self.many("list_flavors", "compute", "/flavors/detail", "flavors")

    def list_availability_zone_names(self) -> list[str]:
        zones = self.many("list_zones", "compute", "/os-availability-zone", "availabilityZoneInfo")
        return [
            zone["zoneName"] for zone in zones if (zone.get("zoneState") or {}).get("available")
        ]

    def get_compute_limits(self) -> dict[str, Any]:
        limits = self.single("limits", "compute", "/limits", "limits").get("absolute") or {}
        return {
            "max_total_cores": limits.get("maxTotalCores"),
            "max_total_instances": limits.get("maxTotalInstances"),
            "max_total_ram_size": limits.get("maxTotalRAMSize"),
        }

    # -- volumes

    def get_volume_limits(self) -> dict[str, Any] | None:
        """Return the limits; None without a volume service."""
        if not self.has("block_storage"):
            return None
        return self.single("volume_limits", "block_storage", "/limits", "limits")

    def list_volumes(self) -> list[dict[str, Any]]:
        if not self.has("block_storage"):
            return []
        return self.many("list_volumes", "block_storage", "/volumes/detail", "volumes")

    def tag_volume(self, volume_id: str, metadata: dict[str, Any]) -> None:
        self.request(
            "tag_volume",
            "block_storage",
            "POST",
            f"/volumes/{volume_id}/metadata",
            idempotent=True,
            json={"metadata": {key: str(value) for key, value in metadata.items()}},
        )

    def delete_volume(self, volume_id: str) -> bool:
        return self.delete("delete_volume", "block_storage", f"/volumes/{volume_id}")

    # -- images

    def list_images(self, **filters: object) -> list[dict[str, Any]]:
        """Return the images; our own properties are also in the mapping ``properties``."""
        images = self.many("list_images", "image", "/images", "images", filters)
        for image in images:
            image["properties"] = {
                key: value for key, value in image.items() if key.startswith("nodepool_")
            }
        return images

    def get_image(
        self, name_or_id: str, filters: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Return the image with that id, or the newest with that name."""
        found = self.many(
            "find_image", "image", "/images", "images", {"name": name_or_id, **(filters or {})}
        )
        if len(found) > 1:
            self.log.info(
                "%s images of cloud %s have the name %s, taking the newest",
                len(found),
                self.provider.cloud_config.name,
                name_or_id,
            )
        if found:
            return max(found, key=lambda image: str(image.get("created_at") or ""))
        if not _is_uuid(name_or_id):
            return None
        image: dict[str, Any] | None = self.request(
            "get_image", "image", "GET", f"/images/{name_or_id}", wanted="id", missing_ok=True
        )
        return (
            image
            if image and all(image.get(key) == value for key, value in (filters or {}).items())
            else None
        )

    # -- networks

    def list_networks(self) -> Networks:
        """Return all networks, in the roles that clouds.yaml assigns."""
        listed: Iterable[dict[str, Any]] = ()
        if self.has("network"):
            listed = self.many("list_networks", "network", "/networks", "networks")
        return Networks(Rules.of(self.client), list(listed))

    def list_ports(self, filters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        return self.many(
            "list_ports",
            "network",
            "/ports",
            "ports",
            {"project_id": self.project(), **(filters or {})},
        )

    def ports_of(self, server_id: str) -> list[dict[str, Any]]:
        return self.many("find_ports", "network", "/ports", "ports", {"device_id": server_id})

    def delete_port(self, port_id: str) -> bool:
        return self.delete("delete_port", "network", f"/ports/{port_id}")

    def project(self) -> str:
        """Return our project: an administrator would also see objects of others."""
        return str(self.client.session.get_project_id())

    # -- floating IPs

    def has_floating_ips(self) -> bool:
        return bool(self.client._has_floating_ips()) and self.has("network")

    def needs_floating_ip(self, server: NodepoolOpenStackServer, networks: Networks) -> bool:
        """Return whether the server has fixed addresses only, on a cloud with floating ones."""
        if (
            not self.has_floating_ips()
            or has_floating(server)
            or server.get("public_v4")
            or networks.rules.private
        ):
            return False
        return bool(
            networks.floating and (server.get("private_v4") or addresses(server, kind=FIXED))
        )

    def create_floating_ip(
        self, server: NodepoolOpenStackServer, networks: Networks
    ) -> dict[str, Any] | None:
        """Create a floating IP with the server's tags; None when no port can have one."""
        port, source = self._port_for_floating_ip(server, networks), networks.floating
        if port is None or source is None:
            return None
        return self._create_floating_ip_at(source["id"], *port, server.get("metadata") or {})

    def _port_for_floating_ip(
        self, server: NodepoolOpenStackServer, networks: Networks
    ) -> tuple[str, str] | None:
        """Return the port and its address for the floating IP."""
        ports = self.ports_of(server["id"])
        if networks.rules.nat_destination:
            target = networks.find(networks.rules.nat_destination)
            ports = [port for port in ports if target and port["network_id"] == target["id"]]
        external = {net["id"] for net in networks.external}
        for port in sorted(ports, key=lambda port: str(port.get("created_at") or ""), reverse=True):
            if port["network_id"] in external:
                continue
            for fixed in port.get("fixed_ips") or ():
                if ":" not in (fixed.get("ip_address") or ":"):
                    return port["id"], fixed["ip_address"]
        return None

    def _create_floating_ip_at(
        self, network_id: str, port_id: str, address: str, metadata: dict[str, str]
    ) -> dict[str, Any]:
        description = " ".join(
            [
                FIP_TAG,
                *(
                    f"{key}={quote(str(value), safe='')}"
                    for key, value in metadata.items()
                    if key.startswith("nodepool_")
                ),
            ]
        )
        body = {
            "floating_network_id": network_id,
            "port_id": port_id,
            "fixed_ip_address": address,
            "description": description[:255],
        }
        pauses = iter(AGAIN)
        while True:
            try:
                return self.single(
                    "create_floating_ip",
                    "network",
                    "/floatingips",
                    "floatingip",
                    "POST",
                    json={"floatingip": body},
                )
            except Exception as error:
                if classify(error) is not ErrorKind.TRANSIENT:
                    raise
                # Not a proper answer, so it may exist all the same. A port has one floating IP per
                # address.
                found = self.many(
                    "list_floating_ips",
                    "network",
                    "/floatingips",
                    "floatingips",
                    {"port_id": port_id},
                )
                made = next(
                    (ip for ip in found if ip.get("description") == body["description"]), None
                )
                if made is not None:
                    return made
                pause = next(pauses, None)
                if pause is None or self.calls.pause(pause):
                    raise

    def get_floating_ip_by_id(self, floating_ip_id: str) -> dict[str, Any] | None:
        return self.find(
            "get_floating_ip", "network", f"/floatingips/{floating_ip_id}", "floatingip"
        )

    def list_floating_ips(self) -> list[dict[str, Any]]:
        return self.many(
            "list_floating_ips",
            "network",
            "/floatingips",
            "floatingips",
            {"project_id": self.project()},
        )

    def delete_floating_ip(self, floating_ip_id: str) -> bool:
        return self.delete("delete_floating_ip", "network", f"/floatingips/{floating_ip_id}")

    def delete_unattached_floating_ips(self) -> int:
        """Delete them, also those of others in the project; return how many there were."""
        return sum(
            self.delete_floating_ip(ip["id"])
            for ip in self.list_floating_ips()
            if not ip.get("port_id")
        )


def floating_ip_metadata(description: str | None) -> dict[str, str]:
    """Return the metadata of our floating IP; empty for others' floating IPs."""
    words = (description or "").split()
    if not words or words[0] != FIP_TAG:
        return {}
    pairs = (word.split("=", 1) for word in words[1:] if "=" in word)
    return {key: unquote(value) for key, value in pairs}


def _is_uuid(text: str) -> bool:
    plain = text.replace("-", "")
    return len(plain) == 32 and all(character in "0123456789abcdefABCDEF" for character in plain)

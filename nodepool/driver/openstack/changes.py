"""Changes in the cloud, for the state machines and the leak cleanup."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from nodepool.driver.openstack.api.client import CloudApi, floating_ip_metadata
from nodepool.driver.openstack.api.errors import sdk_error
from nodepool.driver.openstack.api.networks import FLOATING, addresses
from nodepool.driver.openstack.config import OpenStackProviderConfig, ProviderDiskImage, ProviderLabel
from nodepool.driver.openstack.leaks import LeakCleaner
from nodepool.driver.openstack.servers import NodepoolOpenStackServer, volumes_of
from nodepool.zk.cluster import same_owner


def _marks(metadata: dict[str, Any]) -> tuple[str, str] | None:
    """Return provider and node; None if the object is not ours."""
    provider, node = metadata.get("nodepool_provider_name"), metadata.get("nodepool_node_id")
    return (provider, node) if provider and node else None


class CloudChanges:
    """The changing half of the adapter."""

    log: logging.Logger
    provider: OpenStackProviderConfig
    leaks: LeakCleaner
    _api: CloudApi
    #: Floating IPs of servers that this process created or saw; other servers are not known.
    _attached: MutableMapping[str, list[str]]
    _attached_lock: threading.Lock

    def _createServer(
        self, name: str, image: ProviderDiskImage, flavor: Mapping[str, Any], key_name: str | None = None, az: str | None = None,
        config_drive: bool | None = None, networks: list[str] | None = None,
        security_groups: list[str] | None = None, boot_from_volume: bool = False, volume_size: int = 50,
        instance_properties: dict[str, Any] | None = None, userdata: str | None = None,
        volume_type: str | None = None, server_group: str | None = None, scheduler_hints: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        arguments: dict[str, Any] = {"image": image, "flavor": flavor, "config_drive": config_drive}
        if boot_from_volume:
            arguments.update(boot_from_volume=True, volume_size=volume_size, terminate_volume=True)
            if volume_type:
                arguments["volume_type"] = volume_type
        hints = dict(scheduler_hints or {})
        if server_group:
            hints["group"] = self._findServerGroup(server_group)["id"]
        optional = {
            "key_name": key_name,
            "availability_zone": az,
            "security_groups": security_groups,
            "userdata": userdata,
            "nics": [{"net-id": self._findNetwork(network)["id"]} for network in self._serverNetworks(networks)],
            "meta": instance_properties,
            "scheduler_hints": hints,
        }
        arguments.update({key: value for key, value in optional.items() if value})
        return self._api.create_server(name=name, wait=False, **arguments)

    def _serverNetworks(self, names: list[str] | None) -> list[str]:
        """Return the configured networks, or the default network of clouds.yaml."""
        if names:
            return names
        default = self._networks().default
        return [default["id"]] if default is not None else []

    def _chooseZone(self, label: ProviderLabel, az: str | None) -> str | None:
        """Return the zone of the request, unless the label specifies zones."""
        return az if not label.azs or az in label.azs else random.choice(label.azs)

    def _deleteServer(self, external_id: str) -> Any:
        """Request the deletion; False: the cloud does not know the server."""
        return self._api.delete_server(external_id)

    def _lostServer(self, name: str, metadata: dict[str, Any]) -> str | None:
        """Return the id of a server whose creation was not answered properly, if it exists."""
        for server in self._api.find_servers(name):
            if same_owner(server.get("metadata") or {}, metadata):
                return str(server["id"])
        return None

    def _tagVolumes(self, server: NodepoolOpenStackServer, metadata: dict[str, Any]) -> None:
        """Tag the volumes that nova created for the server as ours, for the leak cleanup."""
        tags = {key: value for key, value in metadata.items() if key.startswith("nodepool_")}
        for volume_id in volumes_of(server):
            try:
                self._api.tag_volume(volume_id, tags)
            except Exception as error:
                self.log.warning("Volume %s of server %s cannot be tagged: %s", volume_id, server["id"], error)

    # -- ports

    def _deletePort(self, port_id: str) -> None:
        self._api.delete_port(port_id)

    # -- floating IPs

    def _hasFloatingIps(self) -> bool:
        return self._api.has_floating_ips()

    def _needsFloatingIp(self, server: NodepoolOpenStackServer) -> bool:
        return self._api.has_floating_ips() and self._api.needs_floating_ip(server, self._networks())

    def _createFloatingIp(self, server: NodepoolOpenStackServer) -> Any:
        """Create a floating IP; return None when no port of the server can have one."""
        address = self._api.create_floating_ip(server, self._networks())
        self._noteFloatingIps(server["id"], [] if address is None else [address["id"]])
        return address

    def _noteFloatingIps(self, server_id: str, ids: list[str]) -> None:
        with self._attached_lock:
            self._attached.setdefault(server_id, []).extend(ids)

    def _deleteFloatingIp(self, floating_ip_id: str) -> None:
        self._api.delete_floating_ip(floating_ip_id)

    def _deleteFloatingIpsOf(self, server_id: str, loose: bool = True) -> None:
        """Delete a server's floating IPs first; no call for servers that never showed one.

        :param loose: also unattached ones of its node. Wrong for a server that is not the one in the node's record.
        """
        with self._attached_lock:
            ids = self._attached.get(server_id)
        if ids is None:
            ids = self._findFloatingIpsOf(server_id, loose)
        for floating_ip_id in ids:
            self._deleteFloatingIp(floating_ip_id)
        with self._attached_lock:
            self._attached.pop(server_id, None)

    def _findFloatingIpsOf(self, server_id: str, loose: bool) -> list[str]:
        """Return floating IPs that the server shows, or that an earlier launcher created for it."""
        server = self._getServerById(server_id) if self._hasFloatingIps() else None
        if server is None:
            return []
        shown = addresses(server, kind=FLOATING)
        if not shown and not any(pool.auto_floating_ip for pool in self.provider.pools.values()):
            return []
        wanted = _marks(server.get("metadata") or {})
        try:
            listed = self._api.list_floating_ips()
            found = [ip["id"] for ip in listed if ip["floating_ip_address"] in shown]
            marked = [
                ip
                for ip in listed
                if ip["id"] not in found and wanted and _marks(floating_ip_metadata(ip.get("description"))) == wanted
            ]
            # The tags have the node's id, which may have another server by now.
            ports = {port["id"] for port in self._api.ports_of(server_id)} if any(ip.get("port_id") for ip in marked) else set()
            return found + [ip["id"] for ip in marked if (ip["port_id"] in ports if ip.get("port_id") else loose)]
        except Exception as error:
            if sdk_error(error, "NotFoundException"):
                return []
            raise

    # Implemented by the reading half.
    _findNetwork: Callable[..., Any]
    _findServerGroup: Callable[..., Any]
    _getServerById: Callable[..., Any]
    _networks: Any

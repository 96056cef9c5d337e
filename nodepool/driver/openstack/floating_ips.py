"""Floating IPs of servers, which are deleted before their servers."""

from __future__ import annotations

import threading
from typing import Any

from cachetools import LRUCache

from nodepool.driver.openstack.api.client import CloudApi, floating_ip_metadata
from nodepool.driver.openstack.api.errors import sdk_error
from nodepool.driver.openstack.api.networks import FLOATING, Networks, addresses
from nodepool.driver.openstack.config import OpenStackProviderConfig
from nodepool.driver.openstack.servers import NodepoolOpenStackServer

KNOWN = 20_000
"""Number of servers for which the existence of a floating IP is cached; a query costs a call."""


def _marks(metadata: dict[str, Any]) -> tuple[str, str] | None:
    """Return provider and node; None if the object is not ours."""
    provider, node = metadata.get("nodepool_provider_name"), metadata.get("nodepool_node_id")
    return (provider, node) if provider and node else None


class FloatingIps:
    """The floating IPs of one provider's servers."""

    def __init__(self, api: CloudApi, provider: OpenStackProviderConfig) -> None:
        self._api = api
        self._provider = provider
        self._lock = threading.Lock()
        #: Those of servers that this process created or saw. Bounded: the cloud does not report
        #: servers that others delete.
        self._known: LRUCache[str, list[str]] = LRUCache(KNOWN)

    def create(self, server: NodepoolOpenStackServer, networks: Networks) -> Any:
        """Create a floating IP; return None when no port of the server can have one."""
        address = self._api.create_floating_ip(server, networks)
        self.note(server["id"], [] if address is None else [address["id"]])
        return address

    def note(self, server_id: str, ids: list[str]) -> None:
        """Remember floating IPs of the server, or that it has none."""
        with self._lock:
            self._known.setdefault(server_id, []).extend(ids)

    def delete_of(self, server_id: str, loose: bool = True) -> None:
        """Delete a server's floating IPs; no call for servers that never showed one.

        :param loose: also unattached ones of its node. Wrong for a server that is not the one in
            the node's record.
        """
        with self._lock:
            ids = self._known.get(server_id)
        if ids is None:
            ids = self._find(server_id, loose)
        for floating_ip_id in ids:
            self._api.delete_floating_ip(floating_ip_id)
        with self._lock:
            self._known.pop(server_id, None)

    def _find(self, server_id: str, loose: bool) -> list[str]:
        """Return floating IPs that the server shows, or that an earlier launcher created for it."""
        server = self._api.get_server_by_id(server_id) if self._api.has_floating_ips() else None
        if server is None:
            return []
        shown = addresses(server, kind=FLOATING)
        if not shown and not any(pool.auto_floating_ip for pool in self._provider.pools.values()):
            return []
        wanted = _marks(server.get("metadata") or {})
        try:
            listed = self._api.list_floating_ips()
            found = [ip["id"] for ip in listed if ip["floating_ip_address"] in shown]
            marked = [
                ip
                for ip in listed
                if ip["id"] not in found
                and wanted
                and _marks(floating_ip_metadata(ip.get("description"))) == wanted
            ]
            # The tags have the node's id, which may have another server by now.
            ports = (
                {port["id"] for port in self._api.ports_of(server_id)}
                if any(ip.get("port_id") for ip in marked)
                else set()
            )
            return found + [
                ip["id"]
                for ip in marked
                if (ip["port_id"] in ports if ip.get("port_id") else loose)
            ]
        except Exception as error:
            if sdk_error(error, "NotFoundException"):
                return []
            raise

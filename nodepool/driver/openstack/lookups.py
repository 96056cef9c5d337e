"""What the cloud has: servers, images, flavors, networks, zones, limits (driver-openstack.md 2.2)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from nodepool.driver.openstack.servers import (
    NodepoolOpenStackServer,
    is_deleted,
    list_servers,
    quota_from_flavor,
    sdk_error,
)
from nodepool.driver.utils import LazyExecutorTTLCache, QuotaInformation

CACHE_TTL = 1  # seconds

T = TypeVar("T")


class Timed:
    """Logs how long an API call took."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self.log = log
        self.what = what

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        self.log.debug("API call %s in %.3f s", self.what, time.monotonic() - self.start)


class CloudLookups:
    """The reading half of the adapter. Lists are renewed in the background; the rest is remembered for good."""

    log: logging.Logger
    _client: Any

    def _initLookups(self, executor: Any, ttl: float = CACHE_TTL) -> None:
        cache = LazyExecutorTTLCache(ttl, executor)
        self._listServers = cache(self._listServers)  # type: ignore[method-assign]
        self._listVolumes = cache(self._listVolumes)  # type: ignore[method-assign]
        self._listFloatingIps = cache(self._listFloatingIps)  # type: ignore[method-assign]
        self._memo: dict[tuple[str, str | None], Any] = {}
        self._memo_lock = threading.Lock()
        self._unknown_flavors: set[Any] = set()
        self._server_index: tuple[Any, dict[str, Any]] = (None, {})

    def _remember(self, kind: str, name: str | None, fetch: Callable[[], T]) -> T:
        key = (kind, name)
        with self._memo_lock:
            if key in self._memo:
                value: T = self._memo[key]
                return value
        with Timed(self.log, f"{kind} {name or ''}".strip()):
            value = fetch()
        with self._memo_lock:
            self._memo[key] = value
        return value

    def _forget(self, *kinds: str) -> None:
        """Ask the cloud again about these kinds, or about everything."""
        with self._memo_lock:
            for key in [key for key in self._memo if not kinds or key[0] in kinds]:
                del self._memo[key]

    def _listServers(self) -> list[Any]:
        with Timed(self.log, "list servers"):
            return list(list_servers(self._client))

    def _listVolumes(self) -> list[Any]:
        with Timed(self.log, "list volumes"):
            try:
                return list(self._client.list_volumes())
            except Exception as exc:
                if sdk_error(exc, "EndpointNotFound") or sdk_error(exc, "CatalogException"):
                    return []
                raise

    def _listFloatingIps(self) -> list[Any]:
        with Timed(self.log, "list floating ips"):
            return list(self._client.list_floating_ips())

    def _listPorts(self, status: str | None = None) -> list[Any]:
        with Timed(self.log, "list ports"):
            if status:
                return list(self._client.list_ports(filters={"status": status}))
            return list(self._client.list_ports())

    def _listImages(self) -> list[Any]:
        with Timed(self.log, "list images"):
            return list(self._client.list_images())

    def _findImage(self, name: str) -> Any:
        """The active image of that name or id, or None; both are remembered."""
        return self._remember("image", name, lambda: self._client.get_image(name, filters={"status": "active"}))

    def _listFlavors(self) -> list[Any]:
        def fetch() -> list[Any]:
            flavors = self._client.list_flavors(get_extra=False)
            return sorted(flavors, key=lambda flavor: (flavor.ram, flavor.name))

        return self._remember("flavors", None, fetch)

    def _findFlavor(self, flavor_name: str | None, min_ram: int) -> Any:
        for flavor in self._listFlavors():
            if min_ram:
                if flavor.ram >= min_ram and (not flavor_name or flavor_name in flavor.name):
                    return flavor
            elif flavor_name in (flavor.name, flavor.id):
                return flavor
        raise Exception(f"Unable to find flavor {flavor_name!r} with at least {min_ram} MiB of RAM")

    def _findNetwork(self, name: str) -> Any:
        def fetch() -> Any:
            network = self._client.get_network(name)
            if not network:
                raise Exception(f"Unable to find network {name}")
            return network

        return self._remember("network", name, fetch)

    def _listAZs(self) -> list[Any]:
        return self._remember("zones", None, lambda: list(self._client.list_availability_zone_names()) or [None])

    def _getServer(self, external_id: str) -> Any:
        """The server of the (up to a second old) listing, or None."""
        servers = self._listServers()
        listing, index = self._server_index
        if listing is not servers:
            index = {server["id"]: server for server in servers}
            self._server_index = (servers, index)
        return index.get(external_id)

    def _expandServer(self, server: Any) -> Any:
        """Fill in the addresses; costs API calls."""
        from openstack.cloud import meta

        with Timed(self.log, f"addresses of {server['id']}"):
            return meta.add_server_interfaces(self._client, NodepoolOpenStackServer(server))  # type: ignore[arg-type]

    def _quotaOfServer(self, server: Any) -> QuotaInformation:
        """What a listed server uses; an unknown flavor counts as one instance."""
        flavor = server.get("flavor") or {}
        attached = {item["id"] for item in server.get("os-extended-volumes:volumes_attached") or []}
        volumes = [volume for volume in self._listVolumes() if volume.id in attached] if attached else []
        if "vcpus" in flavor:
            return quota_from_flavor(flavor, volumes=volumes)
        flavor_id = flavor.get("id")
        for known in self._listFlavors():
            if known.id == flavor_id:
                return quota_from_flavor(known, volumes=volumes)
        if flavor_id not in self._unknown_flavors:
            self._unknown_flavors.add(flavor_id)
            self.log.warning("Flavor %s of server %s is unknown; its cores and RAM are not counted", flavor_id,
                             server["id"])  # fmt: skip
        return quota_from_flavor({}, volumes=volumes)

    def _liveServers(self) -> list[Any]:
        return [server for server in self._listServers() if not is_deleted(server)]

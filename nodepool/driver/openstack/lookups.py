"""Cloud data: servers, images, flavors, networks, zones, limits (OST-2.2)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nodepool import exceptions
from nodepool.cloud import AdaptiveRate, CallsStopped, CloudCalls
from nodepool.cloud.answer_cache import AnswerCache
from nodepool.cloud.recently_gone import RecentlyGone
from nodepool.driver import statemachine
from nodepool.driver.openstack.api import errors
from nodepool.driver.openstack.api.client import CloudApi
from nodepool.driver.openstack.api.networks import Networks
from nodepool.driver.openstack.config import OpenStackProviderConfig, ProviderLabel
from nodepool.driver.openstack.servers import (
    NodepoolOpenStackServer,
    is_deleted,
    quota_from_flavor,
    volumes_of,
)
from nodepool.driver.utils import QuotaInformation
from nodepool.version import get_version_string

CACHE_TTL = 1  # seconds
LANE_THREADS = {
    "api": 10,
    "read": 6,
    "write": 4,
    "delete": 6,
    "network": 4,
    "volume": 2,
    "image": 4,
}
FEW = 4
"""Minimum number of servers that are queried one by one before all are listed."""
PAGE = 1000
"""Servers per page of a listing in most clouds."""
QUESTION = 0.05
"""Approximate seconds that a cloud needs for a query of one server."""
LISTED = 0.001
"""Approximate seconds for each server of a listing."""


def questions_worth_listing(listed: int, pace: float) -> float:
    """Return how many servers can be queried one by one before a listing is faster.

    :param listed: number of servers in the project.
    :param pace: seconds between two calls.
    """
    listing = math.ceil(listed / PAGE) * pace + listed * LISTED
    return max(FEW, listing / max(pace, QUESTION))


class CloudLookups(statemachine.Adapter):
    """The connection to a cloud, and lookups there.

    Data that rarely changes is cached permanently.
    """

    #: Seconds for which a listing of all servers may be reused.
    LISTING_TTL: float = CACHE_TTL
    #: Seconds after which something that was not found may be searched again.
    ABSENT_TTL: float = 30
    #: Seconds in which refused servers cause only one renewal of the same data.
    RENEWAL_PAUSE: float = 10

    def __init__(self, provider_config: OpenStackProviderConfig) -> None:
        super().__init__(provider_config)
        self.log = logging.getLogger(f"nodepool.OpenStackAdapter.{provider_config.name}")
        self.provider = provider_config
        name = f"openstack-{provider_config.name}"
        # ``rate`` is seconds between two calls, for each service of the cloud.
        rate = 1.0 / provider_config.rate if provider_config.rate else None
        compute = AdaptiveRate(f"{name}-compute", rate)
        rates = dict.fromkeys(("read", "write", "delete"), compute)
        rates.update(
            (lane, AdaptiveRate(f"{name}-{lane}", rate))
            for lane in ("network", "volume", "image", "identity")
        )
        self.calls: CloudCalls = CloudCalls(
            provider_config.name,
            errors.classify,
            rates,
            threads=LANE_THREADS,
            log=self.log,
            retry_after=errors.retry_after,
            overload=errors.is_overload,
        )
        self._client = self._getClient()
        self._api = self._getApi()
        self._memo = AnswerCache()
        self._listings = AnswerCache()
        self._listed = 0
        self._unknown_flavors: set[Any] = set()
        self._gone = RecentlyGone()

    def _getClient(self) -> Any:
        # Expensive; the fake cloud does not need it.
        import openstack.connection

        from nodepool.driver.openstack.api.transport import prepare

        # Our own calls limit the rate: the SDK's limits apply per adapter.
        return prepare(
            openstack.connection.Connection(
                config=self.provider.cloud_config,
                use_direct_get=False,
                app_name="nodepool",
                app_version=get_version_string(),
            )
        )

    def _getApi(self) -> CloudApi:
        """Return the API for the cloud behind the client."""
        return CloudApi(self._client, self.calls, self.provider, self.log)

    def stop(self) -> None:
        self.calls.stop()
        self._api.close()

    def _forget(self, *kinds: str) -> None:
        """Drop cached answers of these kinds, or all; callers that need them wait for new ones."""
        self._memo.forget(kinds or None)

    def _renewOld(self, kind: str) -> bool:
        """Renew the cached list if it is old; return whether it was."""
        if self._memo.age(kind) <= self.ABSENT_TTL:
            return False
        self._memo.renew((kind,), ())
        return True

    def _refresh_related(self, label: ProviderLabel, message: str) -> None:
        """Renew the cached data that a refusal may be about, before the next attempt.

        Other callers use the old data meanwhile.
        """
        image = label.cloud_image.external_name if label.cloud_image is not None else None
        names = {str(name) for name in (image, label.server_group, *(label.networks or ())) if name}
        try:
            self._memo.renew(errors.suspected_lookups(message), names, self.RENEWAL_PAUSE)
        except Exception as error:
            self.log.warning(
                "Provider %s: renewing the data of label %s failed: %s",
                self.provider.name,
                label.name,
                error,
            )

    # -- servers

    def _listServers(self) -> list[Any]:
        servers = self._api.list_servers()
        self._listed = len(servers)
        return servers

    def _liveServers(self) -> list[Any]:
        """Return the servers, listed now or less than a second ago."""
        servers = self._listings.get("servers", None, self._listServers, self.LISTING_TTL)
        gone = self._gone.recent()
        return [server for server in servers if not is_deleted(server) and server["id"] not in gone]

    def _getServer(self, external_id: str) -> Any:
        """Return the current server, None if missing; without retries, for callers that poll."""
        return self._api.get_server_by_id(external_id, repeat=False)

    def _someServers(self, ids: Sequence[str]) -> Mapping[str, Any]:
        """Return the current servers; absent ones do not exist. Raises if that is unknown.

        A few of a large project are queried one by one: its listing takes many seconds.
        """
        found: dict[str, Any] = {}
        rest = list(ids)
        if len(rest) > questions_worth_listing(self._listed, self.provider.rate or 0.0):
            listed = {server["id"]: server for server in self._listServers()}
            found = {key: listed[key] for key in rest if key in listed}
            rest = [key for key in rest if key not in listed]
        for key in rest:
            try:
                server = self._getServer(key)
            except CallsStopped:
                raise
            except Exception as error:
                # One failing query, perhaps for a cell that is down, must not hide the others.
                found[key] = error
                continue
            if server is not None:
                found[key] = server
        return found

    def _someFloatingIps(self, ids: Sequence[str]) -> Mapping[str, Any]:
        answers = {key: self._api.get_floating_ip_by_id(key) for key in ids}
        return {key: answer for key, answer in answers.items() if answer is not None}

    def _networks(self) -> Networks:
        return self._memo.get("networks", None, self._api.list_networks)

    def _expandServer(self, server: NodepoolOpenStackServer) -> Any:
        """Add the addresses from the server's record, without calls for the server."""
        return self._api.expand_server(server, self._networks())

    # -- the rest

    def _listVolumes(self) -> list[Any]:
        try:
            return self._api.list_volumes()
        except Exception as exc:
            if errors.sdk_error(exc, *errors.ABSENT_SERVICE):
                return []
            raise

    def _listPorts(self, status: str | None = None) -> list[Any]:
        return self._api.list_ports({"status": status} if status else None)

    def _listFloatingIps(self) -> list[Any]:
        return self._api.list_floating_ips()

    def _listImages(self) -> list[Any]:
        return self._api.list_images()

    def _findImage(self, name: str) -> Any:
        """Return the active image of that name or id, or None; both are cached."""
        return self._memo.get(
            "image", name, lambda: self._api.get_image(name, filters={"status": "active"})
        )

    def _listFlavors(self) -> list[Any]:
        def fetch() -> list[Any]:
            return sorted(
                self._api.list_flavors(), key=lambda flavor: (flavor["ram"], flavor["name"])
            )

        return self._memo.get("flavors", None, fetch)

    def _findFlavor(self, flavor_name: str | None, min_ram: int) -> Any:
        flavor = self._matchFlavor(flavor_name, min_ram)
        if flavor is None and self._renewOld("flavors"):
            flavor = self._matchFlavor(flavor_name, min_ram)
        if flavor is None:
            wanted = (
                f"named {flavor_name!r} (option flavor-name)"
                if flavor_name and not min_ram
                else (
                    f"with {min_ram} MiB of RAM (option min-ram)"
                    + (
                        f" and {flavor_name!r} in its name (option flavor-name)"
                        if flavor_name
                        else ""
                    )
                )
            )
            raise exceptions.RuntimeConfigurationException(
                f"Unable to find flavor {wanted} in provider {self.provider.name}; the cloud has"
                f" {', '.join(str(flavor['name']) for flavor in self._listFlavors()) or 'none'}"
            )
        return flavor

    def _matchFlavor(self, flavor_name: str | None, min_ram: int) -> Any:
        for flavor in self._listFlavors():
            if min_ram:
                if flavor["ram"] >= min_ram and (not flavor_name or flavor_name in flavor["name"]):
                    return flavor
            elif flavor_name in (flavor["name"], flavor["id"]):
                return flavor
        return None

    def _findNetwork(self, name: str) -> Any:
        """Return the network by name or id. RuntimeConfigurationException: there is none."""
        network = self._networks().find(name)
        if network is None and self._renewOld("networks"):
            network = self._networks().find(name)
        if network is None:
            raise exceptions.RuntimeConfigurationException(
                f"Unable to find network {name} (option networks) in provider "
                f"{self.provider.name}; the cloud has"
                f" {', '.join(str(known.get('name')) for known in self._networks().all) or 'none'}"
            )
        return network

    def _findServerGroup(self, name: str) -> Any:
        def fetch() -> Any:
            group = self._api.get_server_group(name)
            if group is None:
                raise exceptions.RuntimeConfigurationException(
                    f"Unable to find server group {name} (option server-group) in provider "
                    f"{self.provider.name}"
                )
            return group

        return self._memo.get("server-group", name, fetch)

    def _listAZs(self) -> list[Any]:
        return self._memo.get(
            "zones", None, lambda: self._api.list_availability_zone_names() or [None]
        )

    def _quotaOfServer(
        self, server: NodepoolOpenStackServer, volumes: list[Any]
    ) -> QuotaInformation:
        """Return the usage of a listed server; an unknown flavor counts as one instance.

        :param volumes: all that there are.
        """
        flavor = server.get("flavor") or {}
        attached = volumes_of(server)
        volumes = [volume for volume in volumes if volume["id"] in attached]
        if "vcpus" in flavor:
            return quota_from_flavor(flavor, volumes=volumes)
        flavor_id = flavor.get("id")
        for known in self._listFlavors():
            if known["id"] == flavor_id:
                return quota_from_flavor(known, volumes=volumes)
        if flavor_id not in self._unknown_flavors:
            self._unknown_flavors.add(flavor_id)
            self.log.warning(
                "Flavor %s of server %s is unknown; its cores and RAM are not counted",
                flavor_id,
                server["id"],
            )
        return quota_from_flavor({}, volumes=volumes)

"""The OpenStack cloud behind the state machine framework (OST-2)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from nodepool import exceptions
from nodepool.cloud import ErrorKind, Poller
from nodepool.cloud.sold_out import SoldOut
from nodepool.driver import statemachine
from nodepool.driver.common.adapter import smallest
from nodepool.driver.openstack.api import errors
from nodepool.driver.openstack.config import (
    OpenStackProviderConfig,
    ProviderDiskImage,
    ProviderLabel,
)
from nodepool.driver.openstack.floating_ips import FloatingIps
from nodepool.driver.openstack.ladder import Offer, offers_of
from nodepool.driver.openstack.leaks import LeakCleaner
from nodepool.driver.openstack.lookups import CACHE_TTL, CloudLookups
from nodepool.driver.openstack.machines import (
    OpenStackCreateStateMachine,
    OpenStackDeleteStateMachine,
)
from nodepool.driver.openstack.servers import (
    NodepoolOpenStackServer,
    OpenStackInstance,
    OpenStackResource,
    does_not_run,
    quota_from_flavor,
    quota_from_limits,
    volumes_of,
)
from nodepool.driver.statemachine.model import DriverLabel
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest

__all__ = [
    "CACHE_TTL",
    "NodepoolOpenStackServer",
    "OpenStackAdapter",
    "OpenStackCreateStateMachine",
    "OpenStackDeleteStateMachine",
    "OpenStackInstance",
    "OpenStackResource",
    "quota_from_flavor",
    "quota_from_limits",
]

WATCH_BATCH = 200


class OpenStackAdapter(CloudLookups):
    #: Seconds between two searches for a missing cloud image.
    IMAGE_CHECK_TIMEOUT: float = 300
    #: Minimum and maximum seconds between two polls of a server.
    LOOKS = (0.4, 10.0)
    #: Seconds in which the cloud may not find a new server yet, and an active one may be without
    #: addresses.
    SETTLING = 10.0

    def __init__(self, provider_config: OpenStackProviderConfig) -> None:
        super().__init__(provider_config)
        self._last_image_check = float("-inf")
        floor, ceiling = self.LOOKS
        self.watched_servers: Poller[Any] = Poller(
            f"servers of {provider_config.name}",
            self._someServers,
            self.calls.run,
            self.calls.timers,
            batch=WATCH_BATCH,
            floor=floor,
            ceiling=ceiling,
            log=self.log,
        )
        self.watched_ips: Poller[Any] = Poller(
            f"floating IPs of {provider_config.name}",
            self._someFloatingIps,
            functools.partial(self.calls.run, lane="network"),
            self.calls.timers,
            batch=1,
            floor=floor,
            ceiling=ceiling,
            log=self.log,
        )
        self.leaks = LeakCleaner(self, provider_config, self.log)
        self.floating_ips = FloatingIps(self._api, provider_config)
        self._not_ready: dict[str, str] = {}
        self.sold_out: SoldOut[Offer] = SoldOut()

    # -- running calls

    def _submitApi(self, api: Callable[..., Any], *args: object, **kw: object) -> Future[Any]:
        return self.calls.run(lambda: api(*args, **kw), lane="api")

    def _submitDelete(self, api: Callable[..., Any], *args: object) -> Future[Any]:
        """Same as :meth:`_submitApi`, on threads that creations do not use."""
        return self.calls.run(lambda: api(*args), lane="delete")

    def _completeApi(self, future: Future[Any]) -> Any:
        """Return the result, or None while the call runs."""
        return future.result() if future.done() else None

    # -- servers

    def _createServer(
        self,
        name: str,
        image: Mapping[str, Any],
        flavor: Mapping[str, Any],
        key_name: str | None = None,
        az: str | None = None,
        config_drive: bool | None = None,
        networks: list[str] | None = None,
        security_groups: list[str] | None = None,
        boot_from_volume: bool = False,
        volume_size: int = 50,
        instance_properties: dict[str, Any] | None = None,
        userdata: str | None = None,
        volume_type: str | None = None,
        server_group: str | None = None,
        scheduler_hints: dict[str, Any] | None = None,
    ) -> Any:
        """Start a server; without networks, it gets the default network of clouds.yaml."""
        hints = dict(scheduler_hints or {})
        if server_group:
            hints["group"] = self._findServerGroup(server_group)["id"]
        default = None if networks else self._networks().default
        nics = [default] if default else [self._findNetwork(network) for network in networks or ()]
        optional = {
            "boot_from_volume": boot_from_volume,
            "volume_size": volume_size if boot_from_volume else None,
            "volume_type": volume_type,
            "key_name": key_name,
            "availability_zone": az,
            "security_groups": security_groups,
            "userdata": userdata,
            "nics": [{"net-id": network["id"]} for network in nics],
            "meta": instance_properties,
            "scheduler_hints": hints,
        }
        given: dict[str, Any] = {key: value for key, value in optional.items() if value}
        return self._api.create_server(
            name=name, image=image, flavor=flavor, config_drive=config_drive, **given
        )

    def _deleteServer(self, external_id: str) -> Any:
        """Request the deletion; False: the cloud does not know the server."""
        return self._api.delete_server(external_id)

    # -- interface for the framework

    def getCreateStateMachine(
        self,
        hostname: str,
        label: ProviderLabel,
        image_external_id: object,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: Log,
    ) -> OpenStackCreateStateMachine:
        return OpenStackCreateStateMachine(
            self, hostname, label, image_external_id, metadata, request, az, log
        )

    def getDeleteStateMachine(self, external_id: str, log: Log) -> OpenStackDeleteStateMachine:
        return OpenStackDeleteStateMachine(self, external_id, log)

    def listInstances(self) -> Iterator[OpenStackInstance]:
        servers = self._liveServers()
        volumes = self._listVolumes() if any(volumes_of(server) for server in servers) else []
        for server in servers:
            yield OpenStackInstance(self.provider, server, self._quotaOfServer(server, volumes))

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """Return instances that the cloud does not know, queried by id if not listed.

        Listings omit cells that are down.
        """
        found = self._someServers(external_ids)
        missing = []
        for external_id in external_ids:
            server = found.get(external_id)
            if isinstance(server, Exception):
                self.log.warning(
                    "Server %s of provider %s is not listed and cannot be queried, doing nothing: "
                    "%s",
                    external_id,
                    self.provider.name,
                    server,
                )
            elif server is None or does_not_run(server):
                missing.append(external_id)
        return missing

    def listResources(self) -> Iterator[OpenStackResource]:
        for server in self._liveServers():
            yield OpenStackResource(server.get("metadata") or {}, "instance", server["id"])
        yield from self.leaks.resources()

    def periodic(self) -> None:
        self.leaks.run()

    def deleteResource(self, resource: statemachine.Resource) -> None:
        if resource.type == "instance":
            # Loose ones are resources themselves.
            self.floating_ips.delete_of(resource.id, loose=False)
            self._deleteServer(resource.id)
        elif resource.type == "floatingip":
            self._api.delete_floating_ip(resource.id)
        elif resource.type == "volume":
            self._api.delete_volume(resource.id)
        elif resource.type == "image":
            self.deleteImage(resource.id)

    def getQuotaLimits(self) -> QuotaInformation:
        compute = self._api.get_compute_limits()
        try:
            volume = self._api.get_volume_limits()
        except Exception as exc:
            if not errors.sdk_error(exc, *errors.ABSENT_SERVICE):
                raise
            volume = None
        return quota_from_limits(compute, volume)

    def getQuotaForLabel(self, label: ProviderLabel) -> QuotaInformation:
        """Return the minimum that every offer of the label needs."""
        flavors = offers_of(label, None, self._findFlavor).values()
        return smallest(quota_from_flavor(flavor, label=label) for flavor in flavors)

    def getAZs(self) -> list[str | None]:
        return self._listAZs()

    def labelReady(self, label: DriverLabel) -> bool:
        if not label.cloud_image:
            return False
        if label.cloud_image.image_id:
            return True
        wanted = label.cloud_image
        place = (
            f"cloud image {wanted.external_name} (option "
            f"{'image-name' if wanted.image_name else 'cloud-image'})"
        )
        try:
            if self._findImage(wanted.external_name):
                self._not_ready.pop(label.name, None)
                return True
        except Exception as exc:
            if errors.classify(exc) is ErrorKind.OTHER:
                raise
            return self._report_not_ready(label, f"searching {place} failed: {exc}")
        now = time.monotonic()
        if now - self._last_image_check > self.IMAGE_CHECK_TIMEOUT:
            self._last_image_check = now
            self._memo.forget(("image",), absent=True)
        return self._report_not_ready(
            label, f"{place} was not found in cloud {self.provider.cloud_config.name}"
        )

    def _report_not_ready(self, label: DriverLabel, reason: str) -> bool:
        """Log the reason once until it changes; return False."""
        if self._not_ready.get(label.name) != reason:
            self._not_ready[label.name] = reason
            self.log.warning(
                "Label %s of provider %s cannot be launched: %s",
                label.name,
                self.provider.name,
                reason,
            )
        return False

    def whyNotReady(self, label: DriverLabel) -> str | None:
        """Return the reason for the latest answer of :meth:`labelReady`."""
        return self._not_ready.get(label.name)

    def uploadImage(
        self,
        provider_image: ProviderDiskImage,
        image_name: str,
        filename: str,
        image_format: str | None = None,
        metadata: dict[str, Any] | None = None,
        md5: str | None = None,
        sha256: str | None = None,
    ) -> Any:
        image = self._api.create_image(
            name=image_name,
            filename=filename,
            is_public=False,
            wait=True,
            md5=md5,
            sha256=sha256,
            timeout=self.provider.image_upload_timeout,
            disk_format=image_format or filename.rpartition(".")[2],
            **(metadata or {}),
        )
        return image["id"]

    def deleteImage(self, external_id: str) -> None:
        self.log.debug("Deleting image %s", external_id)
        self._api.delete_image(external_id)

    def discardImage(self, external_id: str) -> None:
        # Through deleteImage, which subclasses replace.
        self._api.discard_image(external_id, self.deleteImage)

    def getConsoleLog(self, label: ProviderLabel, external_id: str) -> str | None:
        if not label.console_log:
            return None
        try:
            return self._api.get_server_console(external_id)
        except Exception as exc:
            if errors.sdk_error(exc, "SDKException") or isinstance(
                exc, exceptions.TimeoutException
            ):
                self.log.info("No console log of %s: %s", external_id, exc)
                return None
            raise

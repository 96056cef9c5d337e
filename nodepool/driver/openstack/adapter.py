"""The OpenStack cloud behind the state machine framework (driver-openstack.md section 2)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nodepool.driver import statemachine
from nodepool.driver.openstack.leaks import LeakCleaner
from nodepool.driver.openstack.lookups import CACHE_TTL, CloudLookups, Timed
from nodepool.driver.openstack.machines import OpenStackCreateStateMachine, OpenStackDeleteStateMachine
from nodepool.driver.openstack.servers import (
    NodepoolOpenStackServer,
    OpenStackInstance,
    OpenStackResource,
    does_not_run,
    quota_from_flavor,
    quota_from_limits,
    sdk_error,
)
from nodepool.driver.utils import QuotaInformation
from nodepool.version import get_version_string

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

API_THREADS = 10


class OpenStackAdapter(CloudLookups, statemachine.Adapter):
    # Seconds between two looks for a cloud image that is missing.
    IMAGE_CHECK_TIMEOUT: float = 300

    def __init__(self, provider_config: Any) -> None:
        super().__init__(provider_config)
        self.log = logging.getLogger(f"nodepool.OpenStackAdapter.{provider_config.name}")
        self.provider = provider_config
        self._last_image_check = float("-inf")
        self.api_executor = ThreadPoolExecutor(
            max_workers=API_THREADS, thread_name_prefix=f"openstack-api-{provider_config.name}"
        )
        self._initLookups(self.api_executor, CACHE_TTL)
        self._client = self._getClient()
        self.leaks = LeakCleaner(self, provider_config, self.log)

    def _getClient(self) -> Any:
        # Heavy; fake clouds do without it.
        import openstack.connection

        return openstack.connection.Connection(
            config=self.provider.cloud_config,
            use_direct_get=False,
            rate_limit=1.0 / self.provider.rate if self.provider.rate else None,
            app_name="nodepool",
            app_version=get_version_string(),
        )

    def stop(self) -> None:
        self.api_executor.shutdown(wait=False, cancel_futures=True)

    def _submitApi(self, api: Callable[..., Any], *args: Any, **kw: Any) -> Future[Any]:
        return self.api_executor.submit(api, *args, **kw)

    def _completeApi(self, future: Future[Any]) -> Any:
        """The result, or None while the call runs."""
        return future.result() if future.done() else None

    # The framework's side

    def getCreateStateMachine(
        self, hostname: str, label: Any, image_external_id: Any, metadata: dict[str, str], request: Any,
        az: str | None, log: Any,
    ) -> OpenStackCreateStateMachine:  # fmt: skip
        return OpenStackCreateStateMachine(self, hostname, label, image_external_id, metadata, request, az, log)

    def getDeleteStateMachine(self, external_id: Any, log: Any) -> OpenStackDeleteStateMachine:
        return OpenStackDeleteStateMachine(self, external_id, log)

    def listInstances(self) -> Iterator[OpenStackInstance]:
        for server in self._liveServers():
            yield OpenStackInstance(self.provider, server, self._quotaOfServer(server))

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        """By one listing that is newer than the question."""
        running = {server["id"] for server in CloudLookups._listServers(self) if not does_not_run(server)}
        return [external_id for external_id in external_ids if external_id not in running]

    def listResources(self) -> Iterator[OpenStackResource]:
        for server in self._liveServers():
            yield OpenStackResource(server.get("metadata") or {}, "instance", server["id"])
        self.leaks.run()

    def deleteResource(self, resource: Any) -> None:
        if resource.type == "instance":
            self._deleteServer(resource.id)

    def getQuotaLimits(self) -> QuotaInformation:
        with Timed(self.log, "limits"):
            compute = self._client.get_compute_limits()
            try:
                volume = self._client.get_volume_limits()
            except Exception as exc:
                if not (sdk_error(exc, "EndpointNotFound") or sdk_error(exc, "CatalogException")):
                    raise
                volume = None
        return quota_from_limits(compute, volume)

    def getQuotaForLabel(self, label: Any) -> QuotaInformation:
        return quota_from_flavor(self._findFlavor(label.flavor_name, label.min_ram), label=label)

    def getAZs(self) -> list[str | None]:
        return self._listAZs()

    def labelReady(self, label: Any) -> bool:
        if not label.cloud_image:
            return False
        if label.cloud_image.image_id:
            return True
        if self._findImage(label.cloud_image.external_name):
            return True
        self.log.warning(
            "Provider %s is configured to use %s as the cloud image for label %s and that image could not be found"
            " in the cloud", self.provider.name, label.cloud_image.external_name, label.name,
        )  # fmt: skip
        now = time.monotonic()
        if now - self._last_image_check > self.IMAGE_CHECK_TIMEOUT:
            self._last_image_check = now
            self._forget("image")
        return False

    def uploadImage(
        self, provider_image: Any, image_name: str, filename: str, image_format: str | None = None,
        metadata: dict[str, Any] | None = None, md5: str | None = None, sha256: str | None = None,
    ) -> Any:  # fmt: skip
        image = self._client.create_image(
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
        return image.id

    def deleteImage(self, external_id: Any) -> None:
        self.log.debug("Deleting image %s", external_id)
        self._client.delete_image(external_id)

    def getConsoleLog(self, label: Any, external_id: Any) -> str | None:
        if not label.console_log:
            return None
        try:
            console: str | None = self._client.get_server_console(external_id)
            return console
        except Exception as exc:
            if sdk_error(exc, "SDKException"):
                self.log.info("No console log of %s: %s", external_id, exc)
                return None
            raise

    # Changes in the cloud, for the state machines

    def _createServer(
        self, name: str, image: Any, flavor: Any, key_name: str | None = None, az: str | None = None,
        config_drive: bool | None = None, networks: list[str] | None = None,
        security_groups: list[str] | None = None, boot_from_volume: bool = False, volume_size: int = 50,
        instance_properties: dict[str, Any] | None = None, userdata: str | None = None,
    ) -> Any:  # fmt: skip
        arguments: dict[str, Any] = {"image": image, "flavor": flavor, "config_drive": config_drive}
        if boot_from_volume:
            arguments.update(boot_from_volume=True, volume_size=volume_size, terminate_volume=True)
        optional = {
            "key_name": key_name,
            "availability_zone": az,
            "security_groups": security_groups,
            "userdata": userdata,
            "nics": [{"net-id": self._findNetwork(network)["id"]} for network in networks or []],
            "meta": instance_properties,
        }
        arguments.update({key: value for key, value in optional.items() if value})
        with Timed(self.log, f"create server {name}"):
            return self._client.create_server(name=name, wait=False, **arguments)

    def _deleteServer(self, external_id: str) -> Any:
        with Timed(self.log, f"delete server {external_id}"):
            return self._client.delete_server(external_id)

    def _getServerById(self, external_id: str) -> Any:
        """The server as it is now; costs a call."""
        with Timed(self.log, f"get server {external_id}"):
            return self._client.get_server_by_id(external_id)

    def _activeAt(self, server: Any) -> float | None:
        """When to look at the server again (monotonic seconds), None if unknown."""
        return None

    def _deletePort(self, port_id: str) -> None:
        with Timed(self.log, f"delete port {port_id}"):
            self._client.delete_port(port_id)

    def _cleanupLeakedPorts(self) -> None:
        self.leaks.clean_ports()

    def _cleanupFloatingIps(self) -> None:
        self.leaks.clean_floating_ips()

    def _hasFloatingIps(self) -> bool:
        return bool(self._client._has_floating_ips())

    def _needsFloatingIp(self, server: Any) -> bool:
        return bool(self._client._needs_floating_ip(server=server, nat_destination=None))

    def _createFloatingIp(self, server: Any) -> Any:
        with Timed(self.log, f"create floating ip for {server['id']}"):
            return self._client.create_floating_ip(server=server, wait=True)

    def _attachIpToServer(self, server: Any, floating_ip: Any) -> None:
        with Timed(self.log, f"attach floating ip to {server['id']}"):
            self._client._attach_ip_to_server(server=server, floating_ip=floating_ip, skip_attach=True)

    def _deleteFloatingIp(self, floating_ip_id: str) -> None:
        with Timed(self.log, f"delete floating ip {floating_ip_id}"):
            self._client.delete_floating_ip(floating_ip_id, retry=0)

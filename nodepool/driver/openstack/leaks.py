"""Leaked ports, floating IPs, volumes and images (OST-2.6)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from nodepool import metrics
from nodepool.base.problems import log_failure
from nodepool.cloud import CallsStopped
from nodepool.driver.openstack.api.client import floating_ip_metadata
from nodepool.driver.openstack.config import OpenStackProviderConfig
from nodepool.driver.openstack.servers import OpenStackResource
from nodepool.driver.toolkit.cloud_images import is_snapshot

IDLE_VOLUME = ("available", "error", "error_deleting")


class LeakCleaner:
    """Finds leaks. Ports have no tags: two polls with status DOWN, an interval apart, count."""

    def __init__(
        self,
        adapter: Any,
        provider: OpenStackProviderConfig,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.adapter = adapter
        self.provider = provider
        self.log = log
        self.clock = clock
        self.down_ports: set[str] = set()
        self.last_port_cleanup: float | None = None

    def run(self) -> None:
        """Do one pass; errors are logged."""
        for clean in (self.clean_ports, self.clean_floating_ips):
            try:
                clean()
            except Exception as error:
                log_failure(
                    self.log, error, "Cleaning up in provider %s failed", self.provider.name
                )

    def resources(self) -> Iterator[OpenStackResource]:
        """Yield floating IPs, volumes and images with our tags that are not in use."""
        for find in (self._floating_ips, self._volumes, self._images):
            try:
                yield from list(find())
            except CallsStopped:
                return
            except Exception as error:
                self.log.warning(
                    "Searching leaks in provider %s failed: %s", self.provider.name, error
                )

    def _labels(self) -> Iterator[Any]:
        for pool in self.provider.pools.values():
            yield from pool.labels.values()

    def _floating_ips(self) -> Iterator[OpenStackResource]:
        if (
            not any(pool.auto_floating_ip for pool in self.provider.pools.values())
            or not self.adapter._api.has_floating_ips()
        ):
            return
        for address in self.adapter._listFloatingIps():
            metadata = floating_ip_metadata(address.get("description"))
            if metadata and not address.get("port_id"):
                yield OpenStackResource(metadata, "floatingip", address["id"])

    def _volumes(self) -> Iterator[OpenStackResource]:
        if not any(label.boot_from_volume for label in self._labels()):
            return
        for volume in self.adapter._api.list_volumes():
            if (
                "nodepool_node_id" in (volume.get("metadata") or {})
                and volume.get("status") in IDLE_VOLUME
            ):
                yield OpenStackResource(volume["metadata"], "volume", volume["id"])

    def _images(self) -> Iterator[OpenStackResource]:
        if not self.provider.diskimages:
            return
        for image in self.adapter._api.list_images(owner=self.adapter._api.project()):
            marks = image.get("properties") or {}
            if (
                marks.get("nodepool_upload_id")
                and not image.get("protected")
                and not is_snapshot(image)
            ):
                yield OpenStackResource(marks, "image", image["id"])

    def _count(self, what: str, number: int) -> None:
        if number:
            metrics.shared().incr(metrics.LEAKED(self.provider.name, what), number)

    def _find_down_ports(self) -> set[str]:
        return {
            port["id"]
            for port in self.adapter._listPorts(status="DOWN")
            if not port["device_owner"] or port["device_owner"].startswith("compute:")
        }

    def clean_ports(self) -> None:
        interval = self.provider.port_cleanup_interval
        if not interval or interval < 0 or not self.adapter._api.has("network"):
            return
        if self.last_port_cleanup is None:
            self.last_port_cleanup = self.clock()
            self.down_ports = self._find_down_ports()
            return
        if self.clock() - self.last_port_cleanup <= interval:
            return
        self.last_port_cleanup = self.clock()  # also when it fails
        removed = 0
        for port_id in sorted(self._find_down_ports() & self.down_ports):
            try:
                self.adapter._api.delete_port(port_id)
            except Exception as error:
                log_failure(
                    self.log,
                    error,
                    "Removing the DOWN port %s in %s failed",
                    port_id,
                    self.provider.name,
                )
            else:
                removed += 1
                self.log.debug("Removed the DOWN port %s in %s", port_id, self.provider.name)
        self._count("ports", removed)
        self.down_ports = self._find_down_ports()

    def clean_floating_ips(self) -> None:
        if not self.provider.clean_floating_ips:
            return
        self._count("floatingips", int(self.adapter._api.delete_unattached_floating_ips()))

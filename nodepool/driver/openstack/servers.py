"""Servers of the API and their usage (OST-2.2 and OST-2.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nodepool.driver.common.adapter import Leftover, MachineInstance
from nodepool.driver.openstack.api.errors import without_values
from nodepool.driver.openstack.config import OpenStackProviderConfig
from nodepool.driver.utils import QuotaInformation

_ATTRIBUTES = {
    "access_ipv4": "accessIPv4",
    "access_ipv6": "accessIPv6",
    "public_v4": "public_v4",
    "public_v6": "public_v6",
    "private_v4": "private_v4",
}

NOT_RUNNING = frozenset(
    {
        "DELETED",
        "SOFT_DELETED",
        "ERROR",
        "PAUSED",
        "SHELVED",
        "SHELVED_OFFLOADED",
        "SHUTOFF",
        "SUSPENDED",
    }
)
"""Status of a server that does not start automatically."""


def is_deleted(server: NodepoolOpenStackServer) -> bool:
    """Return whether it is deleted, even if the cloud keeps it (``SOFT_DELETED``)."""
    return str(server.get("status") or "").lower() in ("deleted", "soft_deleted")


def volumes_of(server: NodepoolOpenStackServer) -> set[str]:
    """Return the ids of attached volumes."""
    return {item["id"] for item in server.get("os-extended-volumes:volumes_attached") or ()}


def does_not_run(server: NodepoolOpenStackServer) -> bool:
    """Return whether logins are impossible and stay so without intervention."""
    return str(server.get("status") or "").upper() in NOT_RUNNING


def fault_message(server: Mapping[str, Any] | None) -> str:
    """Return the cloud's reason for the failure of the server; may be empty."""
    fault = (server or {}).get("fault") or {}
    return without_values(str(fault.get("message") or ""))


class NodepoolOpenStackServer(dict[str, Any]):
    """The raw JSON of a server with the address attributes which the SDK reads and writes."""

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return self.get(_ATTRIBUTES[name])
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ATTRIBUTES:
            self[_ATTRIBUTES[name]] = value
        else:
            super().__setattr__(name, value)


def quota_from_flavor(
    flavor: Mapping[str, Any], label: Any = None, volumes: list[Any] | None = None
) -> QuotaInformation:
    """Use of one server: by its flavor, and the volume of *label* or the attached *volumes*."""
    extra: dict[str, float] = {}
    if label is not None and label.boot_from_volume:
        extra = {"volumes": 1, "volume-gb": label.volume_size}
    elif volumes:
        extra = {
            "volumes": len(volumes),
            "volume-gb": sum(volume.get("size") or 0 for volume in volumes),
        }
    return QuotaInformation(instances=1, cores=flavor.get("vcpus"), ram=flavor.get("ram"), **extra)


def quota_from_limits(
    compute: Mapping[str, Any], volume: Mapping[str, Any] | None = None
) -> QuotaInformation:
    """Return the limits of the project; -1 and unreported ones are unlimited."""

    def bound(value: float | None) -> float:
        return math.inf if value is None or value == -1 else value

    extra: dict[str, float] = {}
    if volume is not None:
        absolute = volume.get("absolute") or {}
        extra = {
            "volumes": bound(absolute.get("maxTotalVolumes")),
            "volume-gb": bound(absolute.get("maxTotalVolumeGigabytes")),
        }
    return QuotaInformation(
        instances=bound(compute.get("max_total_instances")),
        cores=bound(compute.get("max_total_cores")),
        ram=bound(compute.get("max_total_ram_size")),
        default=math.inf,
        **extra,
    )


class OpenStackInstance(MachineInstance):
    def __init__(
        self,
        provider: OpenStackProviderConfig,
        server: NodepoolOpenStackServer,
        quota: QuotaInformation,
    ) -> None:
        super().__init__(server["id"], server.get("metadata") or {}, quota)
        # Unexpanded records, as of a listing, have no addresses.
        self.public_ipv4 = server.get("public_v4")
        self.public_ipv6 = server.get("public_v6")
        self.private_ipv4 = server.get("private_v4") or self.public_ipv4
        self.interface_ip = server.get("interface_ip")
        self.host_id = server.get("hostId")
        self.cloud = provider.cloud_config.name
        self.region = provider.region_name
        self.az = server.get("OS-EXT-AZ:availability_zone")


class OpenStackResource(Leftover):
    """``type``: instance, floatingip, volume or image."""

    def belongs_to(self, external_id: object) -> bool:
        # A creation that was not answered may have created a second server. Floating IPs and
        # volumes do not name their server.
        return self.type != "instance" or external_id == self.id

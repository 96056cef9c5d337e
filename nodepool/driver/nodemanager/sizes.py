"""Sizes of slivers and hosts: what a label needs, and whether it fits (NM-C.3, NM-C.8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nodepool.driver.nodemanager.config import NodeManagerLabel
from nodepool.driver.utils import QuotaInformation


class Amounts(NamedTuple):
    """Per mille of guaranteed CPU, memory in MiB, disk in KiB, and number of slivers."""

    cpu: float
    memory: float
    disk: float
    slivers: float = 1

    def minus(self, other: Amounts) -> Amounts:
        return Amounts(*(mine - its for mine, its in zip(self, other, strict=True)))

    def fits_in(self, other: Amounts) -> bool:
        return all(mine <= its for mine, its in zip(self, other, strict=True))


def amounts_of(found: Mapping[str, Any]) -> Amounts:
    """Return the amounts of a capacity, or of what is allocated of it."""
    return Amounts(*(found[name] for name in Amounts._fields))


def rspec_of(label: NodeManagerLabel, cores: int) -> dict[str, int]:
    """Return the resources that the label specifies, for a host with `cores` cores."""
    wanted: dict[str, int] = {}
    if label.cpus:
        # Rounded down: slivers for all cores of a host must fit on it.
        wanted["nm_cpu_guaranteed_share"] = max(1, int(1000 * label.cpus / cores))
    if label.cpu_limit:
        wanted["nm_cpu_limit"] = min(1000, max(1, round(1000 * label.cpu_limit / cores)))
    for name, value, factor in (
        ("nm_mem_limit", label.ram, 1),
        ("nm_disk_quota", label.disk, 1 << 20),
        ("nm_pids_max", label.pids, 1),
        ("nm_net_max_rate", label.net_max, 1),
        ("nm_net_min_rate", label.net_min, 1),
    ):
        if value:
            wanted[name] = int(value) * factor
    return {**wanted, **label.rspec}


def needed_by(label: NodeManagerLabel, capacity: Mapping[str, Any]) -> Amounts:
    """Return a sliver's usage on a host of that capacity; unlimited memory is all memory."""
    # Older node managers have no defaults, and count only specified resources.
    default = capacity.get("default") or {"memory": 0, "disk": 0}
    rspec = rspec_of(label, int(capacity["cores"]))
    memory = rspec.get("nm_mem_limit", default["memory"])
    if not memory and default["memory"]:
        memory = capacity["memory"]
    return Amounts(
        rspec.get("nm_cpu_guaranteed_share", 0), memory, rspec.get("nm_disk_quota", default["disk"])
    )


def too_large(label: NodeManagerLabel, name: str, capacity: Mapping[str, Any]) -> str | None:
    """Return that host's resources if it could never run a sliver of the label, else None."""
    needs = needed_by(label, capacity)
    if needs.fits_in(amounts_of(capacity)):
        return None
    return (
        f"{name} {capacity['cpu'] * capacity['cores'] / 1000:g} cores, {capacity['memory']} MiB, "
        "and disks of "
        f"{capacity['disk'] / (1 << 20):.1f} GiB; it needs "
        f"{needs.cpu * capacity['cores'] / 1000:g}, {needs.memory:g} and "
        f"{needs.disk / (1 << 20):.1f}"
    )


def quota_for(label: NodeManagerLabel, capacity: Mapping[str, Any] | None) -> QuotaInformation:
    """Return a sliver's usage of provider limits on a host of that capacity, if known."""
    needs = needed_by(label, capacity or {"cores": 1})
    return QuotaInformation(
        cores=label.cpus, instances=1, ram=needs.memory, disk=needs.disk / (1 << 20)
    )


def quota_of(rspec: Mapping[str, Any], cores: int) -> QuotaInformation:
    """Return the usage of provider limits of a sliver that has these resources."""
    return QuotaInformation(
        cores=rspec.get("nm_cpu_guaranteed_share", 0) * cores / 1000,
        instances=1,
        ram=rspec.get("nm_mem_limit", 0),
        disk=rspec.get("nm_disk_quota", 0) / (1 << 20),
    )

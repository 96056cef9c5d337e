"""Images in the cloud, from ``_listImages`` of the adapter or provider (DRV-3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nodepool.driver.provider import Provider


def adapter_of(manager: Provider) -> Any:
    """Return the provider's adapter; the provider itself if it has none."""
    return getattr(manager, "adapter", manager)


def listing_of(manager: Provider) -> Callable[[], Iterable[Any]] | None:
    """Return the provider's method for listing the images in its cloud, or None."""
    for name in ("listImages", "_listImages"):
        method: Callable[[], Iterable[Any]] | None = getattr(adapter_of(manager), name, None)
        if method is not None:
            return method
    return None


def get_field(item: Any, name: str) -> Any:
    """Return a field of an object or mapping, clouds have both; None when it is missing."""
    if hasattr(item, name):
        return getattr(item, name)
    try:
        return item[name]
    except (KeyError, TypeError, IndexError):
        return None


def properties_of(image: object) -> Any:
    return get_field(image, "properties") or get_field(image, "metadata") or {}


#: Properties that nova sets in an image of a server; the last ones when the server has a volume.
SNAPSHOT_PROPERTIES = ("instance_uuid", "base_image_ref", "block_device_mapping", "bdm_v2")


def is_snapshot(image: object) -> bool:
    """Return whether the image is a snapshot of a server, whose image's tags it inherits."""
    for item in (image, properties_of(image)):
        if get_field(item, "image_type") == "snapshot" or any(
            get_field(item, name) is not None for name in SNAPSHOT_PROPERTIES
        ):
            return True
    return False

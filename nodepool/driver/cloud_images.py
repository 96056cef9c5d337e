"""Images as the drivers list them: by ``_listImages`` of the adapter or provider (driver-api.md section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def listing_of(manager: Any) -> Callable[[], Iterable[Any]] | None:
    """The way of a provider to list the images in its cloud, None when it has none."""
    adapter = getattr(manager, "adapter", manager)
    for name in ("listImages", "_listImages"):
        method: Callable[[], Iterable[Any]] | None = getattr(adapter, name, None)
        if method is not None:
            return method
    return None


def value_of(item: Any, name: str) -> Any:
    """Of an object or a mapping, clouds have both; None when it is not there."""
    if hasattr(item, name):
        return getattr(item, name)
    try:
        return item[name]
    except (KeyError, TypeError, IndexError):
        return None


def properties_of(image: Any) -> Any:
    """Object or mapping."""
    return value_of(image, "properties") or value_of(image, "metadata") or {}

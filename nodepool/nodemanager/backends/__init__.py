"""Registry of backends, including entry points `nodepool.nodemanager.backends` (NM-C.2)."""

from __future__ import annotations

import pkgutil
from importlib.metadata import entry_points

from nodepool.nodemanager.backends.base import Backend, BackendError

ENTRY_POINTS = "nodepool.nodemanager.backends"
OURS = {
    "native": "nodepool.nodemanager.backends.native:NativeBackend",
    "podman": "nodepool.nodemanager.backends.podman:PodmanBackend",
    "nspawn": "nodepool.nodemanager.backends.nspawn:NspawnBackend",
    "rootless": "nodepool.nodemanager.backends.rootless:RootlessBackend",
}


def names() -> list[str]:
    """Return all backends that can be named in the configuration, sorted."""
    return sorted(set(OURS) | {point.name for point in entry_points(group=ENTRY_POINTS)})


def load(name: str) -> type[Backend]:
    """Return the class of a backend. BackendError: it does not exist or cannot be loaded."""
    try:
        for point in entry_points(group=ENTRY_POINTS):
            if point.name == name:
                found = point.load()
                break
        else:
            if name not in OURS:
                raise BackendError(f"unknown backend {name!r}; there are: {', '.join(names())}")
            found = pkgutil.resolve_name(OURS[name])
    except (ImportError, AttributeError) as error:
        raise BackendError(f"backend {name!r} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendError(
            f"backend {name!r}: its entry point is not a subclass of {Backend.__module__}.Backend"
        )
    return found

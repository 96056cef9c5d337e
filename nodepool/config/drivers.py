"""Drivers as seen by a configuration: plug-ins that interpret the options of providers.

The registry belongs to :mod:`nodepool.driver`, which builds on this package.
:mod:`nodepool.config`, the interface for outside code, connects the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from nodepool.base.files import FileIdentity

BUILTIN_NAMES = (
    "aws",
    "azure",
    "example",
    "fake",
    "gce",
    "ibmvpc",
    "kubernetes",
    "metastatic",
    "nodemanager",
    "openshift",
    "openshiftpods",
    "openstack",
    "static",
    "test",
)


class ConfigDriver(Protocol):
    """The part of a driver that a configuration uses."""

    def reset(self) -> None: ...

    def configFiles(self) -> dict[str, FileIdentity | None]: ...

    def getProviderConfig(self, provider: dict[str, Any]) -> Any: ...


class DriverLookup(Protocol):
    """The part of the driver registry that a configuration uses."""

    def load(self, drivers_paths: Sequence[str] = ()) -> None: ...

    def get(self, name: str) -> ConfigDriver: ...

    def loaded(self) -> Iterable[ConfigDriver]: ...

    def known(self) -> list[str]: ...


_registry: Callable[[], DriverLookup] | None = None


def provide(registry: Callable[[], DriverLookup]) -> None:
    """Set what returns the registry of this process; it is called when a driver is needed."""
    global _registry
    _registry = registry


def drivers() -> DriverLookup:
    """Return the registry of this process."""
    assert _registry is not None  # the package provides it before any of its modules can be used
    return _registry()

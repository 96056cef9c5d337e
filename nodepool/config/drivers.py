"""Drivers, as a configuration sees them: plug-ins that understand the options of their providers.

The registry is of :mod:`nodepool.driver`, which builds on this package, so it is found by its name when it is first needed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

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
    """What a configuration asks of a driver."""

    def reset(self) -> None: ...

    def configFiles(self) -> dict[str, int | None]: ...

    def getProviderConfig(self, provider: dict[str, Any]) -> Any: ...


class DriverLookup(Protocol):
    """The registry of drivers."""

    def load(self, drivers_paths: Sequence[str] = ()) -> None: ...

    def get(self, name: str) -> ConfigDriver: ...

    def loaded(self) -> Iterable[ConfigDriver]: ...

    def known(self) -> list[str]: ...


@functools.cache
def drivers() -> DriverLookup:
    """The registry of this process."""
    return cast(DriverLookup, importlib.import_module("nodepool.driver.registry").Drivers)

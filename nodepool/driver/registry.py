"""Finds and loads drivers (DRV-1).

Search order: directories given to :meth:`Drivers.load`, built-ins, entry points of the group
``nodepool.drivers``. Built-ins and entry points are imported at first use only, so that a library
which is missing or large affects only the users of its driver.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from nodepool.config.drivers import BUILTIN_NAMES
from nodepool.config.errors import DriverLoadError, UnknownDriver
from nodepool.driver.provider import Driver

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BUILTIN_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
ENTRY_POINT_GROUP = "nodepool.drivers"


def _driver_class(module: ModuleType, path: str) -> type[Driver]:
    """Return the one driver class defined in that very module; DriverLoadError otherwise."""
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type)
        and issubclass(item, Driver)
        and item.__module__ == module.__name__
    ]
    if len(set(found)) != 1:
        raise DriverLoadError(
            f"{path}: expected exactly one subclass of nodepool.driver.Driver, found {len(found)}"
        )
    return found[0]


def _exec_directory(name: str, path: str) -> ModuleType:
    """Run ``__init__.py`` as a module whose ``__name__`` is the bare driver name.

    The import system knows it under a separate name: a directory with the name of a top-level
    library shadows nothing, and relative imports inside it work.
    """
    filename = os.path.join(path, "__init__.py")
    alias = (
        f"nodepool_driver_{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:12]}_{name}"
    )
    loader = importlib.machinery.SourceFileLoader(alias, filename)
    spec = importlib.util.spec_from_file_location(
        alias, filename, loader=loader, submodule_search_locations=[path]
    )
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__name__ = name

    def submodule(attribute: str) -> ModuleType:
        # ``from . import x`` searches x under the module's (bare) name; this hook is called first.
        if not attribute.startswith("__") and importlib.util.find_spec(f"{alias}.{attribute}"):
            return importlib.import_module(f"{alias}.{attribute}")
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    module.__dict__["__getattr__"] = submodule
    for known in [key for key in sys.modules if key == alias or key.startswith(alias + ".")]:
        del sys.modules[known]
    sys.modules[alias] = module
    try:
        code = loader.get_code(alias)
        assert code is not None
        exec(code, module.__dict__)
    except BaseException:
        sys.modules.pop(alias, None)
        raise
    return module


def _describe_failure(name: str, path: str, exc: BaseException) -> DriverLoadError:
    text = f"{name}: driver cannot be loaded from {path}: {type(exc).__name__}: {exc}"
    if isinstance(exc, ImportError):
        parents = (name, f"nodepool.driver.{name}")
        if exc.name and any(
            exc.name == parent or exc.name.startswith(f"{parent}.") for parent in parents
        ):
            text += (
                "; a driver of drivers-path imports its own modules relatively (from . import ...)"
            )
        else:
            missing = f" {exc.name!r}" if exc.name else ""
            text += f"; install the missing Python module{missing}"
    elif isinstance(exc, DriverLoadError):
        text = f"{name}: driver cannot be loaded: {exc}"
    return DriverLoadError(text)


def _meant(name: str) -> str:
    """Return suggestions for an unknown name, for the end of a message."""
    close = difflib.get_close_matches(name, Drivers.known(), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _Registry(Mapping[str, Driver]):
    """Driver name -> instance, created at first access. Broken drivers are omitted."""

    def __init__(self, instances: Mapping[str, Driver] | None = None) -> None:
        self.instances = dict(instances or {})
        #: Where each of the others is, and how to create its instance.
        self.pending: dict[str, tuple[str, Callable[[], Driver]]] = {}
        self.failures: dict[str, DriverLoadError] = {}
        self._entry_points_read = False

    def add(self, name: str, where: str, make: Callable[[], Driver]) -> bool:
        """Add a driver; return False if there is one of that name."""
        if name in self.instances or name in self.pending or name in self.failures:
            return False
        self.pending[name] = (where, make)
        return True

    def read_entry_points(self) -> None:
        if self._entry_points_read:
            return
        self._entry_points_read = True
        # Scans all installed distributions, hence only when no directory has the name.
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINT_GROUP):
            if not self.add(
                point.name, f"entry point {point.value}", functools.partial(_of_entry_point, point)
            ):
                Drivers.log.warning(
                    "Driver %s of entry point %s is hidden by another one", point.name, point.value
                )

    def load_one(self, name: str) -> Driver:
        """Return the instance; KeyError for an unknown name, DriverLoadError for a broken
        driver.
        """
        if name in self.instances:
            return self.instances[name]
        if name in self.failures:
            raise self.failures[name]
        if name not in self.pending:
            self.read_entry_points()
        where, make = self.pending.pop(name)
        try:
            instance = self.instances[name] = make()
        except Exception as exc:
            error = self.failures[name] = _describe_failure(name, where, exc)
            Drivers.log.error("%s", error)
            Drivers.log.debug("Driver that cannot be loaded:", exc_info=exc)
            raise error from exc
        return instance

    def __getitem__(self, name: str) -> Driver:
        with Drivers._lock:
            try:
                return self.load_one(name)
            except DriverLoadError as exc:
                raise KeyError(name) from exc

    def __iter__(self) -> Iterator[str]:
        """Yield every usable name; loads all drivers, unlike :meth:`Drivers.loaded`."""
        with Drivers._lock:
            self.read_entry_points()
            for name in list(self.pending):
                with contextlib.suppress(DriverLoadError):
                    self.load_one(name)
            return iter(sorted(self.instances))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        return bool(self.instances or self.pending or self.failures)


def _of_entry_point(point: EntryPoint) -> Driver:
    found = point.load()
    if isinstance(found, ModuleType):
        found = _driver_class(found, point.value)
    if not (isinstance(found, type) and issubclass(found, Driver)):
        raise DriverLoadError(
            f"entry point {point.value} is not a subclass of nodepool.driver.Driver"
        )
    return found()


def _of_directory(name: str, path: str) -> Driver:
    return _driver_class(_exec_directory(name, path), path)()


def _builtin(name: str, path: str) -> Driver:
    return _driver_class(importlib.import_module(f"nodepool.driver.{name}"), path)()


class Drivers:
    """Process-wide registry of drivers."""

    log = logging.getLogger("nodepool.driver.Drivers")
    drivers: Mapping[str, Driver] = _Registry()
    drivers_paths: list[str] | None = None
    _lock = threading.RLock()

    @staticmethod
    def load(drivers_paths: Sequence[str] = ()) -> None:
        """Fill the registry; the directories are searched in order, first hit for a name wins."""
        paths = list(drivers_paths)
        with Drivers._lock:
            if paths == Drivers.drivers_paths and Drivers.drivers:
                return
            registry = _Registry()
            for directory in paths:
                if os.path.realpath(directory) != os.path.realpath(BUILTIN_DIRECTORY):
                    Drivers._load_directory(registry, directory)
            for name in BUILTIN_NAMES:
                path = os.path.join(BUILTIN_DIRECTORY, name)
                if os.path.isfile(os.path.join(path, "__init__.py")) and not registry.add(
                    name, path, functools.partial(_builtin, name, path)
                ):
                    Drivers.log.warning("Built-in driver %s is replaced by one of %s", name, paths)
            Drivers.drivers = registry
            Drivers.drivers_paths = paths

    @staticmethod
    def _load_directory(registry: _Registry, directory: str) -> None:
        try:
            names = sorted(os.listdir(directory))
        except OSError as exc:
            Drivers.log.error("Drivers directory %s cannot be read: %s", directory, exc.strerror)
            return
        for name in names:
            path = os.path.join(directory, name)
            if not os.path.isfile(os.path.join(path, "__init__.py")):
                continue
            if not registry.add(name, path, functools.partial(_of_directory, name, path)):
                Drivers.log.warning(
                    "Driver %s in %s is ignored: an earlier directory has one", name, path
                )
                continue
            try:
                registry.load_one(name)
            except DriverLoadError as error:
                if isinstance(error.__cause__, DriverLoadError):
                    del registry.failures[
                        name
                    ]  # it has no driver: a later one of that name is used

    @staticmethod
    def _registry() -> _Registry:
        """Return the registry, which outside code may replace by any mapping (lock held)."""
        if not Drivers.drivers:
            Drivers.load(Drivers.drivers_paths or ())
        registry = Drivers.drivers
        return registry if isinstance(registry, _Registry) else _Registry(registry)

    @staticmethod
    def get(name: str) -> Driver:
        """Return the driver. UnknownDriver (a RuntimeError) or DriverLoadError: not usable."""
        with Drivers._lock:
            try:
                return Drivers._registry().load_one(name)
            except KeyError:
                raise UnknownDriver(f"{name}: unknown driver{_meant(name)}") from None

    @staticmethod
    def loaded() -> list[Driver]:
        """Return the instances that exist already."""
        with Drivers._lock:
            return list(Drivers._registry().instances.values())

    @staticmethod
    def known() -> list[str]:
        """Return the names that :meth:`get` accepts, without broken ones; imports nothing."""
        with Drivers._lock:
            registry = Drivers._registry()
            registry.read_entry_points()
            return sorted(registry.instances.keys() | registry.pending.keys())

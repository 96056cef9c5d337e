"""Errors in configuration: the message first, then the position (CFG-6 and CFG-12)."""

from __future__ import annotations

from collections.abc import Iterable

import yaml

from nodepool.exceptions import ConfigurationError

PathItem = str | int


class ConfigError(ConfigurationError):
    """An invalid option.

    ``where`` is its path from the top of the file; ``file`` and ``line`` are filled in later.
    """

    def __init__(self, message: str, where: Iterable[PathItem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.where: tuple[PathItem, ...] = tuple(where)
        self.context: list[str] = []
        self.file: str | None = None
        self.line: int | None = None

    def __str__(self) -> str:
        place = list(self.context)
        if self.file:
            place.insert(0, f"{self.file}:{self.line}" if self.line else self.file)
        return f"{self.message} ({', '.join(place)})" if place else self.message


class UnknownName(ConfigError, KeyError):
    """A label, image or parent is used but not defined; ``name`` is the missing one."""

    name: object = None

    __str__ = ConfigError.__str__


class ProviderLoadError(ConfigError, RuntimeError):
    """The driver refused the options of a provider."""


class ProviderUnavailable(ConfigError):
    """A provider cannot be used here (library or cloud description missing); others can."""


class UnknownDriver(ConfigurationError, RuntimeError):
    """There is no driver of that name."""


class DriverLoadError(ConfigurationError, RuntimeError):
    """The driver exists but cannot be loaded, for example because a library is missing."""


class ConfigSyntaxError(ConfigError, yaml.YAMLError):
    """The file is not YAML."""

    __str__ = ConfigError.__str__


class ConfigFileMissing(ConfigError, FileNotFoundError):
    """The file does not exist."""

    __str__ = ConfigError.__str__

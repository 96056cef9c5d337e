"""Errors in configuration: the message first, then the position (CFG-6 and CFG-12)."""

from __future__ import annotations

import yaml

from nodepool.exceptions import ConfigError, ConfigurationError


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

"""Reading, checking and modelling the configuration (CFG); section 9 lists public names.

Nodepool's own code imports the modules of this package, not these names.
"""

from typing import cast

from nodepool.config.diskimages import DiskImage
from nodepool.config.drivers import DriverLookup, provide
from nodepool.config.errors import ProviderLoadError, ProviderUnavailable, UnknownName
from nodepool.config.live.watch import ConfigWatcher
from nodepool.config.loading import checkRecentConfig, loadConfig, loadSecureConfig
from nodepool.config.model import Config, Label, get_provider_config
from nodepool.config.reading import as_list, substitute_env_vars
from nodepool.config.source import openConfig
from nodepool.config.zookeeper import ZooKeeperConnectionConfig, buildZooKeeperHosts
from nodepool.exceptions import ConfigError

__all__ = [
    "Config",
    "ConfigError",
    "ConfigWatcher",
    "DiskImage",
    "Label",
    "ProviderLoadError",
    "ProviderUnavailable",
    "UnknownName",
    "ZooKeeperConnectionConfig",
    "as_list",
    "buildZooKeeperHosts",
    "checkRecentConfig",
    "get_provider_config",
    "loadConfig",
    "loadSecureConfig",
    "openConfig",
    "substitute_env_vars",
]


def _drivers() -> DriverLookup:
    """Return the registry of drivers, imported on first use: it depends on this package."""
    from nodepool.driver.registry import Drivers

    return cast(DriverLookup, Drivers)


provide(_drivers)

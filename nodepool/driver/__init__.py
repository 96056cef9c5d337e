"""The plug-in API (DRV). Importing it loads no driver and no cloud library."""

from nodepool.base.config_value import ConfigValue
from nodepool.config.errors import DriverLoadError, UnknownDriver
from nodepool.config.model import ConfigPool, DriverConfig, ProviderConfig
from nodepool.driver.provider import Driver, Execution, Provider, ProviderNotifications
from nodepool.driver.registry import Drivers
from nodepool.driver.request.base import NodeRequestHandlerNotifications
from nodepool.driver.request.handler import NodeRequestHandler
from nodepool.driver.request.state import LabelRecorder

__all__ = [
    "ConfigPool",
    "ConfigValue",
    "Driver",
    "DriverConfig",
    "DriverLoadError",
    "Drivers",
    "Execution",
    "LabelRecorder",
    "NodeRequestHandler",
    "NodeRequestHandlerNotifications",
    "Provider",
    "ProviderConfig",
    "ProviderNotifications",
    "UnknownDriver",
]

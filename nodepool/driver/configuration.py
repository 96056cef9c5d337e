"""Base classes of configuration objects (driver-api.md section 3)."""

from __future__ import annotations

import abc
import math
from typing import TYPE_CHECKING, Any

import voluptuous as v

if TYPE_CHECKING:
    from nodepool.config import Config


class ConfigValue(metaclass=abc.ABCMeta):  # noqa: B024
    """Compares by content: every attribute but those named in ``ignore_equality`` counts."""

    ignore_equality: list[str] = []

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, self.__class__):
            return False
        mine, theirs = self.__dict__, other.__dict__
        return all(
            mine.get(key) == theirs.get(key)
            for key in mine.keys() | theirs.keys()
            if key not in self.ignore_equality
        )

    def __ne__(self, other: object) -> bool:
        return not self.__eq__(other)

    def __hash__(self) -> int:
        # The name is set once and never changes; equal objects have equal names.
        name = None if "name" in self.ignore_equality else self.__dict__.get("name")
        return hash(("ConfigValue", str(name)))

    def __repr__(self) -> str:
        name = getattr(self, "name", None)
        cls = self.__class__.__name__
        return f"<{cls} {name}>" if name else f"<{cls}>"


class ConfigPool(ConfigValue, metaclass=abc.ABCMeta):
    """A pool of a provider; pools of different classes are never equal."""

    def __init__(self) -> None:
        self.labels: Any = {}
        self.max_servers: float = math.inf
        self.node_attributes: dict[str, Any] | None = None
        self.priority: int | None = None
        self.ignore_provider_quota = False
        self.azs: list[str] | None = None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and super().__eq__(other)

    __hash__ = ConfigValue.__hash__

    @classmethod
    def getCommonSchemaDict(cls) -> dict[Any, Any]:
        return {"max-servers": int, "node-attributes": dict, "priority": int}

    @abc.abstractmethod
    def load(self, pool_config: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Take the common keys from *pool_config*; subclasses call up."""
        self.max_servers = pool_config.get("max-servers", math.inf)
        self.node_attributes = pool_config.get("node-attributes")
        self.priority = pool_config.get("priority")


class DriverConfig(ConfigValue):
    """The driver of a provider; holds its name only."""

    def __init__(self) -> None:
        self.name: str | None = None


class ProviderConfig(ConfigValue, metaclass=abc.ABCMeta):
    """One entry of ``providers``; made from its YAML dict, filled by ``load``."""

    def __init__(self, provider: dict[str, Any]) -> None:
        self.name: str = provider["name"]
        self.provider = provider
        self.driver = DriverConfig()
        self.driver.name = provider.get("driver", "openstack")
        self.max_concurrency: int = provider.get("max-concurrency", -1)
        self.priority: int | None = provider.get("priority")

    @classmethod
    def getCommonSchemaDict(cls) -> dict[Any, Any]:
        return {v.Required("name"): str, "driver": str, "max-concurrency": int, "priority": int}

    @property
    @abc.abstractmethod
    def pools(self) -> dict[str, ConfigPool]:
        """Pools by name."""

    @property
    @abc.abstractmethod
    def manage_images(self) -> bool:
        """True when the builder shall upload images here."""

    @abc.abstractmethod
    def load(self, newconfig: Config) -> None:
        """Parse ``self.provider``; *newconfig* is the whole configuration under construction."""

    @abc.abstractmethod
    def getSchema(self) -> v.Schema:
        """Schema of the provider dict without the common keys; used by validation only."""

    @abc.abstractmethod
    def getSupportedLabels(self, pool_name: str | None = None) -> set[str]:
        """Labels offered by the named pool, or by all pools."""

"""Configuration of the metastatic driver (MST-2)."""

from __future__ import annotations

from typing import Any

import voluptuous as v

from nodepool.base.config_value import ConfigValue
from nodepool.base.option import REQUIRED, at, changed, entries, inherited, load, option, schema
from nodepool.config.errors import UnknownName
from nodepool.config.model import Config, ConfigPool, ProviderConfig
from nodepool.driver.provider import Driver
from nodepool.driver.utils import RateLimiter
from nodepool.exceptions import ConfigError


class MetastaticCloudImage(ConfigValue):
    """Stands for an image where the framework requires one; the backing node has the values."""

    def __init__(self) -> None:
        self.name = "unused"
        self.username = "unknown"
        self.python_path = "unknown"
        # None is a value here, and an instance cannot override with it.
        self.shell_type: str | None = None
        self.connection_type = "unknown"
        self.connection_port = "unknown"


class MetastaticLabel(ConfigValue):
    ignore_equality = ["pool"]
    diskimage = None
    name: str = option(str, REQUIRED, "name of a top-level label")
    backing_label: str = option(str, REQUIRED, "label of the backing nodes")
    max_parallel_jobs: int = option(int, 1, "slots per backing node")
    grace_time: float = option(int, 60, "seconds that an empty backing node is kept")
    min_retention_time: float = option(
        int, 0, "minimum age in seconds before a backing node is returned"
    )
    max_age: float | None = option(
        int,
        None,
        "maximum age in seconds for new jobs; an older backing node is returned when it is empty",
    )
    host_key_checking: bool = option(
        bool, inherited("pool"), "read the host keys again for each slot"
    )

    def __init__(
        self,
        label: dict[str, Any],
        provider_config: MetastaticProviderConfig,
        provider_pool: MetastaticPool,
    ) -> None:
        self.pool = provider_pool
        self.cloud_image = MetastaticCloudImage()
        load(self, label)
        if self.max_age is not None and self.max_age < self.min_retention_time:
            raise ConfigError(
                f"label {self.name}: The max_age must be greater than or equal to the "
                "min_retention_time",
                where=("max-age",),
            )
        if not isinstance(self.max_parallel_jobs, int) or self.max_parallel_jobs < 1:
            raise ConfigError(
                f"label {self.name}: max-parallel-jobs must be at least 1",
                where=("max-parallel-jobs",),
            )

    def isBackingConfigEqual(self, other: MetastaticLabel) -> bool:
        """Return whether both labels use their backing nodes identically."""
        return (
            self.backing_label == other.backing_label
            and self.max_parallel_jobs == other.max_parallel_jobs
            and self.grace_time == other.grace_time
            and self.min_retention_time == other.min_retention_time
            and self.max_age == other.max_age
        )


class MetastaticPool(ConfigPool):
    ignore_equality = ["provider"]
    name: str = option(str, REQUIRED, "part of records and metrics")
    labels: dict[str, MetastaticLabel] = option(
        [MetastaticLabel], {}, "labels that the pool offers", key=v.Required, stored=False
    )
    host_key_checking: bool = option(bool, False, "default of the labels")

    def __init__(
        self, provider_config: MetastaticProviderConfig, pool_config: dict[str, Any]
    ) -> None:
        super().__init__()
        self.provider = provider_config
        self.load(pool_config)

    def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
        super().load(pool_config)


class MetastaticProviderConfig(ProviderConfig):
    # The driver object is the same for all; the limiter is not a setting.
    ignore_equality = ["driver_object", "rate_limiter"]
    boot_timeout: float = option(int, 120, "seconds until the slot's port answers")
    launch_timeout: float = option(int, 3600, "seconds for the whole launch")
    launch_retries: int = option(int, 3, "attempts in total")
    # A failed slot does not count as a failed machine.
    max_launch_failures_per_hour: int = changed(
        ProviderConfig.max_launch_failures_per_hour, default=-1, shown="no limit"
    )
    rate: float = option(float, 1, "", hidden=True)
    _pools: dict[str, MetastaticPool] = option(
        [MetastaticPool], {}, "groups of labels", name="pools", key=v.Required, stored=False
    )

    def __init__(self, driver: Driver, provider: dict[str, Any]) -> None:
        super().__init__(provider)
        self.driver_object = driver
        self.rate_limiter = RateLimiter(self.name, self.rate)

    def load(self, newconfig: Config) -> None:
        load(self, self.provider)
        self.rate_limiter = RateLimiter(self.name, self.rate)
        self._pools = {}
        by_backing_label: dict[str, MetastaticLabel] = {}
        for where, entry in entries(self.provider.get("pools"), "pools"):
            pool = MetastaticPool(self, entry)
            self._pools[pool.name] = pool
            with at(where):
                self._load_labels(pool, entry.get("labels"), by_backing_label, newconfig)

    def _load_labels(
        self,
        pool: MetastaticPool,
        given: object,
        by_backing_label: dict[str, MetastaticLabel],
        newconfig: Config,
    ) -> None:
        for where, entry in entries(given, "labels"):
            with at(where):
                if not entry.get("backing-label"):
                    raise ConfigError("required key 'backing-label' is missing in labels")
                label = MetastaticLabel(entry, self, pool)
                pool.labels[label.name] = label
                known = by_backing_label.setdefault(label.backing_label, label)
                if not known.isBackingConfigEqual(label):
                    raise ConfigError(
                        "Multiple label definitions for the same backing label "
                        f"{label.backing_label!r} are not identical: {known.name!r} and "
                        f"{label.name!r} must have the same max-parallel-jobs, grace-time, "
                        "min-retention-time and max-age"
                    )
                if label.name not in newconfig.labels:
                    raise UnknownName(
                        f"label {label.name!r} is not defined in the top-level labels list",
                        where=("name",),
                    )
                newconfig.labels[label.name].pools.append(pool)

    def _getLabel(self, name: str) -> MetastaticLabel | None:
        """Return the label of any pool, None when it is not configured (any more)."""
        for pool in self._pools.values():
            if name in pool.labels:
                return pool.labels[name]
        return None

    def getSchema(self) -> v.Schema:
        return v.Schema(schema(type(self)))

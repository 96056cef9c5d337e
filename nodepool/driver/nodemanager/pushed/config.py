"""Options for hosts that are nodes of another provider (NM-C.8, ``backing-label``)."""

from __future__ import annotations

import copy
from typing import Any

import voluptuous as v

from nodepool.config.errors import ConfigError
from nodepool.driver import ConfigValue
from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager.client.daemon import check_config

#: Settings of the pushed daemon that depend on its location and connection.
DECIDED = ("state-dir", "run-dir", "log-file", "host-name", "api")
#: Options that contradict backing nodes, or that need permanent hosts.
CONTRADICTORY = ("hosts", "discover", "ca-cert", "client-cert", "client-key", "diskimages")
#: Maximum slivers of one backing node, whatever its capacity.
MAX_SLIVERS = 100

SCHEMA: dict[Any, Any] = {
    "backing-label": str,
    "backing-ssh-key": str,
    "backing-config": dict,
    "backing-directory": str,
    "max-backing-nodes": v.All(int, v.Range(min=1)),
    "grace-time": v.All(int, v.Range(min=0)),
    "min-retention-time": v.All(int, v.Range(min=0)),
    "max-age": v.All(int, v.Range(min=1)),
}


class BackingOptions(ConfigValue):
    """Options for requesting, using and releasing backing nodes; times in seconds."""

    def __init__(self, options: dict[str, Any]) -> None:
        """:raises ConfigError: an option is wrong, missing or of no use."""
        self.label = str(options["backing-label"])
        self.ssh_key = str(options.get("backing-ssh-key") or "")
        self.directory: str | None = options.get("backing-directory")
        self.max_nodes: int | None = options.get("max-backing-nodes")
        self.grace_time: float = options.get("grace-time", 60)
        self.min_retention_time: float = options.get("min-retention-time", 0)
        self.max_age: float | None = options.get("max-age")
        for key in CONTRADICTORY:
            if options.get(key):
                reason = (
                    "uploads would not reach machines that are launched later; use a cloud-image whose root is on the "
                    "backing nodes, such as host"
                    if key == "diskimages"
                    else "backing nodes are the hosts"
                )
                raise ConfigError(f"{key} cannot be used together with backing-label: {reason}", where=(key,))
        if not self.ssh_key:
            raise ConfigError(
                "backing-label needs backing-ssh-key: the private key that logs in to backing nodes", where=("backing-label",)
            )
        if not self.ssh_key.startswith("/"):
            raise ConfigError("backing-ssh-key must be an absolute path", where=("backing-ssh-key",))
        if self.directory is not None and (not self.directory.startswith("/") or self.directory.rstrip("/") == ""):
            raise ConfigError("backing-directory must be an absolute path", where=("backing-directory",))
        if self.max_age is not None and self.max_age < self.min_retention_time:
            raise ConfigError("max-age must be greater than or equal to min-retention-time", where=("max-age",))
        self.config = self._daemon(options.get("backing-config") or {})

    @staticmethod
    def _daemon(given: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of the pushed daemon."""
        for key in DECIDED:
            if key in given:
                raise ConfigError(
                    f"backing-config: {key} cannot be set, each backing node gets its own", where=("backing-config", key)
                )
        config = {"max-slivers": MAX_SLIVERS, **copy.deepcopy(given)}
        try:
            check_config(config, "backing-config")
        except ConfigurationError as error:
            raise ConfigError(str(error), where=("backing-config",)) from None
        if any("zookeeper" in source for source in config.get("sources") or ()):
            raise ConfigError(
                "backing-config: a backing node cannot read slivers from ZooKeeper, this launcher sends them",
                where=("backing-config", "sources"),
            )
        return config

    @property
    def max_slivers(self) -> int:
        return int(self.config["max-slivers"])

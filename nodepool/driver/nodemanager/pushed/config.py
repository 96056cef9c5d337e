"""Options for hosts that are nodes of another provider (NM-C.8, ``backing-label``)."""

from __future__ import annotations

import copy
from typing import Any

import voluptuous as v

from nodepool.base.option import load, option
from nodepool.driver import ConfigValue
from nodepool.exceptions import ConfigError, ConfigurationError
from nodepool.nodemanager.client.daemon import check_config

#: Settings of the pushed daemon that depend on its location and connection.
DECIDED = ("state-dir", "run-dir", "log-file", "host-name", "api")
#: Options that contradict backing nodes, or that need permanent hosts.
CONTRADICTORY = ("hosts", "discover", "ca-cert", "client-cert", "client-key", "diskimages")
#: Maximum slivers of one backing node, whatever its capacity.
MAX_SLIVERS = 100


class BackingOptions(ConfigValue):
    """Options for requesting, using and releasing backing nodes; times in seconds."""

    label: str = option(
        str,
        "",
        "label of the backing nodes; a label can override it",
        name="backing-label",
        convert=str,
    )
    ssh_key: str = option(
        str,
        "",
        "absolute path of the private key; the user is that of the node's record",
        name="backing-ssh-key",
    )
    config: dict[str, Any] = option(
        dict,
        {},
        "options of ``nodemanager.yaml`` for the daemons, such as ``max-slivers`` (default here "
        f"{MAX_SLIVERS}),"
        " ``ssh: {ports}``, ``network``, ``host-reserve``, ``default-rspec``; directories, name "
        "and API are set automatically",
        name="backing-config",
    )
    directory: str | None = option(
        str,
        None,
        "directory of the daemon",
        name="backing-directory",
        shown="``/var/lib/nodepool-backing`` (root) or ``~/.local/state/nodepool-backing``",
    )
    max_nodes: int | None = option(
        v.All(int, v.Range(min=1)),
        None,
        "maximum number of backing nodes; further requests wait",
        name="max-backing-nodes",
        shown="no limit",
    )
    grace_time: float = option(
        v.All(int, v.Range(min=0)), 60, "seconds that an empty backing node is kept"
    )
    min_retention_time: float = option(
        v.All(int, v.Range(min=0)), 0, "minimum age in seconds before a backing node is returned"
    )
    max_age: float | None = option(
        v.All(int, v.Range(min=1)),
        None,
        "maximum age in seconds for new slivers; an older backing node is returned when it is "
        "empty",
    )

    def __init__(self, options: dict[str, Any]) -> None:
        """:raises ConfigError: an option is wrong, missing or of no use."""
        load(self, options)
        for key in CONTRADICTORY:
            if options.get(key):
                reason = (
                    "uploads would not reach machines that are launched later; use a cloud-image "
                    "whose root is on the "
                    "backing nodes, such as host"
                    if key == "diskimages"
                    else "backing nodes are the hosts"
                )
                raise ConfigError(
                    f"{key} cannot be used together with backing-label: {reason}", where=(key,)
                )
        if not self.ssh_key:
            raise ConfigError(
                "backing-label needs backing-ssh-key: the private key that logs in to backing "
                "nodes",
                where=("backing-label",),
            )
        if not self.ssh_key.startswith("/"):
            raise ConfigError(
                "backing-ssh-key must be an absolute path", where=("backing-ssh-key",)
            )
        if self.directory is not None and (
            not self.directory.startswith("/") or self.directory.rstrip("/") == ""
        ):
            raise ConfigError(
                "backing-directory must be an absolute path", where=("backing-directory",)
            )
        if self.max_age is not None and self.max_age < self.min_retention_time:
            raise ConfigError(
                "max-age must be greater than or equal to min-retention-time", where=("max-age",)
            )
        self.config = self._daemon(self.config)

    @staticmethod
    def _daemon(given: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of the pushed daemon."""
        for key in DECIDED:
            if key in given:
                raise ConfigError(
                    f"backing-config: {key} cannot be set, each backing node gets its own",
                    where=("backing-config", key),
                )
        config = {"max-slivers": MAX_SLIVERS, **copy.deepcopy(given)}
        try:
            check_config(config, "backing-config")
        except ConfigurationError as error:
            raise ConfigError(str(error), where=("backing-config",)) from None
        if any("zookeeper" in source for source in config.get("sources") or ()):
            raise ConfigError(
                "backing-config: a backing node cannot read slivers from ZooKeeper, this launcher "
                "sends them",
                where=("backing-config", "sources"),
            )
        return config

    @property
    def max_slivers(self) -> int:
        return int(self.config["max-slivers"])

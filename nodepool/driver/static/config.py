"""Configuration of the static driver (STA-1)."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import voluptuous as v

from nodepool.base.option import REQUIRED, at, entries, option, schema, values
from nodepool.config.errors import UnknownName
from nodepool.config.model import Config, ConfigPool, ProviderConfig, probing_of
from nodepool.exceptions import ConfigError

log = logging.getLogger("nodepool.driver.static")


class NodeTuple(NamedTuple):
    """Identity of a host: two entries with the same three values would be the same machine."""

    hostname: str
    username: str
    port: int

    def __str__(self) -> str:
        return f"{self.username}@{self.hostname} port {self.port}"


def nodeTuple(node: Any) -> NodeTuple:
    """Return the identity of a configured host (a dict) or of a registered ``Node``."""
    if isinstance(node, dict):
        return NodeTuple(node["name"], node["username"], node["connection-port"])
    return NodeTuple(node.hostname, node.username, node.connection_port)


def _as_list(value: object) -> list[Any]:
    if not value:
        return []
    return list(value) if isinstance(value, list) else [value]


def _split_labels(value: object) -> list[str]:
    """Return the labels; a string is split at blanks."""
    return value.split() if isinstance(value, str) else _as_list(value)


#: Options of a host.
NODE: dict[str, Any] = {
    "name": option(str, REQUIRED, "host name or address"),
    "labels": option(
        v.Any(str, [str]), [], "a string is split at blanks", key=v.Required, convert=_split_labels
    ),
    "username": option(str, "zuul", "login user of jobs"),
    "timeout": option(int, 5, "seconds for reading the keys", convert=int),
    "host-key-checking": option(
        bool, True, "read the host keys, and check that the machine answers before each use"
    ),
    "host-key": option(
        v.Any(str, [str]), [], "keys that must be among those of the machine", convert=_as_list
    ),
    "connection-port": option(int, 22, "port that the launcher checks", convert=int),
    "connection-type": option(str, "ssh", "``ssh``, ``winrm``, ``network_cli``, ..."),
    "shell-type": option(str, None, "for Ansible, for example ``cmd``"),
    "max-parallel-jobs": option(int, 1, "number of slots"),
    "python-path": option(str, "auto", "Python of the node, for Ansible"),
}


class StaticPool(ConfigPool):
    """A group of hosts; ``nodes``: settings with defaults, ``labels``: set of names."""

    ignore_equality = ["provider"]
    name: str = option(str, "", "part of records and metrics", shown="required")
    nodes: list[dict[str, Any]] = option([NODE], [], "machines", stored=False)

    def load(self, pool_config: dict[str, Any], full_config: Any = None) -> None:
        super().load(pool_config)
        self.labels = set()
        self.nodes = []
        for place, node in entries(_as_list(pool_config.get("nodes")), "nodes"):
            # ssh-port is the older name
            port = node.get("connection-port") or node.get("ssh-port") or 22
            settings = values(NODE, {**node, "connection-port": port})
            labels, slots = settings["labels"], settings["max-parallel-jobs"]
            if not labels:
                raise ConfigError(
                    f"node {node['name']}: at least one label is needed", where=(*place, "labels")
                )
            if not isinstance(slots, int) or slots < 0:
                raise ConfigError(
                    f"node {node['name']}: max-parallel-jobs must be a whole number, not {slots!r}",
                    where=(*place, "max-parallel-jobs"),
                )
            self.nodes.append(settings)
            for label in labels:
                if label in self.labels:
                    continue
                self.labels.add(label)
                if full_config is not None:
                    if label not in full_config.labels:
                        raise UnknownName(
                            f"node {node['name']}: label {label!r} is not defined in the top-level "
                            "labels list",
                            where=(*place, "labels"),
                        )
                    full_config.labels[label].pools.append(self)
            # How the driver tries the host before its node is ready, also after each use.
            settings["probe"] = probing_of(full_config.labels, labels) if full_config else None


class StaticProviderConfig(ProviderConfig):
    _pools: dict[str, StaticPool] = option(
        [StaticPool], {}, "groups of machines", name="pools", stored=False
    )

    def load(self, newconfig: Config) -> None:
        self._pools = {}
        seen: set[NodeTuple] = set()
        elsewhere = {
            host: provider.name
            for provider in newconfig.providers.values()
            if isinstance(provider, StaticProviderConfig)
            for host in provider.hosts()
        }
        for where, entry in entries(self.provider.get("pools"), "pools"):
            pool = StaticPool()
            pool.provider = self
            with at(where):
                pool.load(entry, newconfig)
            self._pools[entry["name"]] = pool
            for number, node in enumerate(pool.nodes):
                host = nodeTuple(node)
                text = f"host {host.hostname} with user {host.username} and port {host.port}"
                if host in seen:
                    raise ConfigError(
                        f"{text} is listed twice; use max-parallel-jobs",
                        where=(*where, "nodes", number),
                    )
                seen.add(host)
                if host in elsewhere:
                    log.warning(
                        "Providers %s and %s both have %s: its jobs may disturb each other",
                        elsewhere[host],
                        self.name,
                        text,
                    )

    def hosts(self) -> dict[NodeTuple, tuple[StaticPool, dict[str, Any]]]:
        """Return pool and settings of each host."""
        return {
            nodeTuple(node): (pool, node) for pool in self._pools.values() for node in pool.nodes
        }

    def getSchema(self) -> v.Schema:
        return v.Schema(schema(type(self)))

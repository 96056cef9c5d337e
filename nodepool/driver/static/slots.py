"""Records of the slots of a static host (STA-2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nodepool import nodeutils
from nodepool.driver.static.config import StaticPool
from nodepool.zk import zookeeper as zk

LAUNCHER = "static driver"
"""Launcher in the record of each static node, by which other releases know it, too."""

GONE_STATES = (zk.BUILDING, zk.DELETING, zk.DELETED)
#: Fields that follow the configuration while a node is idle.
COMPARED = (
    "type",
    "pool",
    "username",
    "connection_port",
    "shell_type",
    "connection_type",
    "python_path",
    "host_keys",
    "attributes",
)


class Slots:
    """The node in each slot of a host."""

    def __init__(self, count: int, nodes: Iterable[zk.Node]) -> None:
        self.nodes: list[zk.Node | None] = [None] * count
        self.excess: list[zk.Node] = []
        homeless = []
        for node in sorted(nodes, key=lambda node: node.id or ""):
            slot = node.slot
            if not isinstance(slot, int):
                homeless.append(node)
            elif 0 <= slot < count and self.nodes[slot] is None:
                self.nodes[slot] = node
            else:
                self.excess.append(node)
        for node in homeless:  # records without slot are old
            if None in self.nodes:
                self.nodes[self.nodes.index(None)] = node
            else:
                self.excess.append(node)

    @property
    def empty(self) -> list[int]:
        return [index for index, node in enumerate(self.nodes) if node is None]

    @property
    def occupied(self) -> list[zk.Node]:
        return [node for node in self.nodes if node is not None]


def is_free(node: zk.Node) -> bool:
    return node.state == zk.READY and node.allocated_to is None


def new_record(
    provider: str, pool: StaticPool, static_node: dict[str, Any], host_keys: Sequence[str]
) -> zk.Node:
    """Return the record of a node of this host that is ready, without its slot."""
    node = zk.Node()
    node.state = zk.READY
    node.provider = provider
    node.pool = pool.name
    node.launcher = LAUNCHER
    node.type = static_node["labels"]
    node.external_id = node.hostname = node.interface_ip = static_node["name"]
    node.username = static_node["username"]
    node.connection_port = static_node["connection-port"]
    node.connection_type = static_node["connection-type"]
    node.python_path = static_node["python-path"]
    node.shell_type = static_node["shell-type"]
    node.attributes = pool.node_attributes
    node.host_keys = list(host_keys)
    nodeutils.set_node_ip(node)
    return node


def in_slot(record: zk.Node, slot: int) -> zk.Node:
    """Return a copy of the record for this slot."""
    node = zk.Node.fromDict(record.toDict())
    node.state = zk.READY  # stamps the time
    node.slot = slot
    return node

"""Rotations: idle nodes that an operator replaces."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from nodepool.zk.drains import Order, names_of
from nodepool.zk.records import BUILDING, INIT, READY, Node


@dataclass(frozen=True)
class Rotation(Order):
    """Idle nodes whose records are older than the one of the rotation are replaced.

    Clocks decide nothing.

    :param zxid: the change of ZooKeeper that wrote this record; not a part of it.
    """

    KINDS = ("label", "image", "provider")
    zxid: int = 0

    @property
    def why(self) -> str:
        """Return why a node is replaced."""
        return f"rotation of {self.name}{f': {self.reason}' if self.reason else ''}"

    def values(self) -> dict[str, Any]:
        values = super().values()
        del values["zxid"]
        return values

    def replaces(self, node: Node) -> bool:
        """Return whether the node is older and of this label, image or provider."""
        return node.stat is not None and node.stat.czxid < self.zxid and self.name in names_of(node)


def remaining(
    rotation: Rotation, nodes: Iterable[Node], static: Collection[str | None]
) -> list[Node]:
    """Return the nodes that the rotation waits for: idle now, or possibly later.

    Nodes in use and held nodes end anyway.

    :param static: providers whose idle nodes remain.
    """
    return [
        node
        for node in nodes
        if node.state in (INIT, BUILDING, READY)
        and node.provider not in static
        and rotation.replaces(node)
    ]

"""Rotations: idle nodes that an operator replaces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nodepool.zk.drains import names_of, parsed
from nodepool.zk.records import BUILDING, INIT, READY, Node

#: What can be rotated.
KINDS = ("label", "image", "provider")


@dataclass(frozen=True)
class Rotation:
    """Idle nodes whose records are older than the one of the rotation are replaced.

    :param kind: one of :data:`KINDS`.
    :param target: its name.
    :param since: UNIX seconds, for people; clocks decide nothing.
    :param by: the operator.
    :param zxid: the change of ZooKeeper that wrote this record; not a part of it.
    """

    kind: str
    target: str
    since: float
    reason: str = ""
    by: str = ""
    zxid: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"

    @property
    def why(self) -> str:
        """Return why a node is replaced."""
        return f"rotation of {self.name}{f': {self.reason}' if self.reason else ''}"

    def values(self) -> dict[str, Any]:
        """Return the stored values."""
        values = asdict(self)
        del values["kind"], values["target"], values["zxid"]
        return values

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> Rotation:
        """Return the record.

        :raises RecordError: it is not valid.
        """
        return cls(*parsed(KINDS, name, values))

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

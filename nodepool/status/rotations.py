"""Rotations: a list of them, and the nodes that they wait for."""

from __future__ import annotations

from nodepool.status.drains import static_providers
from nodepool.status.once import Facade
from nodepool.status.results import Results
from nodepool.zk.drains import moment
from nodepool.zk.records import Node
from nodepool.zk.rotations import Rotation, remaining

COLUMNS = {
    "kind": "Kind",
    "name": "Name",
    "since": "Since",
    "by": "By",
    "reason": "Reason",
    "nodes": "Nodes left",
}


def rotation_list(zk: Facade) -> Results:
    """Return the rotations with the number of nodes that are not replaced yet."""
    rows = [
        {
            "kind": rotation.kind,
            "name": rotation.target,
            "since": moment(rotation.since),
            "by": rotation.by,
            "reason": rotation.reason,
            "nodes": len(left(zk, rotation)),
        }
        for rotation in zk.readNotes(Rotation)
    ]
    return Results(rows, COLUMNS)


def left(zk: Facade, rotation: Rotation) -> list[Node]:
    """Return the nodes that a rotation still waits for."""
    return remaining(rotation, zk.readNodes(), static_providers(zk))


def rotation_of(zk: Facade, node: Node) -> Rotation | None:
    """Return the rotation that replaces this node when it is idle."""
    found = (each for each in zk.readNotes(Rotation) if each.replaces(node))
    return next(found, None) if node.provider not in static_providers(zk) else None

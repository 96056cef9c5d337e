"""Runners of a forge such as GitHub: which have a job, and which wait for a node.

Their daemons use leases only, and note the name of the fleet and the job with each of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from nodepool.lease.record import Terms
from nodepool.status.once import Facade
from nodepool.zk.records import PENDING, REQUESTED, Node, NodeRequest

ELSEWHERE = (
    "a job that waits nevertheless waits for its forge, or for the maximum of the fleet: "
    "see `nodepool-github status` or `nodepool-gitea status`"
)
UNKNOWN = (
    "none of its runners has a lease or waits for one; check that its daemon runs: "
    "`nodepool-github status` or `nodepool-gitea status`"
)


def _fleet_of(stored: object) -> str:
    """Return the fleet whose lease has these terms; empty: none."""
    terms = Terms.read(stored)
    return "" if terms is None else str(terms.notes.get("fleet", "")).rpartition(" ")[2]


def names(zk: Facade) -> set[str]:
    """Return the fleets whose runners have leases or wait for one."""
    stored = (
        *(request.requestor_data for request in zk.readRequests()),
        *(n.user_data for n in zk.readNodes()),
    )
    return {_fleet_of(each) for each in stored} - {""}


def leases_of(zk: Facade, name: str) -> tuple[list[NodeRequest], list[Node]]:
    """Return the requests of runners that wait for a node, and the nodes that have a runner."""
    waiting = [
        request
        for request in zk.readRequests()
        if request.state in (REQUESTED, PENDING) and _fleet_of(request.requestor_data) == name
    ]
    return waiting, [node for node in zk.readNodes() if _fleet_of(node.user_data) == name]


def facts_of(waiting: list[NodeRequest], working: list[Node]) -> Iterator[tuple[str, str]]:
    if waiting:
        yield "waiting requests", ", ".join(sorted(str(request.id) for request in waiting))
    for node in sorted(working, key=lambda node: str(node.id)):
        terms = Terms.read(node.user_data)
        job = terms.notes.get("job") if terms is not None else None
        yield f"node {node.id}", f"runs {job}" if job else "its runner waits for a job"

"""A cluster as commands and pages see it: reports of launchers, requests and problems, without
ZooKeeper.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nodepool.status import cluster, health
from nodepool.zk import reports
from nodepool.zk.mirror.nodes import count_nodes
from nodepool.zk.mirror.progress import ProgressData
from nodepool.zk.records import Node, NodeRequest

NOW = 1_760_000_000.0

#: Keys of a report whose values are objects by name.
NAMED = ("providers", "not_running", "labels", "lately", "tenants")


def report(name: str = "nl01", **content: Any) -> dict[str, Any]:
    """Return a report with this content as readers get it, of a launcher that is ready."""
    empty = {"details": [], "config": {}, "waiting": [], **{key: {} for key in NAMED}}
    (found,) = reports.named(
        [reports.parse(reports.serialize({"hostname": name, "ready": True, **empty, **content}))]
    )
    return found


class Mirror:
    """Reports and requests of a cluster with the pools main of east and west."""

    node_tree = object()

    def __init__(self) -> None:
        self.requests: list[NodeRequest] = []
        self.reports: list[dict[str, Any]] = []
        self.problems: list[dict[str, Any]] = []
        self.nodes: list[Node] = []
        self.uploads: list[Any] = []

    def readNotes(self, _kind: type) -> list[Any]:
        return []

    def ask(self, *labels: str, tenant: str | None = None, age: float = 60.0) -> str:
        request = NodeRequest(f"100-{len(self.requests):010}")
        request.state, request.node_types, request.tenant_name = "requested", list(labels), tenant
        request.created_time = request.state_time = NOW - age
        self.requests.append(request)
        return str(request.id)

    def report(self, *groups: tuple[list[str], list[dict[str, str]]], unlisted: int = 0) -> None:
        known = {request.id: request for request in self.requests}
        waiting = [
            {
                "labels": list(known[ids[0]].node_types),
                "state": "requested",
                "since": NOW,
                "count": len(ids) + unlisted,
                "ids": ids,
                "reasons": reasons,
            }
            for ids, reasons in groups
        ]
        name = f"nl{len(self.reports)}"
        self.reports.append(report(name, waiting=waiting))

    def rows(self) -> list[dict[str, Any]]:
        zk: Any = self
        return cluster.by_cause(zk, clock=lambda: NOW).rows

    def health(self) -> health.Health:
        zk: Any = self
        return health.health(zk, clock=lambda: NOW)

    def problem(self, text: str, provider: str | None = None, label: str | None = None) -> None:
        self.problems.append({"provider": provider, "label": label, "problem": text, "help": None})

    def readNodes(self) -> list[Any]:
        return self.nodes

    def readUnreleasedNodes(self) -> list[Any]:
        return self.readNodes()

    def countNodes(self) -> Any:
        return count_nodes(self.nodes)

    def readImages(self) -> Any:
        return SimpleNamespace(
            uploads=self.uploads, builds=[], paused=set(), names=set(), requests={}, build_locks={}
        )

    def readProgress(self) -> ProgressData:
        return ProgressData()

    def readRequests(self) -> list[NodeRequest]:
        return self.requests

    def getNodeRequest(self, request_id: str, cached: bool = False) -> NodeRequest | None:
        return next((request for request in self.requests if request.id == request_id), None)

    def readReports(self) -> list[dict[str, Any]]:
        return self.reports

    def getLaunchers(self) -> list[dict[str, Any]]:
        return [{"hostname": "nl0", "problems": self.problems}]

    def getBuilders(self) -> list[dict[str, Any]]:
        return []

    def getRegisteredPools(self) -> list[Any]:
        labels = frozenset(f"label-{number}" for number in range(500))
        return [
            SimpleNamespace(
                provider_name=name,
                name="main",
                id=name,
                labels=labels,
                paused=False,
                priority=100.0,
            )
            for name in ("east", "west")
        ]

"""Causes of many things are found in one pass over the cluster."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.status import causes, known
from nodepool.status.once import Once
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.mirror.nodes import count_nodes
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import Node, NodeRequest
from tests.support.mirror import report

LABELS = [f"label-{number}" for number in range(20)]
NODES, REQUESTS = 200, 40


class Cluster:
    """One full pool; min-ready of no label is reached; counts how often each list is read."""

    def __init__(self) -> None:
        now = time.time()
        self.reads: Counter[str] = Counter()
        self.nodes = []
        for number in range(NODES):
            node = Node(f"{number:010}")
            node.state, node.provider, node.pool = (
                ("used", "hold", "in-use")[number % 3],
                "p",
                "main",
            )
            node.type, node.state_time, node.hold_expiration = (
                [LABELS[number % len(LABELS)]],
                now - 2000,
                60,
            )
            self.nodes.append(node)
        self.requests = []
        for number in range(REQUESTS):
            request = NodeRequest(f"100-{number:010}")
            request.state, request.requestor, request.node_types = (
                "requested",
                MIN_READY,
                [LABELS[number % len(LABELS)]],
            )
            self.requests.append(request)
        reason = {
            "code": "pool-limit",
            "root": "pool-limit",
            "pool": "p-main",
            "text": "full",
            "help": "raise",
            "request": "",
        }
        ids = [request.id for request in self.requests]
        labels = {label: {"min_ready": 5} for label in LABELS}
        self.report = report(
            providers={"p": {}}, labels=labels, waiting=[{"ids": ids, "reasons": [reason]}]
        )
        self.node_tree = object()

    def _read(self, name: str, found: Any) -> Any:
        self.reads[name] += 1
        return found

    def readNodes(self) -> Any:
        return self._read("nodes", self.nodes)

    def readUnreleasedNodes(self) -> Any:
        return self._read("unreleased", self.nodes)

    def countNodes(self) -> Any:
        return self._read("counts", count_nodes(self.nodes))

    def readRequests(self) -> Any:
        return self._read("requests", self.requests)

    def readReports(self) -> Any:
        return self._read("reports", [self.report])

    def readNotes(self, _kind: type) -> Any:
        return self._read("notes", [])

    def readImages(self) -> Any:
        return self._read("images", ImageData())

    def getLaunchers(self) -> Any:
        return self._read("launchers", [{"hostname": "nl01", "problems": []}])

    def getRegisteredPools(self) -> Any:
        pool = SimpleNamespace(
            provider_name="p", name="main", id="one", labels=frozenset(LABELS), paused=False
        )
        return self._read("pools", [pool])


def test_problems_of_a_whole_cluster_read_each_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: Counter[str] = Counter()
    real = known.of_node

    def of_node(zk: Any, node: Any, clock: Any) -> Any:
        looked_at[node.id] += 1
        return real(zk, node, clock)

    monkeypatch.setattr(known, "of_node", of_node)
    cluster = Cluster()
    found = causes.derived_problems(Once(cluster))
    assert max(looked_at.values()) == 1
    assert max(count for name, count in cluster.reads.items() if name != "counts") == 1
    assert len([problem for problem in found if "min-ready" in problem.text]) == len(LABELS)
    stuck = [problem.text for problem in found if problem.label is None]
    assert len(stuck) == causes.MOST_STUCK + 1
    assert (
        stuck[-1]
        == f"and {2 * NODES // 3 + 1 - causes.MOST_STUCK} more nodes that their owners do not "
        "release"
    )


def test_launcher_that_passed_a_request_on_does_not_hide_why_it_waits() -> None:
    """World seed 428: the report of the other launcher still said that it launches nodes."""
    cluster = Cluster()
    request = cluster.requests[0]
    launching = {
        "code": "launching",
        "root": "launching",
        "pool": "p-main",
        "text": "launching nodes",
        "help": "",
        "request": "",
    }
    cluster.report["waiting"].append({"ids": [request.id], "reasons": [launching]})
    assert causes.of_request(Once(cluster), request).code == "pool-limit"
    cluster.nodes[0].allocated_to = request.id
    assert causes.of_request(Once(cluster), request).code == "launching"
    cluster.report["waiting"] = [{"ids": [request.id], "reasons": [launching]}]
    del cluster.nodes[:]
    assert causes.of_request(Once(cluster), request).code == "launching"

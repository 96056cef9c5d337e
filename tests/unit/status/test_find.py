"""A name or id without a kind leads to the objects that have it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.lease import Terms
from nodepool.status import find
from nodepool.status.explain import Unknown
from nodepool.zk.drains import Drain
from nodepool.zk.history import HistoryReader
from nodepool.zk.mirror.nodes import count_nodes
from nodepool.zk.records import Node, NodeRequest
from tests.support.mirror import report


class _Cluster:
    """A label and an image "debian", a provider with the hosts h0 and h1, and the tenant acme."""

    def __init__(self) -> None:
        hosts = [
            {"name": "h0", "usable": True, "limits": {"cores": 4}, "used": {"cores": 1}},
            {"name": "h1", "usable": False, "problem": "refused\nthe connection"},
        ]
        self.drains: list[Drain] = []
        self.report = report(
            labels={"debian": {}},
            not_running={"broken": "no credentials"},
            providers={"metal": {"hosts": hosts}},
            images={"debian": {}},
            tenants={"acme": {"limits": {"instances": 3}, "used": {"instances": 2}}},
        )
        self.node: Any = Node("0000000003")
        self.node.state, self.node.provider, self.node.pool = "ready", "metal", "main"
        self.node.type, self.node.external_id = ["old-label"], {"host": "h0"}
        self.request = NodeRequest("100-0000000001")
        self.request.state, self.request.node_types = "requested", ["misspelt"]
        self.request.requestor_data = Terms(
            "me", "unix:0", "", notes={"fleet": "https://forge/team runners"}
        ).stored()
        self.reads: Counter[str] = Counter()

    def readReports(self) -> Any:
        self.reads["reports"] += 1
        return [self.report]

    def readNotes(self, _kind: type[Drain]) -> list[Drain]:
        return self.drains

    def readRequests(self) -> Any:
        return [self.request]

    def readNodes(self) -> Any:
        return [self.node]

    def readUnreleasedNodes(self) -> Any:
        return self.readNodes()

    def countNodes(self) -> Any:
        return count_nodes([self.node])

    def readImages(self) -> Any:
        return SimpleNamespace(names={"built"})

    def getRegisteredPools(self) -> Any:
        return [SimpleNamespace(provider_name="rack", labels=frozenset({"metal"}))]


Cluster: Any = _Cluster


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("0000000003", ["node"]),
        ("3", ["node"]),
        ("100-0000000001", ["request"]),
        ("200-0000000099", ["request"]),
        ("old-label", ["label"]),
        ("misspelt", ["label"]),
        ("built", ["image"]),
        ("rack", ["provider"]),
        ("broken", ["provider"]),
        ("h1", ["host"]),
        ("acme", ["tenant"]),
        ("runners", ["fleet"]),
        ("debian", ["label", "image"]),
        ("metal", ["label", "provider"]),
    ],
)
def test_name_leads_to_all_objects_that_have_it(name: str, kinds: list[str]) -> None:
    assert find.kinds_of(Cluster(), name) == kinds


def test_id_needs_no_reading_of_names() -> None:
    cluster = Cluster()
    find.kinds_of(cluster, "0000000003")
    find.kinds_of(cluster, "100-0000000001")
    assert not cluster.reads


def test_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(
        Unknown,
        match=r"acne is not known: .* name of a label, image, provider, fleet, host or tenant; did "
        r"you mean acme\?",
    ):
        find.kinds_of(Cluster(), "acne")


def explained(kind: str, name: str) -> str:
    return find.explain_any(Cluster(), kind, name, HistoryReader()).text()


def test_host_is_explained_with_limits_nodes_and_cause() -> None:
    assert explained("host", "h0").splitlines() == [
        "host h0: usable",
        "  used of limits, provider metal on nl01: cores 1 of 4",
        "  nodes: 0000000003",
    ]
    assert explained("host", "h1").splitlines() == [
        "host h1: not usable: refused the connection",
        "  suggestion: repair the host, or remove it from the configuration",
        "  used of limits, provider metal on nl01: none reported",
        "  nodes: none",
    ]


@pytest.mark.parametrize("name", ["h1", "zuul@h1 port 22"])
def test_drained_host_is_not_to_be_repaired(name: str) -> None:
    zk = Cluster()
    # The launcher has not reported the drain yet.
    zk.report = report(providers={"metal": {"hosts": [{"name": name, "usable": True}]}})
    zk.drains = [Drain("host", "h1", since=0.0, reason="new disks")]
    assert find.explain_any(zk, "host", name, HistoryReader()).text().splitlines()[:2] == [
        f"host {name}: not usable: host h1 is drained: new disks",
        "  suggestion: `nodepool undrain host h1` ends it",
    ]


def test_tenant_is_explained_with_its_limits() -> None:
    text = explained("tenant", "acme")
    assert (
        text.startswith("tenant acme: limited by tenant-resource-limits\n")
        and "launcher nl01: instances 2 of 3" in text
    )


@pytest.mark.parametrize("kind", ["host", "tenant"])
def test_unknown_host_or_tenant_is_an_error(kind: str) -> None:
    with pytest.raises(Unknown, match=f"{kind} nobody is not known"):
        explained(kind, "nobody")

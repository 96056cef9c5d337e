"""What the search for leaks deletes, and what makes it wait."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.driver.statemachine.leaks import LeakSearch
from nodepool.driver.statemachine.model import Resource
from nodepool.exceptions import NotFound
from nodepool.zk.cluster import CLUSTER_ID, NODE_ID
from tests.support.histories import SoundHistory

NODE = SimpleNamespace(
    id="0000000007", state="ready", external_id="machine", created_time=None, stat=None
)


class Cloud:
    """A cloud with one machine of node 7."""

    def __init__(self, **marks: str) -> None:
        metadata = {"nodepool_provider_name": "p", NODE_ID: NODE.id, **marks}
        self.machine = Resource(metadata, "instance")
        self.machine.id = "machine"
        self.deleted: list[str] = []

    def listResources(self) -> list[Any]:
        return [] if self.deleted else [self.machine]

    def deleteResource(self, resource: Any) -> None:
        self.deleted.append(resource.id)


class Tree:
    """ZooKeeper: what the mirror shows, and what the server has."""

    def __init__(self, shown: list[Any], present: list[Any]) -> None:
        self.shown, self.present = shown, present
        self.cluster = SoundHistory()

    def getProviderNodes(self, _name: str) -> list[Any]:
        return self.shown

    def getProviderUploads(self, _name: str) -> dict[str, Any]:
        return {}

    def getNode(self, node_id: str) -> Any:
        return next((node for node in self.present if node.id == node_id), None)


def search(cloud: Any, tree: Any, runs: int) -> LeakSearch:
    found = LeakSearch("p", cloud, logging.getLogger("test"))
    for _ in range(runs):
        found.run(tree)
    return found


@pytest.mark.parametrize("runs, deleted", [(1, []), (2, ["machine"])])
def test_machine_without_a_record_is_deleted_when_it_was_seen_twice(
    runs: int, deleted: list[str]
) -> None:
    cloud = Cloud()
    search(cloud, Tree([], []), runs)
    assert cloud.deleted == deleted


def test_deletion_of_a_machine_that_no_longer_exists_succeeds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = Cloud()

    def missing(_resource: Any) -> None:
        raise NotFound

    monkeypatch.setattr(cloud, "deleteResource", missing)
    with caplog.at_level(logging.INFO):
        search(cloud, Tree([], []), 2)
    assert [(each.levelname, each.getMessage()) for each in caplog.records][-1] == (
        "INFO",
        "The leaked instance machine no longer exists",
    )


def test_machine_whose_record_the_mirror_does_not_show_yet_is_not_deleted() -> None:
    cloud, tree = Cloud(), Tree([], [NODE])
    found = search(cloud, tree, 3)
    assert cloud.deleted == []
    tree.present = []
    found.run(tree)
    assert cloud.deleted == ["machine"]


def test_nothing_is_deleted_while_a_machine_is_not_of_this_history() -> None:
    cloud = Cloud(**{CLUSTER_ID: "another"})
    found = search(cloud, Tree([], []), 3)
    assert cloud.deleted == [] and found.stopped is not None

"""NodeLauncher and NodeDeleter, the helpers of drivers without state machines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import SessionExpiredError

from nodepool import exceptions
from nodepool.driver.utils import NodeDeleter, NodeLauncher
from nodepool.zk.zookeeper import ABORTED, BUILDING, DELETING, FAILED, READY, Node


class Facade:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def storeNode(self, node: Node) -> None:
        self.calls.append(("store", node.state))

    def deleteNode(self, node: Node) -> None:
        self.calls.append(("delete", node.id))

    def unlockNode(self, node: Node) -> None:
        self.calls.append(("unlock", node.id))


def run_launcher(error: Exception | None) -> tuple[Node, Facade, list[str]]:
    keys: list[str] = []
    facade = Facade()
    node = Node("0000000001")
    node.state = BUILDING

    class Launcher(NodeLauncher):
        def launch(self) -> None:
            if error is not None:
                raise error
            self.node.state = READY
            self.zk.storeNode(self.node)

        def recordLaunchStats(self, subkey: str, dt: float) -> None:
            keys.append(subkey)

    handler = SimpleNamespace(
        zk=facade,
        request=SimpleNamespace(event_id="e", id="100-0000000000"),
        pw=SimpleNamespace(nodepool=SimpleNamespace(statsd=None)),
    )
    launcher = Launcher(handler, node, SimpleNamespace(name="p"))
    assert launcher.name == "NodeLauncher-0000000001"
    launcher.start()
    launcher.join(10)
    return node, facade, keys


@pytest.mark.spec("DRV-6.1: how NodeLauncher maps exceptions")
@pytest.mark.parametrize(
    ("error", "state", "stored", "key"),
    [
        (None, READY, [("store", READY)], "ready"),
        (SessionExpiredError(), FAILED, [], "error.zksession"),
        (exceptions.QuotaException("full"), ABORTED, [("store", ABORTED)], "error.quota"),
        (
            exceptions.LaunchNetworkException("no address"),
            FAILED,
            [("store", FAILED)],
            "error.network",
        ),
        (ValueError("?"), FAILED, [("store", FAILED)], "error.unknown"),
    ],
)
def test_exceptions_of_a_launch_become_node_states(
    error: Exception | None, state: str, stored: list[Any], key: str
) -> None:
    node, facade, keys = run_launcher(error)
    assert node.state == state
    assert facade.calls == stored
    assert keys == [key]


class Manager:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[str, Any]] = []

    def cleanupNode(self, node_id: str) -> None:
        self.calls.append(("cleanup", node_id))
        if self.error:
            raise self.error

    def waitForNodeCleanup(self, node_id: str) -> None:
        self.calls.append(("wait", node_id))

    def nodeDeletedNotification(self, node: Node) -> None:
        self.calls.append(("notify", node.id))


def run_deleter(
    manager: Manager, node_id: str | None = "0000000001", external_id: str | None = "x"
) -> Facade:
    facade = Facade()
    node = Node(node_id)
    node.state = READY
    node.external_id = external_id
    deleter = NodeDeleter(facade, manager, node)
    deleter.start()
    deleter.join(10)
    return facade


@pytest.mark.spec("DRV-6.2: DELETING stored, resource deleted, znode deleted, provider told")
def test_resource_is_deleted_before_its_record() -> None:
    manager = Manager()
    facade = run_deleter(manager)
    assert facade.calls == [("store", DELETING), ("delete", "0000000001")]
    assert manager.calls == [("cleanup", "x"), ("wait", "x"), ("notify", "0000000001")]


def test_deleter_without_external_id() -> None:
    manager = Manager()
    facade = run_deleter(manager, external_id=None)
    assert facade.calls == [("store", DELETING), ("delete", "0000000001")]
    assert manager.calls == [("notify", "0000000001")]


@pytest.mark.spec("DRV-4: NotFound means already gone: success for every deletion path")
def test_deleter_not_found() -> None:
    facade = run_deleter(Manager(exceptions.NotFound()))
    assert ("delete", "0000000001") in facade.calls


@pytest.mark.spec("DRV-14.24: a deletion error leaves the node DELETING, unlocked and in ZooKeeper")
def test_failed_deletion_leaves_the_node_deleting_and_unlocked() -> None:
    manager = Manager(ValueError("cloud down"))
    facade = run_deleter(manager)
    assert facade.calls == [("store", DELETING), ("unlock", "0000000001")]
    assert ("notify", "0000000001") not in manager.calls


@pytest.mark.spec("DRV-6.2: a node without id means no znode")
def test_deleter_without_record() -> None:
    for error in (None, ValueError("cloud down")):
        assert run_deleter(Manager(error), node_id=None).calls == []

"""A tree that a program has copied: the sequence of a directory is behind the names in it."""

from __future__ import annotations

from typing import Any

import pytest

from nodepool.zk import history, paths
from nodepool.zk.records import READY, ImageBuild, ImageUpload, Node
from nodepool.zk.writer import ADVANCE, Txn
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot


@pytest.fixture
def zk(zk_chroot: Chroot) -> Any:
    return ZooKeeper(zk_chroot.connect(), enable_cache=False)


def copied(zk: Any, directory: str, *numbers: int) -> None:
    """Create children as a program does that copies them."""
    for number in numbers:
        zk.kazoo_client.create(f"{directory}/{number:010}", b"{}", makepath=True)


def test_nodes_get_numbers_that_are_free(zk: Any) -> None:
    copied(zk, paths.NODES, *range(1, 2 + ADVANCE // 2))
    nodes = [Node() for _ in range(3)]
    for node in nodes:
        node.state, node.type = READY, ["a"]
    zk.createNodes(nodes)
    assert len({node.id for node in nodes}) == 3
    left = zk.kazoo_client.get_children(paths.NODES)
    assert len(left) == 1 + ADVANCE // 2 + 3 and all(name.isdigit() for name in left)


def test_many_taken_numbers_are_passed_in_several_attempts(zk: Any) -> None:
    copied(zk, paths.NODES, *range(1, 2 + 3 * ADVANCE))
    for _ in range(5):
        txn = Txn(zk.kazoo_client)
        txn.create(f"{paths.NODES}/", b"{}", sequence=True)
        try:
            [path] = zk.writer.run(txn)
            break
        except Exception as error:
            assert "NodeExistsError" in str(error)
    assert path == f"{paths.NODES}/{path[-10:]}" and int(path[-10:]) > 3 * ADVANCE


def test_history_and_uploads_get_numbers_that_are_free(zk: Any) -> None:
    copied(zk, history.ROOT, 1, 2, 3)
    history.append(zk.kazoo_client, "action", {"action": "x"})
    assert len(zk.kazoo_client.get_children(history.ROOT)) == 4
    build = zk.storeBuild("image", ImageBuild())
    copied(zk, paths.uploads("image", build, "cloud"), 1, 2)
    assert int(zk.storeImageUpload("image", build, "cloud", ImageUpload())) > 2

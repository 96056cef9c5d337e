"""Conditions of the facade's writes: what another client did after we read a record is not
overwritten.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from kazoo.exceptions import NoAuthError
from kazoo.security import OPEN_ACL_UNSAFE, make_acl

from nodepool import exceptions
from nodepool.zk import zookeeper as zkm
from nodepool.zk.facade.nodes import DELETION_GUARD
from nodepool.zk.locks import add_lock, add_unlocked_check
from nodepool.zk.locks.turn import TurnLock
from nodepool.zk.writer import TransactionFailed, Txn
from tests.conftest import Chroot, wait_for
from tests.support.interference import NODES, OtherClient, creates, deletes, sets


@pytest.fixture
def other(zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch) -> OtherClient:
    return OtherClient(zk_chroot.connect().client, monkeypatch)


def idle(zk: Any, **values: Any) -> Any:
    """A free node of pool main of provider p."""
    node = zkm.Node()
    node.state, node.provider, node.pool, node.type = zkm.READY, "p", "main", ["label"]
    for name, value in values.items():
        setattr(node, name, value)
    zk.storeNode(node)
    return node


def test_idle_node_is_not_deleted_if_it_changed(zk: Any, other: OtherClient) -> None:
    node = idle(zk)
    late = other.before(
        sets(NODES, state="deleting"), lambda path: other.write(path, state="in-use")
    )
    assert not zk.deleteOldestUnusedNode("p", "main")
    assert late.refused() == NODES + node.id
    assert zk.getNode(node.id).state == "in-use"


def test_idle_node_is_not_deleted_while_it_is_locked(zk: Any, other: OtherClient) -> None:
    node = idle(zk)
    late = other.before(sets(NODES, state="deleting"), lambda path: other.lock(f"{path}/lock"))
    assert not zk.deleteOldestUnusedNode("p", "main")
    assert late.refused() == f"{NODES}{node.id}/lock"
    assert zk.getNode(node.id).state == "ready"


def test_idle_node_whose_lock_directory_is_not_known_yet_is_deleted(
    zk: Any, other: OtherClient
) -> None:
    node = idle(zk)
    other.before(
        sets(NODES, state="deleting"), lambda path: other.unlock(other.lock(f"{path}/lock"))
    )
    assert zk.deleteOldestUnusedNode("p", "main")
    assert zk.getNode(node.id).state == "deleting"


@pytest.mark.parametrize("age, more", [(DELETION_GUARD - 60, False), (DELETION_GUARD + 60, True)])
def test_one_idle_node_at_a_time_is_deleted_until_the_deletion_is_stuck(
    zk: Any, age: float, more: bool
) -> None:
    idle(zk, state=zkm.DELETING, state_time=time.time() - age)
    idle(zk)
    assert zk.deleteOldestUnusedNode("p", "main") is more


def test_freeing_capacity_does_not_wait_for_the_answer(
    zk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = idle(zk)
    monkeypatch.setattr(
        zk.writer, "MAX_IN_FLIGHT", 0
    )  # transactions are kept, as while ZooKeeper is silent
    answers: list[bool] = []
    zk.make_room("p", "main", answers.append)
    assert answers == [] and zk.getNode(node.id).state == "ready"


def test_locked_node_is_written_only_while_its_lock_stands(zk: Any, other: OtherClient) -> None:
    node = idle(zk)
    zk.lockNode(node)
    node.state = "in-use"
    late = other.before(sets(NODES, state="in-use"), lambda path: other.break_lock(f"{path}/lock"))
    with pytest.raises(exceptions.ZKException, match="the lock on it no longer exists"):
        zk.storeNode(node)
    assert late.refused().startswith(f"{NODES}{node.id}/lock/")
    assert zk.getNode(node.id).state == "ready"


def test_node_without_a_lock_of_ours_is_written_unconditionally(
    zk: Any, other: OtherClient
) -> None:
    node = idle(zk)
    other.write(NODES + node.id, comment="by another client")
    node.state = "hold"
    zk.storeNode(node)
    assert zk.getNode(node.id).state == "hold"
    zk.deleteRawNode(node.id)
    with pytest.raises(exceptions.ZKException, match="the record no longer exists"):
        zk.storeNode(node)


def test_lock_is_removed_by_force_only_if_the_record_is_unchanged(
    zk: Any, other: OtherClient
) -> None:
    node = idle(zk)
    other.lock(f"{NODES}{node.id}/lock")
    seen = zk.getNode(node.id)
    late = other.before(
        deletes("__lock__"), lambda _path: other.write(NODES + node.id, comment="taken")
    )
    with pytest.raises(TransactionFailed):
        zk.forceUnlockNode(seen, seen.version)
    assert late.refused() == NODES + node.id
    assert len(zk.getNodeLockContenders(node)) == 1


def test_lock_of_a_missing_node_is_not_taken_and_leaves_nothing(zk: Any) -> None:
    node = zkm.Node("0000000042")
    with pytest.raises(exceptions.ZKLockException, match="does not exist"):
        zk.lockNode(node, blocking=False)
    assert zk.getNodes() == [] and node.lock is None


def test_held_lock_is_refused_without_a_contender(zk: Any, other: OtherClient) -> None:
    node = idle(zk)
    directory = f"{NODES}{node.id}/lock"
    other.lock(directory)
    before = zk.kazoo_client.exists(directory).cversion
    with pytest.raises(exceptions.ZKLockException, match="Did not get lock"):
        zk.lockNode(node, blocking=False)
    assert zk.kazoo_client.exists(directory).cversion == before


def test_lock_held_by_this_object_is_not_taken_twice(zk: Any) -> None:
    node = idle(zk)
    zk.lockNode(node)
    with pytest.raises(exceptions.ZKLockException, match="thread lock"):
        zk.lockNode(node, blocking=False)
    zk.unlockNode(node)
    with pytest.raises(exceptions.ZKLockException, match="unlocked node"):
        zk.unlockNode(node)


def test_contender_that_gives_up_leaves_the_queue(zk: Any, other: OtherClient) -> None:
    node = idle(zk)
    theirs = other.lock(f"{NODES}{node.id}/lock")
    with pytest.raises(exceptions.ZKLockException, match="Did not get lock"):
        zk.lockNode(node, blocking=False)
    with pytest.raises(exceptions.TimeoutException):
        zk.lockNode(node, timeout=0.05)
    wait_for(
        lambda: (
            zk.kazoo_client.get_children(f"{NODES}{node.id}/lock") == [theirs.rpartition("/")[2]]
        )
    )
    other.unlock(theirs)
    zk.lockNode(node, timeout=10)
    assert node.lock is not None


def test_nodes_are_created_although_the_folder_was_removed(
    zk: Any, other: OtherClient, zk_chroot: Chroot
) -> None:
    kazoo = zk_chroot.connect().client
    late = other.before(creates(NODES), lambda _path: kazoo.delete(NODES.rstrip("/")))
    node = idle(zk)
    assert late.outcome == [None]
    assert kazoo.exists(NODES + node.id)


def test_directory_that_may_not_be_created_is_the_reason_of_the_refusal(
    zk: Any, zk_chroot: Chroot
) -> None:
    kazoo = zk_chroot.connect().client
    kazoo.delete(NODES.rstrip("/"))
    kazoo.set_acls("/nodepool", [make_acl("world", "anyone", read=True, delete=True, admin=True)])
    try:
        with pytest.raises(TransactionFailed) as refused:
            idle(zk)
    finally:
        kazoo.set_acls("/nodepool", OPEN_ACL_UNSAFE)
    assert (type(refused.value.cause), refused.value.path) == (NoAuthError, NODES)


def test_missing_record_does_not_count_as_a_missing_directory(zk: Any) -> None:
    sent = zk.writer.sent
    txn = Txn(zk.kazoo_client)
    txn.set(NODES + "0000000099", b"")
    with pytest.raises(TransactionFailed):
        zk.writer.run(txn)
    assert zk.writer.sent == sent + 1


def test_lock_that_was_acquired_and_released_between_two_readings_is_reported_as_free(
    zk: Any,
) -> None:
    node = idle(zk)
    told: list[tuple[str, bool]] = []
    zk.node_tree.lock_listeners.append(lambda node_id, locked: told.append((node_id, locked)))
    zk.node_tree.unchanged([node.id, "lock"])
    assert told == [(node.id, False)]
    zk.node_tree.contenders[node.id] = {"x"}
    zk.node_tree.unchanged([node.id, "lock"])
    assert told == [(node.id, False)]


@pytest.mark.parametrize("add", [add_lock, add_unlocked_check], ids=["taken", "taken for free"])
@pytest.mark.parametrize("known", [True, False], ids=["known directory", "unknown directory"])
def test_lock_of_another_client_makes_the_transaction_fail(
    zk: Any, other: OtherClient, add: Any, known: bool
) -> None:
    node = idle(zk)
    directory = f"{NODES}{node.id}/lock"
    theirs = other.lock(directory)
    txn = Txn(zk.kazoo_client)
    add(txn, directory, known)
    with pytest.raises(TransactionFailed):
        zk.writer.run(txn)
    assert zk.kazoo_client.get_children(directory) == [theirs.rpartition("/")[2]]


def test_turn_of_another_launcher_is_not_taken(zk: Any, zk_chroot: Chroot) -> None:
    ours, theirs = (
        TurnLock(zk.kazoo_client, "a", "label"),
        TurnLock(zk_chroot.connect().client, "b", "label"),
    )
    assert theirs.take() and not ours.take()
    theirs.drop()
    assert ours.take()

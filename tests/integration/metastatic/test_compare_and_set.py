"""Another client changes a backing node or its lock between our read and our write: the stale
write changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from nodepool.driver.backing import housekeeping, transactions
from nodepool.driver.backing.slots import MAX_MOVES
from nodepool.exceptions import LaunchStatusException
from nodepool.zk.zookeeper import HOLD, IN_USE, READY, USED, Node
from tests.conftest import Chroot, wait_for
from tests.integration.metastatic.test_slots import OWNER, Bench, make  # noqa: F401
from tests.support.interference import NODES, OtherClient, deletes, sets


@pytest.fixture
def other(zk_chroot: Chroot, monkeypatch: pytest.MonkeyPatch) -> OtherClient:
    return OtherClient(zk_chroot.connect().client, monkeypatch)


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make(**{"max-parallel-jobs": 3})


def advanced(bench: Bench) -> Any:
    machine = bench.machine()
    machine.advance()
    return machine


def user_data(other: OtherClient, node_id: str | None) -> dict[str, Any]:
    return dict(json.loads(other.read(f"{NODES}{node_id}")["user_data"]))


def state(other: OtherClient, node_id: str | None) -> str:
    return str(other.read(f"{NODES}{node_id}")["state"])


# -- a backing node is adopted


def test_take_over_keeps_what_another_client_wrote(bench: Bench, other: OtherClient) -> None:
    machine = advanced(bench)
    late = other.before(
        sets(NODES, state="in-use"), lambda path: other.write(path, comment="by another client")
    )
    backing = bench.fulfil()
    assert late.refused() == f"{NODES}{backing.id}"
    bench.finish(machine)
    stored = bench.zk.getNode(backing.id or "")
    assert stored is not None and (stored.state, stored.comment) == (IN_USE, "by another client")


def test_take_over_waits_for_the_lock(
    bench: Bench, other: OtherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[bool] = []
    take_over = transactions.take_over

    def counted(*args: Any) -> Any:
        attempts.append(args[-1])
        return take_over(*args)

    monkeypatch.setattr(transactions, "take_over", counted)
    machine = advanced(bench)
    contenders: list[str] = []
    late = other.before(
        sets(NODES, state="in-use"), lambda path: contenders.append(other.lock(f"{path}/lock"))
    )
    backing = bench.fulfil()
    assert late.refused() == f"{NODES}{backing.id}/lock"
    wait_for(
        lambda: len(attempts) > 2 or state(other, backing.id) != READY, what="further attempts"
    )
    machine.advance()
    present = bench.zk.getNode(backing.id or "")
    assert present is not None and present.state == READY and not machine.complete
    other.unlock(*contenders)
    bench.finish(machine)
    assert bench.zk.getNodeLockContenders(present) == [OWNER]


def test_node_is_not_adopted_if_its_request_was_deleted(bench: Bench, other: OtherClient) -> None:
    machine = advanced(bench)
    (request,) = wait_for(bench.requests)
    late = other.before(
        sets(NODES, state="in-use"), lambda _path: other.delete(f"/nodepool/requests/{request.id}")
    )
    backing = bench.fulfil(request)
    assert late.refused() == f"/nodepool/requests/{request.id}"
    with pytest.raises(LaunchStatusException, match="Backing node failed"):
        bench.finish(machine)
    present = bench.zk.getNode(backing.id or "")
    assert (
        present is not None
        and present.state == READY
        and bench.zk.getNodeLockContenders(present) == []
    )


def test_node_in_another_state_is_not_adopted(bench: Bench, other: OtherClient) -> None:
    machine = advanced(bench)
    late = other.before(sets(NODES, state="in-use"), lambda path: other.write(path, state="hold"))
    backing = bench.fulfil()
    assert late.refused() == f"{NODES}{backing.id}"
    with pytest.raises(LaunchStatusException, match="it is hold"):
        bench.finish(machine)
    present = bench.zk.getNode(backing.id or "")
    assert (
        present is not None
        and present.state == HOLD
        and bench.zk.getNodeLockContenders(present) == []
    )


def test_node_given_to_another_request_is_not_adopted(bench: Bench, other: OtherClient) -> None:
    machine = advanced(bench)
    other.before(
        sets(NODES, state="in-use"), lambda path: other.write(path, allocated_to="100-0000009999")
    )
    backing = bench.fulfil()
    with pytest.raises(LaunchStatusException, match="it no longer exists or is not ours"):
        bench.finish(machine)
    present = bench.zk.getNode(backing.id or "")
    assert present is not None and (present.state, present.allocated_to) == (
        READY,
        "100-0000009999",
    )


@pytest.mark.parametrize("locked", [True, False])
def test_take_over_whose_answer_was_lost_counts_only_with_its_lock(
    bench: Bench, other: OtherClient, locked: bool
) -> None:
    machine = advanced(bench)

    def take_over(path: str) -> None:
        """What our own transaction does when its answer is lost."""
        data = {
            "owner": OWNER,
            "label": "small",
            "slots": 3,
            "launched": 0,
            "allocations": {"0": machine.node_id},
        }
        if locked:
            other.lock(f"{path}/lock")
        other.write(path, state="in-use", user_data=json.dumps(data))

    late = other.before(sets(NODES, state="in-use"), take_over)
    backing = bench.fulfil()
    assert late.refused().startswith(f"{NODES}{backing.id}")
    if locked:
        assert bench.finish(machine).driver_data["backing_node"] == backing.id
    else:
        with pytest.raises(LaunchStatusException, match="its lock no longer exists"):
            bench.finish(machine)


# -- slots are given out, and the backing node is released


def test_slot_that_another_launcher_gave_out_is_not_given_out_again(
    bench: Bench, other: OtherClient
) -> None:
    first = advanced(bench)
    backing = bench.fulfil()
    bench.finish(first)
    theirs = bench.new_node()

    def allocate(path: str) -> None:
        data = user_data(other, backing.id)
        data["allocations"]["1"] = theirs
        other.write(path, user_data=json.dumps(data))

    late = other.before(sets(NODES, state="in-use"), allocate)
    second = advanced(bench)
    assert late.refused() == f"{NODES}{backing.id}"
    assert bench.finish(second).slot == 2
    assert user_data(other, backing.id)["allocations"] == {
        "0": first.node_id,
        "1": theirs,
        "2": second.node_id,
    }


def test_backing_node_is_not_released_if_another_launcher_used_it(
    bench: Bench, other: OtherClient
) -> None:
    machine = advanced(bench)
    backing = bench.fulfil()
    bench.finish(machine)
    theirs = bench.new_node()

    def allocate(path: str) -> None:
        data = user_data(other, backing.id)
        other.write(path, user_data=json.dumps({**data, "allocations": {"0": theirs}}))

    late = other.before(sets(NODES, state="used"), allocate)
    (record,) = bench.records()
    bench.end(machine.node_id)
    bench.adapter.slots.release(record)
    assert late.refused() == f"{NODES}{backing.id}"
    node = bench.zk.getNode(backing.id or "")
    assert (
        node is not None
        and node.state == IN_USE
        and bench.zk.getNodeLockContenders(node) == [OWNER]
    )
    assert bench.records() == [record]


# -- what a dead launcher left


def abandoned(bench: Bench, **values: Any) -> Node:
    """A backing node that was locked, but not signed."""
    node = Node()
    node.state, node.provider, node.pool, node.type, node.requestor = (
        READY,
        "cloud",
        "main",
        "big",
        OWNER,
    )
    for name, value in values.items():
        setattr(node, name, value)
    bench.zk.storeNode(node)
    bench.zk.lockNode(node, ephemeral=False, identifier=OWNER)
    wait_for(lambda: bench.zk.getCachedNode(node.id or "").lock_contenders)
    return node


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has locked a node and not signed it will not do so any more."""
    monkeypatch.setattr(housekeeping, "SIGNING_TIME", 0.0)


def test_lock_of_a_dead_launcher_stays_if_the_node_is_signed_meanwhile(
    bench: Bench, other: OtherClient, dead: None
) -> None:
    bench.adapter.slots.initialize()
    node = abandoned(bench)
    late = other.before(
        deletes("__lock__"), lambda _path: other.write(f"{NODES}{node.id}", comment="signed")
    )
    bench.adapter.periodic()
    assert late.refused() == f"{NODES}{node.id}"
    assert bench.zk.getNodeLockContenders(node) == [OWNER]
    bench.adapter.periodic()
    assert bench.zk.getNodeLockContenders(node) == [], "nobody has signed it after all"


@pytest.mark.parametrize("state, kept", [(READY, False), (USED, True)])
def test_only_locks_of_ready_nodes_without_an_owner_are_removed(
    bench: Bench, dead: None, state: str, kept: bool
) -> None:
    bench.adapter.slots.initialize()
    node = abandoned(bench, state=state)
    bench.adapter.periodic()
    assert bool(bench.zk.getNodeLockContenders(node)) is kept


def test_node_that_names_us_as_owner_without_our_lock_is_not_used(
    bench: Bench, other: OtherClient
) -> None:
    data = {"owner": OWNER, "label": "small", "slots": 3, "launched": 0}
    node = Node()
    node.state, node.provider, node.pool, node.type, node.user_data = (
        IN_USE,
        "cloud",
        "main",
        "big",
        json.dumps(data),
    )
    bench.zk.storeNode(node)
    other.lock(f"{NODES}{node.id}/lock")  # of another client, without our name
    bench.adapter.slots.initialize()
    bench.adapter.slots.housekeeping.adopt(node.id or "")
    assert bench.records() == []


def test_launch_fails_when_it_has_lost_too_many_backing_nodes(bench: Bench) -> None:
    machine = advanced(bench)
    for _ in range(MAX_MOVES):
        lost = bench.fulfil()
        wait_for(lambda: machine.granted)
        moves = machine.moves
        bench.zk.deleteRawNode(lost.id or "")
        wait_for(lambda moves=moves: machine.moves == moves + 1)
        assert machine.problem is None
    lost = bench.fulfil()
    wait_for(lambda: machine.granted)
    bench.zk.deleteRawNode(lost.id or "")
    with pytest.raises(LaunchStatusException, match="was lost"):
        wait_for(machine.advance)

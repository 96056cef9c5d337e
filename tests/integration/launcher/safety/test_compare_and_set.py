"""Another client changes a record or takes a lock between our read and our write: the stale
write changes nothing.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from kazoo.protocol.serialization import SetData

from nodepool.zk.writer import Txn
from tests.conftest import wait_for
from tests.support.interference import LOCKS, NODES, REQUESTS, OtherClient, creates, deletes, sets
from tests.support.launcher import LauncherBench, config, provider

#: Any field of a request that another client may write while the launcher deals with it.
URGENT = {"relative_priority": 7}


@pytest.fixture
def other(bench: LauncherBench, monkeypatch: pytest.MonkeyPatch) -> OtherClient:
    return OtherClient(bench.chroot.connect().client, monkeypatch)


def served_once(bench: LauncherBench, request_id: str, nodes: int = 1) -> dict[str, Any]:
    """The request is fulfilled in the end, and nobody else's node carries its id."""
    record = bench.wait_request(request_id, "fulfilled")
    assert len(set(record["nodes"])) == nodes
    allocated = {
        node.id for node in bench.nodes(allocated_to=request_id) if node.state != "deleting"
    }
    assert allocated == set(record["nodes"])
    return record


def records_machine(txn: Txn) -> str | None:
    """Match a transaction that writes the id of a machine to the record of its node."""
    writes = (
        operation
        for operation in txn.operations
        if isinstance(operation, SetData) and NODES in operation.path
    )
    return next(
        (
            txn.client.unchroot(write.path)
            for write in writes
            if json.loads(write.data).get("external_id")
        ),
        None,
    )


# -- a request is accepted


def test_accept_is_refused_if_the_request_changed(bench: LauncherBench, other: OtherClient) -> None:
    bench.start(config(provider()))
    late = other.before(sets(REQUESTS, state="pending"), lambda path: other.write(path, **URGENT))
    request_id = bench.submit("fake-label")
    assert late.refused() == REQUESTS + request_id
    assert served_once(bench, request_id)["relative_priority"] == 7


def test_accept_is_refused_if_the_request_is_locked(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider()))
    contenders: list[str] = []
    late = other.before(
        sets(REQUESTS, state="pending"),
        lambda path: contenders.append(other.lock(path.replace(REQUESTS, LOCKS))),
    )
    request_id = bench.submit("fake-label")
    assert late.refused() == LOCKS + request_id
    assert bench.zuul.request(request_id)["state"] == "requested"
    other.unlock(*contenders)
    served_once(bench, request_id)


def test_request_is_not_fulfilled_immediately_if_it_changed(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider()))
    node = bench.ready_node("fake-provider", "main", "fake-label")
    late = other.before(sets(REQUESTS, state="fulfilled"), lambda path: other.write(path, **URGENT))
    request_id = bench.submit("fake-label")
    assert late.refused() == REQUESTS + request_id
    record = served_once(bench, request_id)
    assert record["relative_priority"] == 7 and record["nodes"] == [node.id]


def test_request_is_not_fulfilled_immediately_if_it_is_locked(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider()))
    node = bench.ready_node("fake-provider", "main", "fake-label")
    contenders: list[str] = []
    late = other.before(
        sets(REQUESTS, state="fulfilled"),
        lambda path: contenders.append(other.lock(path.replace(REQUESTS, LOCKS))),
    )
    request_id = bench.submit("fake-label")
    assert late.refused() == LOCKS + request_id
    assert bench.node(node.id).allocated_to is None
    other.unlock(*contenders)
    assert served_once(bench, request_id)["nodes"] == [node.id]


@pytest.mark.parametrize("labels", [1, 2], ids=["with ready nodes only", "with a new node as well"])
def test_ready_node_is_not_given_out_if_it_changed(
    bench: LauncherBench, other: OtherClient, labels: int
) -> None:
    bench.start(config(provider()))
    node = bench.ready_node("fake-provider", "main", "fake-label")
    late = other.before(sets(NODES, state="ready"), lambda path: other.write(path, state="hold"))
    request_id = bench.submit(*["fake-label"] * labels)
    assert late.refused() == NODES + node.id
    assert node.id not in served_once(bench, request_id, labels)["nodes"]
    assert (bench.node(node.id).state, bench.node(node.id).allocated_to) == ("hold", None)


@pytest.mark.parametrize("labels", [1, 2], ids=["with ready nodes only", "with a new node as well"])
def test_ready_node_is_not_given_out_if_it_is_locked(
    bench: LauncherBench, other: OtherClient, labels: int
) -> None:
    bench.start(config(provider()))
    node = bench.ready_node("fake-provider", "main", "fake-label")
    late = other.before(sets(NODES, state="ready"), lambda path: other.lock(f"{path}/lock"))
    request_id = bench.submit(*["fake-label"] * labels)
    assert late.refused() == f"{NODES}{node.id}/lock"
    assert node.id not in served_once(bench, request_id, labels)["nodes"]
    assert (bench.node(node.id).state, bench.node(node.id).allocated_to) == ("ready", None)


# -- its nodes are created


def test_new_node_is_not_launched_if_the_lock_of_the_request_is_lost(
    bench: LauncherBench, other: OtherClient
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=0.2)
    late = other.before(
        sets(NODES, state="building"),
        lambda _path: other.break_lock(LOCKS + bench.zk.getNodeRequests()[0]),
    )
    request_id = bench.submit("fake-label")
    assert late.refused().startswith(LOCKS + request_id)
    served_once(bench, request_id)
    assert len(bench.servers("fake-provider", pool)) == 1


def test_new_node_is_not_launched_if_another_client_changed_it(
    bench: LauncherBench, other: OtherClient
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=0.2)
    changed: list[str] = []

    def hold(path: str) -> None:
        changed.append(path)
        other.write(
            path, state="hold", allocated_to=None
        )  # a state that no launcher deletes meanwhile

    late = other.before(sets(NODES, state="building"), hold)
    request_id = bench.submit("fake-label")
    assert [late.refused()] == changed
    served_once(bench, request_id)
    assert len(bench.servers("fake-provider", pool)) == 1


def test_machine_is_not_recorded_and_its_request_is_served_again_if_the_lock_of_the_node_is_lost(
    bench: LauncherBench, other: OtherClient
) -> None:
    pool = bench.start(config(provider()), cleanup_interval=0.2)
    seized: list[str] = []

    def seize(path: str) -> None:
        seized.append(path.removeprefix(NODES))
        other.write(path, state="hold", allocated_to=None)
        other.break_lock(f"{path}/lock")

    late = other.before(records_machine, seize)
    request_id = bench.submit("fake-label")
    path, lost, _name = late.refused().rpartition("/lock/")
    assert lost and path == NODES + seized[0]
    assert seized[0] not in served_once(bench, request_id)["nodes"]
    assert (bench.node(seized[0]).state, bench.node(seized[0]).external_id) == ("hold", None)
    # The machine of a launch that was over before its first record is a leak only without the
    # record.
    other.delete(NODES + seized[0])
    wait_for(
        lambda: len(bench.servers("fake-provider", pool)) == 1,
        what="the server of the lost launch is deleted",
    )


def test_paused_request_creates_no_node_if_its_lock_is_lost(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider(pool={"max-servers": 1})), cleanup_interval=0.2)
    first, _nodes = bench.fulfilled("fake-label")
    request_id = bench.submit("fake-label")
    bench.wait_request(request_id, "pending")
    late = other.before(creates(NODES), lambda _path: other.break_lock(LOCKS + request_id))
    bench.use_up(first)
    assert late.refused().startswith(LOCKS + request_id)
    served_once(bench, request_id)


def test_ready_node_of_a_paused_request_is_not_saved_if_its_lock_is_lost(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider(pool={"max-servers": 2})))
    bench.fulfilled("fake-label")

    def seize(path: str) -> None:
        other.write(
            path, state="hold"
        )  # first, as nodes that are neither held nor locked are deleted
        other.break_lock(f"{path}/lock")

    late = other.before(sets(NODES, state="ready"), seize)
    request_id = bench.submit("fake-label", "fake-label")
    path, lost, _name = late.refused().rpartition("/lock/")
    assert lost and bench.zuul.node(path.rpartition("/")[2])["state"] == "hold"
    assert bench.zuul.request(request_id)["state"] == "pending"


# -- a request ends


def test_end_of_a_request_keeps_what_another_client_wrote(
    bench: LauncherBench, other: OtherClient
) -> None:
    pool = bench.start(config(provider()))
    late = other.before(sets(REQUESTS, state="fulfilled"), lambda path: other.write(path, **URGENT))
    request_id = bench.submit("fake-label")
    assert late.refused() == REQUESTS + request_id
    assert served_once(bench, request_id)["relative_priority"] == 7
    assert len(bench.servers("fake-provider", pool)) == 1


def test_request_is_not_fulfilled_if_the_lock_of_a_node_is_lost(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider()), cleanup_interval=0.2)
    seized: list[str] = []

    def seize(_path: str) -> None:
        (node,) = bench.nodes()
        seized.append(node.id)
        other.write(NODES + node.id, state="hold", allocated_to=None)
        other.break_lock(f"{NODES}{node.id}/lock")

    late = other.before(sets(REQUESTS, state="fulfilled"), seize)
    request_id = bench.submit("fake-label")
    assert "/lock/" in late.refused()
    assert seized[0] not in served_once(bench, request_id)["nodes"]
    assert bench.node(seized[0]).state == "hold"


#: A pool of one server declines two nodes; a label that no pool offers is declined by the
#: assignment.
DECLINED = pytest.mark.parametrize(
    "labels", [("fake-label", "fake-label"), ("unknown",)], ids=["by a pool", "by nobody's label"]
)


@DECLINED
def test_decline_keeps_what_another_client_wrote(
    bench: LauncherBench, other: OtherClient, labels: tuple[str, ...]
) -> None:
    bench.start(config(provider(pool={"max-servers": 1})))
    late = other.before(sets(REQUESTS, state="failed"), lambda path: other.write(path, **URGENT))
    request_id = bench.submit(*labels)
    assert late.refused() == REQUESTS + request_id
    assert bench.wait_request(request_id, "failed")["relative_priority"] == 7


@DECLINED
def test_locked_request_is_not_declined(
    bench: LauncherBench, other: OtherClient, labels: tuple[str, ...]
) -> None:
    bench.start(config(provider(pool={"max-servers": 1})))
    contenders: list[str] = []
    late = other.before(
        sets(REQUESTS, state="failed"),
        lambda path: contenders.append(other.lock(path.replace(REQUESTS, LOCKS))),
    )
    request_id = bench.submit(*labels)
    assert late.refused() == LOCKS + request_id
    assert bench.zuul.request(request_id)["state"] == "requested"
    other.unlock(*contenders)
    bench.wait_request(request_id, "failed")


# -- nodes


def test_node_is_not_unallocated_if_it_changed(bench: LauncherBench, other: OtherClient) -> None:
    bench.start(config(provider()))
    late = other.before(
        sets(NODES, allocated_to=None), lambda path: other.write(path, state="hold")
    )
    node = bench.ready_node("fake-provider", "main", "fake-label", allocated_to="200-0000009999")
    assert late.refused() == NODES + node.id
    assert bench.node(node.id).state == "hold"


def test_node_is_not_unallocated_while_it_is_locked(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider()))
    contenders: list[str] = []
    late = other.before(
        sets(NODES, allocated_to=None), lambda path: contenders.append(other.lock(f"{path}/lock"))
    )
    node = bench.ready_node("fake-provider", "main", "fake-label", allocated_to="200-0000009999")
    assert late.refused() == f"{NODES}{node.id}/lock"
    assert bench.node(node.id).allocated_to == "200-0000009999"
    other.unlock(*contenders)
    wait_for(lambda: bench.node(node.id).allocated_to is None)


def test_expired_node_is_not_deleted_if_it_was_allocated(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider(), labels={"fake-label": {"max-ready-age": 10}}))
    late = other.before(
        sets(NODES, state="deleting"),
        lambda path: other.write(path, state="hold", state_time=time.time()),
    )
    node = bench.ready_node("fake-provider", "main", "fake-label", state_time=time.time() - 60)
    assert late.refused() == NODES + node.id
    assert bench.node(node.id).state == "hold"


def test_used_node_is_not_deleted_if_it_changed(bench: LauncherBench, other: OtherClient) -> None:
    bench.start(config(provider()))
    late = other.before(sets(NODES, state="deleting"), lambda path: other.write(path, state="hold"))
    node = bench.ready_node("fake-provider", "main", "fake-label", state="used")
    assert late.refused() == NODES + node.id
    assert bench.node(node.id).state == "hold"


def test_used_node_is_not_deleted_while_it_is_locked(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider()))
    contenders: list[str] = []
    late = other.before(
        sets(NODES, state="deleting"), lambda path: contenders.append(other.lock(f"{path}/lock"))
    )
    node = bench.ready_node("fake-provider", "main", "fake-label", state="used")
    assert late.refused() == f"{NODES}{node.id}/lock"
    assert bench.node(node.id).state == "used"
    other.unlock(*contenders)
    bench.wait_gone(node.id)


def test_empty_node_is_not_removed_if_it_got_a_record(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider()))
    late = other.before(
        deletes(f"{NODES}0000000099"),
        lambda path: other.write(path, state="hold", provider="fake-provider"),
    )
    bench.zuul.client.create(f"{NODES}0000000099", b"")
    assert late.refused() == f"{NODES}0000000099"
    assert bench.zuul.node("0000000099")["state"] == "hold"


# -- what a dead launcher left


def test_lost_request_is_not_reset_if_it_changed(bench: LauncherBench, other: OtherClient) -> None:
    bench.start(config(provider()), cleanup_interval=0.2)
    late = other.before(sets(REQUESTS, state="requested"), lambda path: other.write(path, **URGENT))
    request_id = bench.submit("fake-label", state="pending")
    assert late.refused() == REQUESTS + request_id
    assert served_once(bench, request_id)["relative_priority"] == 7


def test_lost_request_is_not_reset_if_it_is_locked(
    bench: LauncherBench, other: OtherClient
) -> None:
    bench.start(config(provider()), cleanup_interval=0.2)
    contenders: list[str] = []
    late = other.before(
        sets(REQUESTS, state="requested"),
        lambda path: contenders.append(other.lock(path.replace(REQUESTS, LOCKS))),
    )
    request_id = bench.submit("fake-label", state="pending")
    assert late.refused() == LOCKS + request_id
    assert bench.zuul.request(request_id)["state"] == "pending"
    other.unlock(*contenders)
    served_once(bench, request_id)


@pytest.mark.parametrize("state", ["ready", "init"])
def test_node_of_a_lost_request_is_not_freed_if_it_changed(
    bench: LauncherBench, other: OtherClient, state: str
) -> None:
    bench.start(config(provider()), cleanup_interval=0.2)
    request_id = bench.submit("fake-label", state="testing")  # a state that no launcher touches
    node = bench.ready_node(
        "fake-provider", "main", "fake-label", state=state, allocated_to=request_id
    )
    late = other.before(
        sets(REQUESTS, state="requested"), lambda _path: other.write(NODES + node.id, state="hold")
    )
    other.write(REQUESTS + request_id, state="pending")
    assert late.refused() == NODES + node.id
    record = bench.wait_request(request_id, "fulfilled")
    assert node.id not in record["nodes"] and bench.node(node.id).state == "hold"


@pytest.mark.parametrize("state", ["ready", "init"])
def test_node_of_a_lost_request_is_not_freed_while_it_is_locked(
    bench: LauncherBench, other: OtherClient, state: str
) -> None:
    bench.start(config(provider()), cleanup_interval=0.2)
    request_id = bench.submit("fake-label", state="testing")
    node = bench.ready_node(
        "fake-provider", "main", "fake-label", state=state, allocated_to=request_id
    )
    late = other.before(
        sets(REQUESTS, state="requested"), lambda _path: other.lock(f"{NODES}{node.id}/lock")
    )
    other.write(REQUESTS + request_id, state="pending")
    assert late.refused() == f"{NODES}{node.id}/lock"
    record = bench.wait_request(request_id, "fulfilled")
    assert node.id not in record["nodes"] and bench.node(node.id).state == state


def test_min_ready_node_is_not_freed_if_it_changed(
    bench: LauncherBench, other: OtherClient
) -> None:
    changed: list[str] = []

    def hold(path: str) -> None:
        changed.append(path)
        other.write(path, state="hold")

    late = other.before(sets(NODES, state="ready", allocated_to=None), hold)
    bench.start(config(provider(), labels={"fake-label": {"min-ready": 1}}))
    assert [late.refused()] == changed
    assert bench.zuul.node(changed[0].rpartition("/")[2])["state"] == "hold"

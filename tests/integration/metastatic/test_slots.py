"""The metastatic adapter on a real ZooKeeper, without a launcher: slots, two adapters concurrently,
losses.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from nodepool.config import Config
from nodepool.driver.backing import housekeeping
from nodepool.driver.metastatic.adapter import MetastaticAdapter
from nodepool.nodeutils import Attributes
from nodepool.zk.zookeeper import (
    BUILDING,
    FAILED,
    FULFILLED,
    HOLD,
    IN_USE,
    READY,
    USED,
    Node,
    NodeRequest,
    ZooKeeper,
)
from tests.conftest import Chroot, wait_for

OWNER = "NodePool:metastatic:meta"


def config(**label: Any) -> Any:
    result = Config()
    result.setLabels([{"name": "small"}, {"name": "big"}])
    options = {
        "name": "small",
        "backing-label": "big",
        "max-parallel-jobs": 2,
        "grace-time": 0,
        **label,
    }
    result.setProviders(
        [{"name": "meta", "driver": "metastatic", "pools": [{"name": "main", "labels": [options]}]}]
    )
    return result.providers["meta"]


class Bench:
    """One launcher's adapter, and a stand-in for the launchers that provide backing nodes."""

    def __init__(self, zk: ZooKeeper, provider_config: Any) -> None:
        self.zk = zk
        self.config = provider_config
        self.adapter = MetastaticAdapter(provider_config)
        self.adapter._setProvider(SimpleNamespace(_zk=zk))
        self.instances: dict[str, Any] = {}

    def new_node(self) -> str:
        node = Node()
        node.state = BUILDING
        node.provider, node.pool, node.type = "meta", "main", "small"
        self.zk.storeNode(node)
        assert node.id is not None
        return node.id

    def machine(self, node_id: str | None = None, **request: Any) -> Any:
        node_id = node_id or self.new_node()
        attributes = {
            "id": "200-0000000001",
            "tenant_name": "t1",
            "event_id": "e1",
            "relative_priority": 3,
            **request,
        }
        machine = self.adapter.getCreateStateMachine(
            f"np{node_id}",
            self.config.pools["main"].labels["small"],
            None,
            {
                "nodepool_node_id": node_id,
                "nodepool_pool_name": "main",
                "nodepool_provider_name": "meta",
            },
            Attributes(**attributes),
            None,
            None,
        )
        advance = machine.advance

        def recording() -> Any:
            """The instance comes once, maybe in the very first step."""
            result = advance()
            if result is not None:
                self.instances[node_id] = result
            return result

        machine.advance = recording  # type: ignore[method-assign]
        return machine

    def requests(self) -> list[NodeRequest]:
        return [
            request
            for request in self.zk.nodeRequestIterator(cached=False)
            if request.requestor == OWNER
        ]

    def fulfil(self, request: NodeRequest | None = None) -> Node:
        """What another launcher does for a backing request."""
        if request is None:
            request = wait_for(
                lambda: next((r for r in self.requests() if r.state == "requested"), None)
            )
        node = Node()
        node.state = READY
        node.provider, node.pool, node.type = "cloud", "main", "big"
        node.allocated_to = request.id
        node.requestor = request.requestor
        node.interface_ip, node.host_keys, node.cloud = "192.0.2.1", ["ssh-rsa AAA"], "cloudy"
        self.zk.storeNode(node)
        assert node.id is not None
        request.nodes = [node.id]
        request.state = FULFILLED
        self.zk.storeNodeRequest(request)
        return node

    def fail(self) -> None:
        request = wait_for(lambda: next(iter(self.requests()), None))
        request.state = FAILED
        self.zk.storeNodeRequest(request)

    def finish(self, machine: Any, timeout: float = 10) -> Any:
        """Advance until complete, as the framework does; the node becomes ready."""

        def step() -> bool:
            if not machine.complete:
                machine.advance()
            return bool(machine.complete)

        wait_for(step, timeout, "the slot")
        instance = self.instances[machine.node_id]
        node = self.zk.getNode(machine.node_id)
        assert node is not None
        node.state = READY
        node.driver_data, node.slot, node.external_id = (
            instance.driver_data,
            instance.slot,
            instance.external_id,
        )
        self.zk.storeNode(node)
        return instance

    def end(self, node_id: str) -> None:
        """The requested node is used up and deleted."""
        machine = self.adapter.getDeleteStateMachine(node_id, None)
        machine.advance()
        assert machine.complete
        self.zk.deleteRawNode(node_id)

    def records(self) -> list[Any]:
        return list(self.adapter.backing_node_records.get("small", []))


@pytest.fixture
def make(zk_chroot: Chroot) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def bench(zk: ZooKeeper | None = None, **label: Any) -> Bench:
        if zk is None:
            zk = ZooKeeper(zk_chroot.connect())
            assert zk.wait_synced(20)
        benches.append(Bench(zk, config(**label)))
        return benches[-1]

    yield bench
    for each in benches:
        each.adapter.stop()


@pytest.mark.spec("MST-3: data in ZooKeeper")
def test_first_slot_requests_a_backing_node(make: Callable[..., Bench]) -> None:
    bench = make()
    machine = bench.machine()
    assert machine.advance() is None
    woken: list[bool] = []
    machine.wake = lambda: woken.append(True)
    (request,) = wait_for(bench.requests)
    assert (request.node_types, request.state) == (["big"], "requested")
    # on behalf of the user
    assert (request.tenant_name, request.event_id, request.relative_priority) == ("t1", "e1", 3)
    assert request.id.startswith("200-")
    assert request.stat.ephemeralOwner
    backing = bench.fulfil(request)
    wait_for(lambda: woken)
    instance = bench.finish(machine)
    assert instance.driver_data["backing_node"] == backing.id
    assert machine.external_id == instance.external_id == machine.node_id
    assert (instance.slot, instance.interface_ip, instance.host_keys) == (
        0,
        "192.0.2.1",
        ["ssh-rsa AAA"],
    )
    stored = bench.zk.getNode(backing.id or "")
    assert stored is not None
    assert stored.state == IN_USE
    assert bench.zk.getNodeLockContenders(stored) == [OWNER]
    data = json.loads(stored.user_data)
    assert (data["owner"], data["label"], data["slots"], data["failed"]) == (
        OWNER,
        "small",
        2,
        False,
    )
    assert data["allocations"] == {"0": machine.node_id}
    assert bench.requests() == []


@pytest.mark.spec("MST-8.3: second shares, third gets a new one, a freed slot is reused")
def test_nodes_share_a_backing_node_and_reuse_its_slots(make: Callable[..., Bench]) -> None:
    bench = make()
    first, second, third = bench.machine(), bench.machine(), bench.machine()
    for machine in (first, second, third):
        machine.advance()
    requests = wait_for(lambda: len(bench.requests()) == 2 and bench.requests())
    one, two = bench.fulfil(requests[0]), bench.fulfil(requests[1])
    assert bench.finish(first).driver_data["backing_node"] == one.id
    instance = bench.finish(second)
    assert (instance.driver_data["backing_node"], instance.slot) == (one.id, 1)
    assert bench.finish(third).driver_data["backing_node"] == two.id
    bench.end(first.node_id)
    instance = bench.finish(bench.machine())
    assert (instance.driver_data["backing_node"], instance.slot) == (one.id, 0)


@pytest.mark.spec("MST-6.6: two launchers with the same provider never fill one slot twice")
def test_two_launchers_share_backing_nodes(make: Callable[..., Bench]) -> None:
    one, two = make(**{"max-parallel-jobs": 40}), make(**{"max-parallel-jobs": 40})
    two.adapter.slots.initialize()
    machine = one.machine()
    machine.advance()
    backing = one.fulfil()
    one.finish(machine)
    wait_for(lambda: two.records() and two.records()[0].allocated_nodes[0] == machine.node_id)
    # Both fill it at the same time.
    machines = [bench.machine() for _ in range(15) for bench in (one, two)]
    for machine in machines:
        machine.advance()
    slots = {}
    for machine in machines:
        bench = one if machine._slots is one.adapter.slots else two
        instance = bench.finish(machine)
        assert instance.driver_data["backing_node"] == backing.id
        slots[machine.node_id] = instance.slot
    assert sorted(slots.values()) == list(range(1, 31)), "each slot once"
    assert one.requests() == []
    for bench in (one, two):
        wait_for(lambda b=bench: len(b.records()[0].allocations()) == 31)
    # What one frees the other may use.
    gone = machines[0].node_id
    one.end(gone)
    wait_for(lambda: two.records()[0].allocated_nodes[slots[gone]] is None)
    assert two.finish(two.machine()).slot == slots[gone]


@pytest.mark.spec("MST-8.3: a freed slot is used before a newer backing node")
def test_who_waits_takes_a_slot_that_becomes_free(make: Callable[..., Bench]) -> None:
    """Not only the backing node that was asked for: it may take long to come, or never."""
    bench = make()
    first = [bench.machine() for _ in range(2)]
    for machine in first:
        machine.advance()
    backing = bench.fulfil()
    for machine in first:
        bench.finish(machine)
    waiting = [bench.machine() for _ in range(3)]
    for machine in waiting:
        machine.advance()
    wait_for(lambda: len(bench.requests()) == 2)
    bench.zk.deleteNode(bench.zk.getNode(first[0].node_id))
    bench.finish(waiting[0])
    assert bench.instances[waiting[0].node_id].driver_data["backing_node"] == backing.id
    assert bench.instances[waiting[0].node_id].slot == 0
    assert bench.zk.getNode(backing.id).user_data.count(waiting[0].node_id) == 1
    # The other one that waited at the same place gets what comes.
    other = bench.fulfil(waiting_for(bench, waiting[1]))
    bench.finish(waiting[1])
    assert bench.instances[waiting[1].node_id].driver_data["backing_node"] == other.id
    # Nobody is left at the second place: the request is cancelled.
    bench.zk.deleteNode(bench.zk.getNode(first[1].node_id))
    bench.finish(waiting[2])
    assert bench.instances[waiting[2].node_id].driver_data["backing_node"] == backing.id
    wait_for(lambda: bench.requests() == [])


def waiting_for(bench: Bench, machine: Any) -> NodeRequest:
    return wait_for(
        lambda: next((r for r in bench.requests() if r.id == machine.record.request_id), None)
    )


def test_lower_number_of_slots_applies_to_existing_backing_nodes(
    make: Callable[..., Bench],
) -> None:
    bench = make()
    first = [bench.machine() for _ in range(2)]
    for machine in first:
        machine.advance()
    backing = bench.fulfil()
    for machine in first:
        bench.finish(machine)
    reloaded = make(**{"max-parallel-jobs": 1})
    waiting = reloaded.machine()
    waiting.advance()
    (record,) = (each for each in reloaded.adapter.slots.book if each.node_id is not None)
    reloaded.end(first[0].node_id)
    assert record.allocations() == {1: first[1].node_id}
    assert waiting.record is not record, "its slot is given to nobody who waits"
    other = reloaded.machine()
    other.advance()
    assert other.record is not record, "nor to another node"
    reloaded.end(first[1].node_id)
    reloaded.finish(waiting)
    assert reloaded.instances[waiting.node_id].driver_data["backing_node"] == backing.id


@pytest.mark.parametrize("reason", ["failed", "too-old"])
def test_who_waits_takes_no_slot_that_is_not_for_use(
    make: Callable[..., Bench], reason: str
) -> None:
    bench = make(**{"max-age": 3600} if reason == "too-old" else {})
    first = [bench.machine() for _ in range(2)]
    for machine in first:
        machine.advance()
    bench.fulfil()
    for machine in first:
        bench.finish(machine)
    waiting = bench.machine()
    waiting.advance()
    (record,) = (each for each in bench.adapter.slots.book if each.node_id is not None)
    if reason == "failed":
        record.failed = True
    else:
        record.launched = 0
    bench.zk.deleteNode(bench.zk.getNode(first[0].node_id))
    wait_for(lambda: not record.backsNode(first[0].node_id))
    assert waiting.record is not record
    other = bench.fulfil()
    bench.finish(waiting)
    assert bench.instances[waiting.node_id].driver_data["backing_node"] == other.id


def test_release_and_allocation_exclude_each_other(make: Callable[..., Bench]) -> None:
    one, two = make(), make()
    two.adapter.slots.initialize()
    machine = one.machine()
    machine.advance()
    backing = one.fulfil()
    one.finish(machine)
    one.end(machine.node_id)
    wait_for(lambda: two.records() and two.records()[0].isEmpty())
    # One has decided to release; the other is faster.
    (record,) = one.records()
    again = two.machine()
    two.finish(again)
    one.adapter.slots.housekeeping._release(record)
    node = one.zk.getNode(backing.id or "")
    assert node is not None
    assert node.state == IN_USE
    assert record.backsNode(again.node_id)
    two.end(again.node_id)
    wait_for(record.isEmpty)
    one.adapter.slots.housekeeping._release(record)
    node = one.zk.getNode(backing.id or "")
    assert node is not None
    assert node.state == USED
    # Now the other must not put anything there.
    fresh = two.machine()
    fresh.advance()
    two.fulfil()
    assert two.finish(fresh).driver_data["backing_node"] != backing.id


@pytest.mark.spec("MST-8.4: empty and past grace-time: used, unlocked, record dropped")
@pytest.mark.spec("MST-8.8: min-retention-time keeps an idle backing node in-use")
def test_idle_backing_node_is_kept_for_min_retention_time(make: Callable[..., Bench]) -> None:
    bench = make(**{"min-retention-time": 1000})
    machine = bench.machine()
    machine.advance()
    backing = bench.fulfil()
    bench.finish(machine)
    bench.adapter.periodic()
    assert bench.adapter.listResources() == []
    bench.end(machine.node_id)
    bench.adapter.periodic()
    node = bench.zk.getNode(backing.id or "")
    assert node is not None
    assert node.state == IN_USE
    bench.records()[0].launched = 0
    bench.adapter.periodic()
    node = bench.zk.getNode(backing.id or "")
    assert node is not None
    assert node.state == USED
    assert bench.zk.getNodeLockContenders(node) == []
    assert bench.records() == []


@pytest.mark.spec("MST-8.4: grace-time after a clock was set back")
def test_clock_that_was_ahead_keeps_no_idle_backing_node(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, now = make(), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86400)
    machine = bench.machine()
    machine.advance()
    backing = bench.fulfil()
    bench.finish(machine)
    bench.end(machine.node_id)
    monkeypatch.setattr(time, "time", now)
    bench.adapter.periodic()
    node = bench.zk.getNode(backing.id or "")
    assert node is not None
    assert node.state == USED
    assert bench.records() == []


@pytest.mark.parametrize("reason", ["allocation", "busy", "taking", "releasing"])
def test_backing_node_that_something_is_done_with_is_not_released(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    bench = make()
    machine = bench.machine()
    machine.advance()
    bench.fulfil()
    bench.finish(machine)
    (record,) = bench.records()
    released: list[Any] = []
    monkeypatch.setattr(bench.adapter.slots, "release", released.append)
    if reason != "allocation":
        bench.end(machine.node_id)
        wait_for(record.isEmpty)
        monkeypatch.setattr(record, reason, True)
    bench.adapter.slots.housekeeping._check(record)
    assert released == []
    assert record.releasing == (reason == "releasing")


def test_slot_of_a_deleted_backing_node_is_not_reserved(make: Callable[..., Bench]) -> None:
    bench = make()
    machine = bench.machine()
    machine.advance()
    backing = bench.fulfil()
    bench.finish(machine)
    (record,) = bench.records()
    bench.zk.deleteRawNode(backing.id or "")
    wait_for(lambda: bench.zk.getCachedNode(backing.id or "") is None)
    with bench.adapter.slots.lock:
        bench.adapter.slots.store(record, [])
    assert record.lost and not record.busy


@pytest.mark.spec("MST-8.9: an over-age backing node gets no new nodes although a slot is free")
def test_backing_node_beyond_its_max_age_gets_no_new_nodes(make: Callable[..., Bench]) -> None:
    bench = make(**{"max-age": 600})
    machine = bench.machine()
    machine.advance()
    old = bench.fulfil()
    bench.finish(machine)
    bench.records()[0].launched = 0
    second = bench.machine()
    second.advance()
    new = bench.fulfil()
    assert bench.finish(second).driver_data["backing_node"] == new.id
    bench.end(machine.node_id)
    bench.adapter.periodic()
    node = bench.zk.getNode(old.id or "")
    assert node is not None
    assert node.state == USED
    assert [record.node_id for record in bench.records()] == [new.id]


@pytest.mark.spec("MST-8.7: scan failure of a new slot")
def test_backing_node_of_a_failed_scan_gets_no_new_nodes(make: Callable[..., Bench]) -> None:
    bench = make()
    first, second = bench.machine(), bench.machine()
    first.advance()
    bad = bench.fulfil()
    bench.finish(first)
    assert bench.finish(second).driver_data["backing_node"] == bad.id
    assert bench.adapter.describeHosts() == []
    bench.adapter.notifyNodescanFailure(None, second.node_id)
    (host,) = bench.adapter.describeHosts()
    assert (host["name"], host["usable"], host["used"], host["limits"]) == (
        bad.id,
        False,
        {"slots": 2},
        {"slots": 2},
    )
    wait_for(lambda: json.loads(bench.zk.getNode(bad.id or "").user_data)["failed"])  # type: ignore[union-attr]
    # the framework deletes and tries again with the same node
    delete = bench.adapter.getDeleteStateMachine(second.node_id, None)
    delete.advance()
    retry = bench.machine(second.node_id)
    retry.advance()
    good = bench.fulfil()
    assert bench.finish(retry).driver_data["backing_node"] == good.id
    bench.adapter.periodic()
    assert bench.zk.getNode(bad.id or "").state == IN_USE  # type: ignore[union-attr]
    bench.end(first.node_id)
    bench.adapter.periodic()
    assert bench.zk.getNode(bad.id or "").state == USED  # type: ignore[union-attr]


@pytest.mark.spec("MST-8.5: after a restart the records are rebuilt")
@pytest.mark.spec("MST-8.6: a backing node of a label that no longer exists is released when empty")
def test_empty_backing_node_of_a_removed_label_is_released(make: Callable[..., Bench]) -> None:
    before = make()
    machine, broken = before.machine(), before.machine()
    machine.advance()
    backing = before.fulfil()
    before.finish(machine)
    before.finish(broken)
    # died before "broken" was ready: its record says nothing of its slot
    node = before.zk.getNode(broken.node_id)
    assert node is not None
    node.driver_data = node.slot = None
    node.state = BUILDING
    before.zk.storeNode(node)
    # A node that only claims to be ours.
    forged = Node()
    forged.state = HOLD
    forged.user_data = json.dumps({"owner": OWNER, "label": "small", "slots": 9})
    before.zk.storeNode(forged)

    after = make()
    after.adapter.slots.initialize()
    (record,) = after.records()
    assert record.node_id == backing.id
    assert record.allocated_nodes == [machine.node_id, broken.node_id]
    assert record.launched == before.records()[0].launched
    after.zk.deleteRawNode(broken.node_id)
    wait_for(lambda: record.allocated_nodes == [machine.node_id, None])
    assert after.finish(after.machine()).slot == 1

    renamed = make()
    del renamed.config.pools["main"].labels["small"]
    renamed.adapter.periodic()
    assert len(renamed.records()) == 1, "still used"
    for node_id in list(renamed.records()[0].allocations().values()):
        after.end(node_id)
    wait_for(lambda: renamed.records()[0].isEmpty())
    renamed.adapter.periodic()
    assert renamed.zk.getNode(backing.id or "").state == USED  # type: ignore[union-attr]


def test_recovery_reads_what_release_11_wrote(make: Callable[..., Bench], zk: ZooKeeper) -> None:
    backing = Node()
    backing.state = IN_USE
    backing.provider, backing.type = "cloud", "big"
    backing.user_data = json.dumps({"owner": OWNER, "label": "small", "slots": 3})
    zk.storeNode(backing)
    locked = zk.getNode(backing.id or "")
    assert locked is not None
    zk.lockNode(locked, ephemeral=False, identifier=OWNER)
    user = Node()
    user.state = IN_USE
    user.provider, user.type = "meta", "small"
    user.driver_data = {"metadata": {}, "backing_node": backing.id, "slot": 1, "node": "x"}
    zk.storeNode(user)
    clash = Node()
    clash.state = IN_USE
    clash.provider, clash.type = "meta", "small"
    clash.driver_data = {"metadata": {}, "backing_node": backing.id, "slot": 1, "node": "y"}
    zk.storeNode(clash)

    bench = make(**{"max-parallel-jobs": 3})
    bench.adapter.slots.initialize()
    (record,) = bench.records()
    assert record.allocated_nodes == [None, user.id, None]
    assert (record.failed, record.launched) == (False, 0)
    # a node that a launcher of that release puts there now
    other = Node()
    other.state = READY
    other.provider, other.type = "meta", "small"
    other.driver_data = {"metadata": {}, "backing_node": backing.id, "slot": 0, "node": "z"}
    zk.storeNode(other)
    wait_for(lambda: record.allocated_nodes == [other.id, user.id, None])
    assert bench.finish(bench.machine()).slot == 2


@pytest.mark.spec("MST-6.4: FAILED backing requests are deleted")
def test_failed_backing_requests_are_deleted(make: Callable[..., Bench]) -> None:
    bench = make()
    machine = bench.machine()
    machine.advance()
    woken: list[bool] = []
    machine.wake = lambda: woken.append(True)
    bench.fail()
    wait_for(lambda: woken)
    with pytest.raises(Exception, match="Backing node failed"):
        machine.advance()
    wait_for(lambda: not bench.requests())
    assert bench.records() == []


@pytest.mark.spec("MST-6.1: a backing request that vanishes is treated as failed")
def test_vanished_backing_request_is_a_failure(make: Callable[..., Bench]) -> None:
    bench = make()
    machine = bench.machine()
    machine.advance()
    (request,) = wait_for(bench.requests)
    bench.zk.deleteNodeRequest(request)
    wait_for(lambda: machine.problem)
    with pytest.raises(Exception, match="no longer exists"):
        machine.advance()
    retry = bench.machine(machine.node_id)
    retry.advance()
    bench.fulfil()
    bench.finish(retry)


@pytest.mark.spec("MST-6.2: a backing node that vanishes gets no more slots; take another")
@pytest.mark.spec("MST-8.10: the record survives until its requested nodes are gone")
def test_lost_backing_node(make: Callable[..., Bench]) -> None:
    bench = make()
    machine = bench.machine()
    machine.advance()
    backing = bench.fulfil()
    bench.finish(machine)
    bench.zk.deleteRawNode(backing.id or "")
    (record,) = bench.records()
    wait_for(lambda: record.lost)
    second = bench.machine()
    second.advance()
    new = bench.fulfil()
    assert bench.finish(second).driver_data["backing_node"] == new.id
    assert record in bench.adapter.slots.book
    bench.end(machine.node_id)
    bench.adapter.periodic()
    assert [r.node_id for r in bench.records()] == [new.id]


def test_backing_node_that_dies_before_it_is_adopted(make: Callable[..., Bench]) -> None:
    bench = make()
    machine = bench.machine()
    machine.advance()
    (request,) = wait_for(bench.requests)
    request.nodes = ["0000000999"]
    request.state = FULFILLED
    bench.zk.storeNodeRequest(request)
    wait_for(lambda: machine.problem)
    with pytest.raises(Exception, match="no longer exists or is not ours"):
        machine.advance()
    wait_for(lambda: not bench.requests())


def test_waiting_for_the_lock_of_a_backing_node(make: Callable[..., Bench], zk: ZooKeeper) -> None:
    bench = make()
    machine = bench.machine()
    machine.advance()
    (request,) = wait_for(bench.requests)
    node = Node()
    node.state = READY
    node.provider, node.type, node.allocated_to = "cloud", "big", request.id
    zk.storeNode(node)
    zk.lockNode(node)
    request.nodes = [node.id or ""]
    request.state = FULFILLED
    zk.storeNodeRequest(request)
    wait_for(lambda: bench.records()[0].taking)
    zk.unlockNode(node)
    assert bench.finish(machine).driver_data["backing_node"] == node.id


@pytest.mark.spec("MST-6.3: whose only user gave up before fulfilment: cancel the request")
def test_request_that_nobody_waits_for(make: Callable[..., Bench]) -> None:
    bench = make()
    machine = bench.machine()
    machine.advance()
    wait_for(bench.requests)
    bench.end(machine.node_id)
    bench.adapter.periodic()
    wait_for(lambda: not bench.requests())
    assert bench.records() == []
    # fulfilled for nobody: kept for the next, then released
    machine = bench.machine()
    machine.advance()
    wait_for(bench.requests)
    bench.end(machine.node_id)
    backing = bench.fulfil()
    wait_for(lambda: bench.records()[0].node_id == backing.id)
    assert bench.finish(bench.machine()).driver_data["backing_node"] == backing.id


def test_backing_request_whose_creation_was_not_acknowledged_is_canceled(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    machine, submit, created = bench.machine(), bench.zk.writer.submit, list[Callable[..., None]]()

    def lose(txn: Any, callback: Any = None) -> None:
        submit(txn, lambda _results, _error: created.append(callback))

    with monkeypatch.context() as patch:
        patch.setattr(bench.zk.writer, "submit", lose)
        machine.advance()
        wait_for(lambda: created, what="the request")
    created.pop()(None, ConnectionLoss())
    assert bench.requests() != [] and bench.records() == []
    bench.adapter.periodic()
    wait_for(lambda: not bench.requests(), what="the end of the request that nobody follows")


@pytest.mark.spec("MST-6.5: what the replaced provider acquires later is known to the new one")
def test_new_provider_knows_nodes_acquired_by_the_replaced_one(make: Callable[..., Bench]) -> None:
    old = make()
    machine = old.machine()
    machine.advance()
    new = make(zk=old.zk)
    new.adapter.slots.initialize()
    backing = old.fulfil()
    old.finish(machine)
    wait_for(lambda: new.records() and new.records()[0].node_id == backing.id)
    assert new.finish(new.machine()).slot == 1
    old.adapter.stop()
    assert old.adapter.slots._node_event not in old.zk.node_tree.listeners  # type: ignore[union-attr]


def test_stop_cancels_requests(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.machine().advance()
    wait_for(bench.requests)
    bench.adapter.stop()
    wait_for(lambda: not bench.requests())


def test_one_write_for_all_slots_asked_for_meanwhile(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**{"max-parallel-jobs": 64})
    first = bench.machine()
    first.advance()
    backing = bench.fulfil()
    bench.finish(first)
    machines = [bench.machine() for _ in range(63)]
    slots, submit = bench.adapter.slots, bench.adapter.slots.submit
    answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    monkeypatch.setattr(
        slots,
        "submit",
        lambda txn, done: submit(txn, lambda *answer: answers.put(lambda: done(*answer))),
    )
    version = bench.zk.getNode(backing.id or "").stat.version  # type: ignore[union-attr]
    for machine in machines:
        machine.advance()
    monkeypatch.undo()
    answers.get(timeout=10)()  # the first slot is stored
    wait_for(lambda: all(machine.granted for machine in machines))
    assert bench.zk.getNode(backing.id or "").stat.version - version == 2  # type: ignore[union-attr]


def seen_by_mirror(zk: ZooKeeper, backing: Node) -> Node:
    """The record as another launcher's mirror shows it when the lock arrives before the record."""
    present = zk.getNode(backing.id or "")
    assert present is not None and present.state == IN_USE
    seen = present.copy()
    seen.state, seen.user_data, seen.requestor = READY, None, OWNER
    seen.lock_contenders = {"0" * 32 + "__lock__0000000000"}
    return seen


@pytest.mark.parametrize(
    "read_before", [False, True], ids=["record read after", "record read before"]
)
def test_backing_node_just_adopted_by_another_launcher_stays_locked(
    make: Callable[..., Bench], zk: ZooKeeper, monkeypatch: pytest.MonkeyPatch, read_before: bool
) -> None:
    monkeypatch.setattr(housekeeping, "SIGNING_TIME", 0.0)  # it protects the node, too
    owner, other = make(), make(zk)
    machine = owner.machine()
    machine.advance()
    backing = owner.fulfil()
    owner.finish(machine)
    seen = seen_by_mirror(zk, backing)
    if read_before:  # the take-over happens between our reading of the record and the unlocking
        stale = seen.copy()
        assert seen.stat is not None
        stale.stat = seen.stat._replace(version=seen.stat.version - 1)
        monkeypatch.setattr(zk, "getNode", lambda node_id, **_options: stale)
    other.adapter.slots.housekeeping._recover_node(seen)
    monkeypatch.undo()
    assert zk.getNodeLockContenders(backing) == [OWNER]
    present = zk.getNode(backing.id or "")
    assert present is not None and present.state == IN_USE


def test_ready_node_locked_by_a_dead_release_11_launcher_is_unlocked(
    make: Callable[..., Bench], zk: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node()
    node.state, node.requestor = READY, OWNER
    node.provider, node.pool, node.type = "cloud", "main", "big"
    zk.storeNode(node)
    zk.lockNode(node, ephemeral=False, identifier=OWNER)
    bench = make()
    wait_for(lambda: bench.zk.node_tree.get(node.id).lock_contenders)
    for _ in range(2):
        bench.adapter.periodic()
    assert zk.getNodeLockContenders(node) == [OWNER], "a living one may be about to sign it"
    monkeypatch.setattr(housekeeping, "SIGNING_TIME", 0.0)
    bench.adapter.periodic()
    assert zk.getNodeLockContenders(node) == []


@pytest.mark.parametrize("step", ["adopt", "check", "release"])
def test_slot_is_kept_for_a_node_that_the_mirror_has_not_read_yet(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    one, two = make(), make()
    two.adapter.slots.initialize()
    machine = one.machine()
    machine.advance()
    backing = one.fulfil()
    one.finish(machine)
    (record,) = wait_for(two.records)
    wait_for(lambda: record.allocated_nodes[0] == machine.node_id)
    seen = two.zk.node_tree.get
    monkeypatch.setattr(
        two.zk.node_tree,
        "get",
        lambda node_id: None if node_id == machine.node_id else seen(node_id),
    )
    slots = two.adapter.slots
    if step == "check":
        slots.housekeeping._check(record)
    else:
        slots.book.drop(record)
        if step == "release":
            fresh = slots.new_record(SimpleNamespace(name="small", max_parallel_jobs=2))
            fresh.node_id = backing.id
            slots.book.add(fresh)
            slots.housekeeping.release(fresh)
        else:
            slots.housekeeping.adopt(backing.id or "")
    (record,) = two.records()
    assert record.allocated_nodes[0] == machine.node_id
    kept = two.zk.getNode(backing.id or "")
    assert kept is not None and kept.state == IN_USE

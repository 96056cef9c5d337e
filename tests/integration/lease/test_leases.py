"""Leases with a real ZooKeeper and a launcher (spec: lease, sections 2, 3, 5)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss, SessionExpiredError
from kazoo.protocol.serialization import GetData

from nodepool.lease import Lease, LeaseError, Leases, LeaseState, Reason, Terms
from nodepool.lease.leases import turn_of
from nodepool.zk import paths
from nodepool.zk.records import HOLD, READY, NodeRequest
from nodepool.zk.writer import Callback, Txn
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import wait_for
from tests.integration.lease.conftest import ephemerals
from tests.support.faults.launcher import Proxy
from tests.support.launcher import LauncherBench, config, provider

ALICE = Terms("alice", "unix:1000", "debug #12")


@pytest.fixture
def leases(bench: LauncherBench) -> Leases:
    return Leases(bench.zk)


def refused(reason: Reason, call: Callable[[], object]) -> str:
    with pytest.raises(LeaseError) as caught:
        call()
    assert caught.value.reason is reason, caught.value
    return str(caught.value)


def ready(bench: LauncherBench, leases: Leases, *labels: str, terms: Terms = ALICE) -> str:
    """Ask for a lease and wait until its nodes are ready; return its id."""
    lease = leases.ask(labels or ["fake-label"], terms)
    bench.wait_request(lease.id, "fulfilled")
    return lease.id


def held(bench: LauncherBench, leases: Leases, *labels: str, seconds: float = 3600) -> Lease:
    bench.start(config(provider()))
    return leases.hand_over(ready(bench, leases, *labels), seconds)


def test_lease_is_nodes_on_hold_with_owner_and_end(bench: LauncherBench, leases: Leases) -> None:
    lease = held(bench, leases, "fake-label", "fake-label")
    assert (lease.state, lease.labels, lease.lost) == (
        LeaseState.HELD,
        ("fake-label", "fake-label"),
        0,
    )
    assert lease.ends == pytest.approx(time.time() + 3600, abs=30)
    assert bench.zk.getNodeRequest(lease.id) is None
    for node in lease.nodes:
        stored = bench.zuul.node(node.id or "")
        assert (stored["state"], stored["hold_expiration"], stored["allocated_to"]) == (
            HOLD,
            3600,
            lease.id,
        )
        assert (stored["comment"], stored["hold_job"]) == ("lease alice: debug #12", None)
        assert stored["user_data"]["lease"]["owner"] == "alice"
        assert bench.zuul.contenders(node.id or "") == []
    assert leases.get(lease.id) == leases.all()[0]


def test_waiting_lease_is_listed_until_it_is_handed_over(
    bench: LauncherBench, leases: Leases
) -> None:
    waiting = leases.ask(["fake-label"], ALICE)
    assert [(lease.id, lease.state) for lease in leases.all()] == [(waiting.id, LeaseState.WAITING)]
    assert "is waiting" in refused(Reason.NOT_READY, lambda: leases.hand_over(waiting.id, 60))
    bench.start(config(provider()))
    bench.wait_request(waiting.id, "fulfilled")
    assert [lease.state for lease in leases.all()] == [LeaseState.READY]


def test_returned_lease_frees_its_nodes(bench: LauncherBench, leases: Leases) -> None:
    lease = held(bench, leases, "fake-label", "fake-label")
    assert leases.give_back(lease.id)
    bench.wait_gone(*[node.id or "" for node in lease.nodes])
    assert leases.all() == [] and not leases.give_back(lease.id)


def test_calls_on_a_lease_do_not_go_through_all_nodes(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be tens of thousands of idle ones."""
    lease = held(bench, leases)
    with monkeypatch.context() as patched:
        patched.delattr("nodepool.zk.mirror.nodes.NodeTree.snapshot")
        assert leases.get(lease.id) is not None and len(leases.all()) == 1
        assert leases.renew(lease.id, 7200).state is LeaseState.HELD
        assert leases.give_back(lease.id)


def test_canceled_request_frees_its_nodes(bench: LauncherBench, leases: Leases) -> None:
    bench.start(config(provider()))
    lease_id = ready(bench, leases)
    assert leases.give_back(lease_id)
    bench.wait_nodes(1, state=READY, allocated_to=None)
    assert leases.all() == []


def test_lease_that_is_handed_over_while_it_is_returned_frees_its_nodes(
    bench: LauncherBench, leases: Leases
) -> None:
    bench.start(config(provider()))
    lease_id = ready(bench, leases)
    as_read = leases.get(lease_id)
    lease = leases.hand_over(lease_id, 3600)
    assert leases.give_back(lease_id, as_read)
    bench.wait_gone(*[node.id or "" for node in lease.nodes])


def test_lease_is_found_before_the_mirror_has_read_its_nodes(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bench.start(config(provider()))
    others = Leases(ZooKeeper(bench.chroot.connect(), enable_cache=False))
    lease_id = ready(bench, others, "fake-label", "fake-label")
    tree = pool.zk.node_tree
    wait_for(lambda: not tree.changing(), what="a mirror that has read everything")
    # The answers do not come.
    monkeypatch.setattr(tree, "_read", lambda path, *_args: tree.reading.update({path: 1}))
    others.hand_over(lease_id, 3600)
    found = Leases(pool.zk).get(lease_id)
    assert found is not None and (found.state, len(found.nodes)) == (LeaseState.HELD, 2)


def test_renewed_lease_ends_later_and_never_earlier(bench: LauncherBench, leases: Leases) -> None:
    lease = held(bench, leases, "fake-label", "fake-label", seconds=600)
    before = [bench.zuul.node(node.id or "")["state_time"] for node in lease.nodes]
    later = leases.renew(lease.id, 7200)
    assert later.ends == pytest.approx(time.time() + 7200, abs=30)
    assert later.terms.renewed == 1
    assert [bench.zuul.node(node.id or "")["state_time"] for node in lease.nodes] == before
    assert leases.renew(lease.id, 60).ends == later.ends


def test_lease_is_not_renewed_when_it_is_about_to_end(bench: LauncherBench, leases: Leases) -> None:
    lease = held(bench, leases, seconds=60)
    end = lease.ends or 0.0
    assert "too late" in refused(
        Reason.TOO_LATE, lambda: Leases(bench.zk, now=lambda: end - 14).renew(lease.id, 600)
    )
    assert Leases(bench.zk, now=lambda: end - 16).renew(lease.id, 600).ends == pytest.approx(
        end + 584, abs=2
    )


@pytest.mark.parametrize("seconds", [0, 59, -1, float("nan"), float("inf"), 1e12])
def test_impossible_durations_are_refused(leases: Leases, seconds: float) -> None:
    refused(Reason.BAD_REQUEST, lambda: leases.hand_over("200-0000000001", seconds))
    refused(Reason.BAD_REQUEST, lambda: leases.renew("200-0000000001", seconds))


@pytest.mark.parametrize("lease_id", ["200-0000000099", "", "../nodes", "a/b"])
def test_unknown_leases_are_refused(leases: Leases, lease_id: str) -> None:
    refused(Reason.NOT_FOUND, lambda: leases.hand_over(lease_id, 60))
    refused(Reason.ENDED, lambda: leases.renew(lease_id, 60))
    assert leases.get(lease_id) is None and not leases.give_back(lease_id)


def test_nothing_is_handed_over_if_one_node_has_changed(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client writes a node between its lock and the transaction."""
    bench.start(config(provider()))
    lease_id = ready(bench, leases, "fake-label", "fake-label")
    nodes = bench.zk.getNodeRequest(lease_id).nodes
    run = bench.zk.writer.run

    def interfere(txn: Any, *args: Any) -> Any:
        bench.zuul.write_node(nodes[1], comment="somebody was here")
        return run(txn, *args)

    monkeypatch.setattr(bench.zk.writer, "run", interfere)
    refused(Reason.UNAVAILABLE, lambda: leases.hand_over(lease_id, 60))
    monkeypatch.undo()
    bench.wait_nodes(2, state=READY, allocated_to=None)
    assert bench.zk.getNodeRequest(lease_id) is None and leases.all() == []


def test_hand_over_whose_answer_was_lost_is_found_in_the_records(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(config(provider()))
    lease_id = ready(bench, leases)
    run = bench.zk.writer.run

    def lose(txn: Any, *args: Any) -> Any:
        run(txn, *args)
        raise TimeoutError("no answer")

    monkeypatch.setattr(bench.zk.writer, "run", lose)
    assert leases.hand_over(lease_id, 60).state is LeaseState.HELD
    assert leases.hand_over(lease_id, 60).state is LeaseState.HELD, "again"


@pytest.mark.parametrize("lost", [ConnectionLoss, TimeoutError])
def test_hand_over_that_was_lost_is_repeated(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch, lost: type[Exception]
) -> None:
    bench.start(config(provider()))
    lease_id = ready(bench, leases)
    run, losses = bench.zk.writer.run, [lost("never sent")]

    def lose(txn: Any, *args: Any) -> Any:
        if losses:
            raise losses.pop()
        return run(txn, *args)

    monkeypatch.setattr(bench.zk.writer, "run", lose)
    assert leases.hand_over(lease_id, 60).state is LeaseState.HELD


def test_hand_over_that_is_repeated_with_an_old_request_returns_the_lease(
    bench: LauncherBench, leases: Leases
) -> None:
    """A server that lags shows the request although the transaction that deleted it has been
    applied.
    """
    bench.start(config(provider()))
    request = bench.zk.getNodeRequest(ready(bench, leases))
    lease = leases.hand_over(request.id, 600, request=request)
    assert leases.hand_over(request.id, 600, request=request).id == lease.id
    leases.give_back(lease.id)
    refused(Reason.NOT_FOUND, lambda: leases.hand_over(request.id, 600, request=request))


@pytest.mark.parametrize("applied", [True, False])
def test_hand_over_is_decided_by_the_records_after_a_cut_connection(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    bench.start(config(provider()))
    proxy = Proxy(int(bench.chroot.hosts.rpartition(":")[2]))
    zk = ZooKeeper(bench.chroot.connect(hosts=proxy.host), enable_cache=False)
    leases = Leases(zk)
    lease_id = ready(bench, leases)
    submit = zk.writer.submit

    def cut(txn: Txn, callback: Callback | None = None) -> None:
        monkeypatch.undo()
        proxy.set("deaf" if applied else "hold")
        submit(txn, callback)
        if applied:
            wait_for(lambda: bench.zuul.request(lease_id) is None, what="the transaction")
        proxy.set("close")
        proxy.set("open")

    monkeypatch.setattr(zk.writer, "submit", cut)
    try:
        lease = leases.hand_over(lease_id, 600)
        assert (lease.state, [node.state for node in bench.nodes()]) == (LeaseState.HELD, [HOLD])
        # The answer can be there before the news of the connection.
        wait_for(lambda: zk.connected, what="the connection")
        assert leases.give_back(lease_id)
    finally:
        proxy.stop()


def test_request_of_zuul_with_the_id_of_a_lost_lease_keeps_its_node(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(config(provider()))
    lease_id = ready(bench, leases)
    request, kazoo = bench.zk.getNodeRequest(lease_id), bench.zuul.client
    assert request is not None and request.stat is not None

    def lose(_txn: Txn, callback: Callback) -> None:
        """ZooKeeper loses its data, and gives the ids to a request and a node of Zuul."""
        monkeypatch.undo()
        zuul = request.copy()
        zuul.requestor, zuul.requestor_data = "zuul", None
        txn = kazoo.transaction()
        txn.delete(paths.request(lease_id))
        txn.create(paths.request(lease_id), b"{}")
        for _ in range(request.stat.version):
            txn.set_data(paths.request(lease_id), zuul.serialize())
        assert all(result is not False for result in txn.commit())
        callback(None, ConnectionLoss())

    monkeypatch.setattr(bench.zk.writer, "submit", lose)
    refused(Reason.NOT_FOUND, lambda: leases.hand_over(lease_id, 600, ALICE, request))
    assert bench.zuul.request(lease_id)["requestor"] == "zuul"
    assert [node.state for node in bench.nodes()] == [READY]


def test_lease_whose_asker_dies_before_the_hand_over_is_deleted(
    bench: LauncherBench, leases: Leases
) -> None:
    other = bench.chroot.connect()
    waiting = Leases(ZooKeeper(other, enable_cache=False)).ask(["fake-label"], ALICE)
    bench.start(config(provider()))
    bench.wait_request(waiting.id, "fulfilled")
    other.disconnect()
    bench.wait_nodes(1, state=READY, allocated_to=None)
    assert leases.all() == []


def test_same_key_gives_the_same_lease(bench: LauncherBench, leases: Leases) -> None:
    terms = Terms("alice", "unix:1000", key="job-7")
    first = leases.ask(["fake-label"], terms)
    assert leases.ask(["fake-label"], terms).id == first.id
    assert "belongs to lease" in refused(Reason.KEY_IN_USE, lambda: leases.ask(["other"], terms))
    bob = leases.ask(["fake-label"], Terms("bob", "unix:1001", key="job-7"))
    assert bob.id != first.id
    leases.give_back(bob.id)
    bench.start(config(provider()))
    bench.wait_request(first.id, "fulfilled")
    leases.hand_over(first.id, 600)
    again = leases.ask(["fake-label"], terms)
    assert (again.id, again.state) == (first.id, LeaseState.HELD)
    bench.zuul.write_node(again.nodes[0].id or "", type=["first", "fake-label"])
    assert leases.ask(["fake-label"], terms).id == first.id, "a node with several labels"
    for labels in (["other"], ["fake-label", "fake-label"]):
        refused(Reason.KEY_IN_USE, lambda labels=labels: leases.ask(labels, terms))
    leases.give_back(first.id)
    assert leases.ask(["fake-label"], terms).id != first.id, "the key of an ended lease"


def test_two_servers_that_get_the_same_key_create_one_request(bench: LauncherBench) -> None:
    terms, found = Terms("alice", "unix:1000", key="job-8"), []
    start = threading.Barrier(4)

    def ask(zk: ZooKeeper) -> None:
        start.wait(10)
        found.append(Leases(zk).ask(["fake-label"], terms).id)

    facades = [ZooKeeper(bench.chroot.connect(), enable_cache=False) for _ in range(4)]
    threads = [threading.Thread(target=ask, args=(zk,), name="asks") for zk in facades]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4 and len(set(found)) == 1


def test_keyed_leases_leave_nothing_in_the_session(bench: LauncherBench) -> None:
    bench.start(config(provider()))
    client = bench.chroot.connect()
    leases = Leases(ZooKeeper(client, enable_cache=False))
    ids = []
    for number in range(3):
        ids.append(leases.ask(["fake-label"], replace(ALICE, key=f"job-{number}"), most=3).id)
        bench.wait_request(ids[-1], "fulfilled")
    assert sorted(ephemerals(bench, client.session_id)) == sorted(
        f"/nodepool/requests/{one}" for one in ids
    )
    leases.hand_over(ids[0], 600)
    leases.hand_over(ids[1], 600)
    leases.give_back(ids[1])
    leases.give_back(ids[2])
    assert ephemerals(bench, client.session_id) == []
    again = leases.ask(["fake-label"], replace(ALICE, key="job-0"))
    assert (again.id, ephemerals(bench, client.session_id)) == (ids[0], [])
    refused(Reason.KEY_IN_USE, lambda: leases.ask(["other"], replace(ALICE, key="job-0")))
    assert ephemerals(bench, client.session_id) == []


def test_key_of_a_lease_that_was_just_handed_over_is_known_before_the_mirror_shows_it(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, terms = bench.start(config(provider())), replace(ALICE, key="job-1")
    others = Leases(ZooKeeper(bench.chroot.connect(), enable_cache=False))
    lease_id = ready(bench, others, "fake-label", terms=terms)
    tree = launcher.zk.node_tree
    wait_for(lambda: not tree.changing(), what="a mirror that has read everything")
    # The answers do not come.
    monkeypatch.setattr(tree, "_read", lambda path, *_args: tree.reading.update({path: 1}))
    others.hand_over(lease_id, 3600)
    assert Leases(launcher.zk).ask(["fake-label"], terms).id == lease_id


def test_key_of_a_request_of_another_server_is_known_before_the_mirror_shows_it(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms, (zk, other) = (
        replace(ALICE, key="job-1"),
        (ZooKeeper(bench.chroot.connect()) for _ in range(2)),
    )
    assert zk.wait_synced(20)
    kazoo = zk.kazoo_client
    submit, exists, late = kazoo.submit, kazoo.exists, list[tuple[Any, Any]]()

    def read_late(request: Any, reply: Any) -> None:
        if isinstance(request, GetData):
            late.append((request, reply))
        else:
            submit(request, reply)

    def ask(*args: Any, **kwargs: Any) -> Any:
        while late:  # what was sent before is answered before
            submit(*late.pop(0))
        return exists(*args, **kwargs)

    monkeypatch.setattr(kazoo, "submit", read_late)
    monkeypatch.setattr(kazoo, "exists", ask)
    first = Leases(other).ask(["fake-label"], terms)
    wait_for(lambda: late, what="the news of the request")
    assert Leases(zk).ask(["fake-label"], terms).id == first.id


@pytest.mark.parametrize("keyed", [True, False])
def test_limit_per_owner_holds_for_concurrent_calls_of_several_servers(
    bench: LauncherBench, keyed: bool
) -> None:
    start, outcomes = threading.Barrier(8), []

    def ask(zk: ZooKeeper, number: int) -> None:
        start.wait(10)
        while True:
            try:
                terms = replace(ALICE, key=f"job-{number}" if keyed else None)
                outcomes.append(Leases(zk).ask(["fake-label"], terms, most=2).state)
            except LeaseError as error:
                if error.reason is Reason.BUSY:
                    continue
                outcomes.append(error.reason)
            return

    facades = [ZooKeeper(bench.chroot.connect(), enable_cache=False) for _ in range(4)]
    threads = [
        threading.Thread(target=ask, args=(facades[i % 4], i), name="asks") for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(str, outcomes)) == sorted(
        [str(LeaseState.WAITING)] * 2 + [str(Reason.TOO_MANY)] * 6
    )
    assert len(bench.zk.getNodeRequests()) == 2


def test_other_server_that_creates_a_request_of_the_owner_is_waited_for_briefly(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.lease.leases.TURN", 0.2)
    turn, terms = turn_of(bench.zuul.client, "alice"), replace(ALICE, key="job-1")
    bench.zuul.client.create(turn.path, ephemeral=True, makepath=True)
    refused(Reason.BUSY, lambda: leases.ask(["fake-label"], terms))
    assert leases.ask(["fake-label"], replace(terms, owner="bob")).state is LeaseState.WAITING, (
        "others do not wait"
    )
    bench.zuul.client.delete(turn.path)
    assert leases.ask(["fake-label"], terms).state is LeaseState.WAITING


def test_request_is_not_created_without_the_turn(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is lost before the transaction, as with the session."""
    path, run, runs = turn_of(bench.zuul.client, "alice").path, bench.zk.writer.run, []

    def interfere(txn: Any, *args: Any) -> Any:
        runs.append(txn)
        if len(runs) == 1:
            bench.zuul.client.delete(path)
            leases.ask(["fake-label"], replace(ALICE, key="job-2"))
        return run(txn, *args)

    monkeypatch.setattr(bench.zk.writer, "run", interfere)
    refused(
        Reason.TOO_MANY, lambda: leases.ask(["fake-label"], replace(ALICE, key="job-1"), most=1)
    )
    assert len(bench.zk.getNodeRequests()) == 1


def test_request_is_withdrawn_if_the_session_of_the_turn_has_ended(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction was sent in a later session: what it deleted may have been the mark of
    another server.
    """
    kazoo, run = bench.zk.kazoo_client, bench.zk.writer.run

    def renew_session(txn: Any, *args: Any) -> Any:
        results = run(txn, *args)
        monkeypatch.setattr(type(kazoo), "client_id", property(lambda _kazoo: (1, b"another")))
        return results

    monkeypatch.setattr(bench.zk.writer, "run", renew_session)
    with pytest.raises(SessionExpiredError):
        leases.ask(["fake-label"], replace(ALICE, key="job-1"))
    assert bench.zuul.client.get_children("/nodepool/requests") == []


def test_node_whose_lock_is_lost_is_not_changed(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = held(bench, leases)
    node_id, run = lease.nodes[0].id or "", bench.zk.writer.run

    def lose(txn: Any, *args: Any) -> Any:
        if bench.zuul.contenders(node_id):
            bench.zuul.client.delete(f"/nodepool/nodes/{node_id}/lock", recursive=True)
        else:  # so that it is locked
            bench.zuul.write_node(node_id, comment="somebody was here")
        return run(txn, *args)

    monkeypatch.setattr(bench.zk.writer, "run", lose)
    refused(Reason.UNAVAILABLE, lambda: leases.renew(lease.id, 7200))
    assert bench.zuul.node(node_id)["hold_expiration"] == 3600


def test_node_that_is_lost_does_not_end_the_lease(bench: LauncherBench, leases: Leases) -> None:
    lease = held(bench, leases, "fake-label", "fake-label")
    gone, stays = (node.id or "" for node in lease.nodes)
    bench.zuul.write_node(gone, state="used")
    bench.wait_gone(gone)
    found = leases.renew(lease.id, 7200)
    assert [node.id for node in found.nodes] == [stays] and found.lost == 1


def test_locked_node_ends_at_the_end_of_the_lease(
    bench: LauncherBench, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.lease.leases.LOCK", 0.2)
    lease = held(bench, leases, "fake-label", "fake-label")
    locked, free = (node.id or "" for node in lease.nodes)
    bench.zuul.lock(locked)
    refused(Reason.UNAVAILABLE, lambda: leases.give_back(lease.id))
    bench.wait_gone(free)
    refused(Reason.UNAVAILABLE, lambda: leases.renew(lease.id, 7200))
    bench.zuul.unlock(locked)
    leases.give_back(lease.id)
    bench.wait_gone(locked)


def test_autoholds_and_holds_of_nobody_are_listed(bench: LauncherBench, leases: Leases) -> None:
    bench.ready_node(
        "p",
        "main",
        "a",
        state=HOLD,
        hold_job="acme project job",
        comment="look at it",
        hold_expiration=600,
    )
    bench.ready_node("p", "main", "a", state=HOLD)
    zuul, nobody = leases.all()
    assert (zuul.terms.owner, zuul.terms.purpose) == (
        "zuul",
        "look at it acme project job",
    ) and zuul.ends is not None
    assert (nobody.terms.owner, nobody.ends) == ("nobody", None)


@pytest.mark.parametrize(
    "data",
    [None, "x", [], {"lease": None}, {"lease": {}}, {"lease": {"owner": 7}}, {"zuul_system": "z"}],
)
def test_foreign_user_data_is_no_lease(data: object) -> None:
    assert Terms.read(data) is None


def test_terms_survive_json_and_odd_values() -> None:
    terms = Terms("alice", "unix:1000", "p", 1.5, 2, "k", "s", 3, {"a": 1})
    assert Terms.read(json.loads(json.dumps(terms.stored()))) == terms
    odd = Terms.read(
        {
            "lease": {
                "owner": "a",
                "created": "x",
                "size": True,
                "renewed": None,
                "notes": [],
                "key": 5,
            }
        }
    )
    assert odd == Terms("a", "unknown")


def test_request_of_others_with_the_data_of_a_lease_is_no_lease(
    bench: LauncherBench, leases: Leases
) -> None:
    request = NodeRequest()
    request.state, request.node_types, request.requestor, request.requestor_data = (
        "requested",
        ["a"],
        "zuul",
        ALICE.stored(),
    )
    bench.zk.storeNodeRequest(request)
    assert leases.get(request.id or "") is None and leases.all() == []
    assert (
        not leases.give_back(request.id or "")
        and bench.zk.getNodeRequest(request.id or "") is not None
    )


def test_request_that_failed_is_a_failed_lease(bench: LauncherBench, leases: Leases) -> None:
    bench.start(config(provider()))
    lease = leases.ask(["nobody-has-it"], ALICE)
    wait_for(
        lambda: [found.state for found in leases.all()] == [LeaseState.FAILED], 20, "the failure"
    )
    assert leases.give_back(lease.id)

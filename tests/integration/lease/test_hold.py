"""``nodepool hold --for``: a node becomes a lease without a request (spec: lease, section 4)."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError, user
from nodepool.lease import LeaseError, Leases, Reason, Terms
from nodepool.zk.records import DELETING, HOLD, USED
from tests.support.launcher import LauncherBench

Nodepool = Callable[..., tuple[str, str]]


@pytest.fixture
def nodepool(bench: LauncherBench, capsys: pytest.CaptureFixture[str]) -> Nodepool:
    """Run a command; return what it printed to standard output and standard error."""
    path = bench.config({"labels": [], "providers": []})

    def nodepool(*args: str, status: int = 0) -> tuple[str, str]:
        assert nodepoolcmd.main(["-c", path, *args]) == status
        printed = capsys.readouterr()
        return printed.out, printed.err

    return nodepool


def test_hold_without_options_has_neither_owner_nor_end(bench: LauncherBench, nodepool: Nodepool) -> None:
    node = bench.ready_node("p", "main", "a", allocated_to="200-0000000001", comment="stays")
    before = bench.zuul.node(node.id)
    nodepool("hold", node.id)
    after = bench.zuul.node(node.id)
    changed = {key for key in after if after[key] != before[key]}
    assert changed == {"state", "state_time"} and after["state"] == HOLD


def test_held_node_becomes_a_lease_of_the_caller(bench: LauncherBench, nodepool: Nodepool) -> None:
    node = bench.ready_node("p", "main", "a")
    out, _err = nodepool("hold", node.id, "--for", "8h", "--purpose", "look at it")
    assert "hold" in out
    [lease] = Leases(bench.zk).all()
    assert (lease.id, lease.terms.owner, lease.terms.purpose) == (f"node-{node.id}", user(), "look at it")
    assert lease.ends == pytest.approx(time.time() + 8 * 3600, abs=30)
    stored = bench.zuul.node(node.id)
    assert (stored["hold_expiration"], stored["comment"]) == (8 * 3600, f"lease {user()}: look at it")
    assert bench.zuul.contenders(node.id) == []


def test_held_node_is_renewed_and_returned_by_its_lease_id(bench: LauncherBench, nodepool: Nodepool) -> None:
    node = bench.ready_node("p", "main", "a")
    nodepool("hold", node.id, "--for", "10m")
    lease_id = f"node-{node.id}"
    assert lease_id in nodepool("lease", "list")[0] and node.id in nodepool("lease", "show", lease_id)[0]
    nodepool("lease", "renew", lease_id, "--for", "2h")
    [lease] = Leases(bench.zk).all()
    assert lease.ends == pytest.approx(time.time() + 7200, abs=30) and lease.terms.renewed == 1
    nodepool("lease", "return", lease_id)
    assert bench.node(node.id).state == USED and Leases(bench.zk).all() == []


def test_nodes_of_one_request_are_held_as_separate_leases(bench: LauncherBench, nodepool: Nodepool) -> None:
    nodes = [bench.ready_node("p", "main", "a", state=HOLD, hold_job="job", allocated_to="200-0000000001") for _ in range(2)]
    _out, err = nodepool("hold", *[node.id for node in nodes], "--for", "1h")
    assert err.count("Zuul may still end it") == 2
    leases = Leases(bench.zk).all()
    assert [(lease.id, lease.lost) for lease in leases] == [(f"node-{node.id}", 0) for node in nodes]


def test_user_data_of_others_stays(bench: LauncherBench, nodepool: Nodepool) -> None:
    """Zuul counts the resources of held nodes by its own key."""
    node = bench.ready_node("p", "main", "a", state=HOLD, user_data={"zuul_system": "z", "project_name": "p"})
    nodepool("hold", node.id, "--for", "1h")
    Leases(bench.zk).renew(f"node-{node.id}", 7200)
    data = bench.zuul.node(node.id)["user_data"]
    assert (data["zuul_system"], data["project_name"], data["lease"]["renewed"]) == ("z", "p", 1)


@pytest.mark.parametrize("state", [USED, DELETING, "in-use", "building"])
def test_only_ready_and_held_nodes_can_be_leased(bench: LauncherBench, nodepool: Nodepool, state: str) -> None:
    node = bench.ready_node("p", "main", "a", state=state)
    with pytest.raises(LeaseError, match=f"Node {node.id} is {state}"):
        nodepool("hold", node.id, "--for", "1h")
    assert bench.node(node.id).state == state and bench.zuul.contenders(node.id) == []


def test_leased_node_cannot_be_leased_by_another(bench: LauncherBench, nodepool: Nodepool) -> None:
    data = Terms("bob", "unix:1001").stored()
    node = bench.ready_node("p", "main", "a", state=HOLD, allocated_to="200-0000000007", user_data=data, hold_expiration=600)
    with pytest.raises(LeaseError, match="belongs to lease 200-0000000007 of bob"):
        nodepool("hold", node.id, "--for", "1h")
    assert bench.zuul.node(node.id)["hold_expiration"] == 600


@pytest.mark.parametrize("options", [["--for", "10s"], ["--for", "59"], ["--purpose", "x"]])
def test_impossible_options_change_nothing(bench: LauncherBench, nodepool: Nodepool, options: list[str]) -> None:
    node = bench.ready_node("p", "main", "a")
    with pytest.raises((CommandError, LeaseError)):
        nodepool("hold", node.id, *options)
    assert bench.node(node.id).state == "ready"


def test_hold_of_zuul_can_be_renewed_and_returned(bench: LauncherBench) -> None:
    node = bench.ready_node("p", "main", "a", state=HOLD, hold_job="job", hold_expiration=600, user_data={"zuul_system": "z"})
    leases, lease_id = Leases(bench.zk), f"node-{node.id}"
    assert leases.renew(lease_id, 7200).ends == pytest.approx(time.time() + 7200, abs=30)
    stored = bench.zuul.node(node.id)
    assert (stored["user_data"], stored["hold_job"]) == ({"zuul_system": "z"}, "job")
    with pytest.raises(LeaseError) as refused:
        leases.describe(lease_id, "mine")
    assert refused.value.reason is Reason.BAD_REQUEST
    assert leases.give_back(lease_id) and bench.node(node.id).state == USED


def test_hold_without_end_cannot_be_renewed_but_returned(bench: LauncherBench) -> None:
    node = bench.ready_node("p", "main", "a", state=HOLD)
    leases, lease_id = Leases(bench.zk), f"node-{node.id}"
    with pytest.raises(LeaseError, match="has no end"):
        leases.renew(lease_id, 7200)
    assert leases.give_back(lease_id) and bench.node(node.id).state == USED


def test_deletion_of_a_leased_node_names_owner_and_end(bench: LauncherBench, nodepool: Nodepool) -> None:
    data = Terms("bob", "unix:1001").stored()
    leased = bench.ready_node("p", "main", "a", state=HOLD, allocated_to="200-0000000007", user_data=data, hold_expiration=7200)
    free = bench.ready_node("p", "main", "a")
    _out, err = nodepool("delete", leased.id, free.id)
    assert err.count("\n") == 1 and "bob" in err and "200-0000000007" in err and "1 h 59 min" in err
    assert [bench.node(node.id).state for node in (leased, free)] == [DELETING, DELETING]
